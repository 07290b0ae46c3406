"""Benchmarks: the measured calls, the method of measurement, and the recorded results."""
