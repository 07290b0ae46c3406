"""Kernels of the recurrence of HGRN, in which each channel has its own decay per token."""
