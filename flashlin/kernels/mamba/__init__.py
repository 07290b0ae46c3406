"""The decoding steps of Mamba layers: one token of the state space model, a few tokens of the convolution.

The scan of Mamba2 over many tokens is in kernels/simple_gla.
"""
