"""Kernels of elementwise ops: gates, small steps of RWKV-7, and steps before and after scans of Mamba."""
