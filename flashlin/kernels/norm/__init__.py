"""Kernels of the row-wise normalisations: layer norm, RMS norm, l2 norm and group norm."""
