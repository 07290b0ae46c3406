"""Mamba-3's rotation of channel pairs of q and k by angles that accumulate along a sequence."""
