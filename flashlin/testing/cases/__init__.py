"""The cases of every op, by family: the one table behind the tests, doctor --run and the GPU records."""
from __future__ import annotations

from flashlin.testing.cases import conv, delta, gla, norm, pointwise, recurrent, rwkv6, simple_gla
from flashlin.testing.compare import Case

CASES: tuple[Case, ...] = (*simple_gla.CASES, *delta.CASES, *gla.CASES, *rwkv6.CASES, *recurrent.CASES, *norm.CASES, *conv.CASES, *pointwise.CASES)
