"""The kernels of the delta rule, the gated delta rule, gated DeltaProduct and Comba, chunk by chunk."""
