"""Kernels of the user's own: what their launches are, as facts. There is no kernel here."""
