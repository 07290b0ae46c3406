"""Elementwise ops whose parameters belong to columns: gates, and the small steps of RWKV-7."""
