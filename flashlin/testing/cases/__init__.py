"""The cases of every op, by family: the one table behind the tests, doctor --run and the GPU records."""
from __future__ import annotations

from flashlin.testing.cases import conv, delta, dplr, gla, norm, pointwise, recurrent, simple_gla
from flashlin.testing.compare import Case

CASES: tuple[Case, ...] = (*simple_gla.CASES, *delta.CASES, *gla.CASES, *dplr.CASES, *recurrent.CASES, *norm.CASES, *conv.CASES, *pointwise.CASES)
