"""Kernels of rotary position embeddings."""
