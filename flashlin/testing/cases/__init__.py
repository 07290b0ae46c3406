"""The cases of every op, by family: the one table behind the tests, doctor --run and the GPU records."""
from __future__ import annotations

from flashlin.testing.cases import conv, delta, gla, mamba, norm, pointwise, recurrent, simple_gla
from flashlin.testing.compare import Case

CASES: tuple[Case, ...] = (*simple_gla.CASES, *delta.CASES, *gla.CASES, *recurrent.CASES, *norm.CASES, *conv.CASES, *pointwise.CASES, *mamba.CASES)
