"""The doctor and explain functions, with their probes, checks, typical calls and report.

``doctor`` says what works on this machine. ``explain`` says how one call would run.
"""
