"""The delta families: delta rule, gated delta rule, Comba."""
