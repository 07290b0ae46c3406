"""Kernels tried in child processes before this one starts them: ``flashlin warmup``, and the first call of an
op whose kernels nobody has run."""
