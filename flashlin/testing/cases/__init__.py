"""The cases of every op, by family: the one table behind the tests, doctor --run and the GPU records."""
from __future__ import annotations

from flashlin.testing.cases import conv, delta, dplr, gla, hgrn, norm, pointwise, recurrent, simple_gla
from flashlin.testing.compare import Case

CASES: tuple[Case, ...] = tuple(case for family in (simple_gla, delta, gla, dplr, recurrent, hgrn, norm, conv, pointwise) for case in family.CASES)
