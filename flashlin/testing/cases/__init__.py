"""The cases of every op, by family: the one table behind the tests, doctor --run and the GPU records."""
from __future__ import annotations

from flashlin.testing.cases import conv, cross_entropy, delta, gla, norm, norm_linear, pointwise, recurrent, rotary, simple_gla
from flashlin.testing.compare import Case

CASES: tuple[Case, ...] = (*simple_gla.CASES, *delta.CASES, *gla.CASES, *recurrent.CASES, *norm.CASES, *conv.CASES, *pointwise.CASES,
                           *norm_linear.CASES, *rotary.CASES, *cross_entropy.CASES)
