"""Differences between machines and between releases of Triton, torch and other packages.

The modules here describe machines (``target``), releases (``releases``, ``versions``) and known failures
(``known``). They also start kernels (``launch``) and child processes (``subprocesses``).
"""
