"""Kernels of the short convolution, which is causal and has one filter per channel."""
