"""Which launches a problem with a decay for each key channel makes. Plain Python: no tensor, no torch, no triton."""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.problem import Launch, Problem
from flashlin.kernels.recurrent import recipe as recurrent


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Of the chunked form none yet: guards/limits.py sends it to the torch path."""
    return recurrent.launches(problem, target) if problem.mode == "fused_recurrent" else ()
