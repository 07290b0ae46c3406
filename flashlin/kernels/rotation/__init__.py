"""Rotations by running sums of angles: Mamba-3's."""
