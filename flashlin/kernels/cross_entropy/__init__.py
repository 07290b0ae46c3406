"""Kernels of the cross entropy over a vocabulary."""
