"""The delta families with a decay for each key channel: DPLR (RWKV-7, IPLR), KDA and Gated DeltaNet 2."""
