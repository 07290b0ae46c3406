"""Planning of users' own kernels for ``shield``: facts about their sources, arguments and launches.

This package contains no kernels.
"""
