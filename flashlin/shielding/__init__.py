"""Checks and remedies of flashlin's own kernels, applied to a user's Triton kernels.

The package shields a single kernel, a function that launches several kernels, or an autotuner.
"""
