"""Trials of kernels in child processes before this process launches them.

``flashlin warmup`` runs trials. The first call of an op also runs one if its kernels have not been run on
this kind of GPU.
"""
