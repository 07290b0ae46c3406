"""The delta families with a decay for each key channel: DPLR (RWKV-7, IPLR), KDA, Gated DeltaNet 2."""
