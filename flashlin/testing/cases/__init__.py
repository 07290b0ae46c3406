"""The cases of every op, by family: the one table behind the tests, doctor --run and the GPU records."""
from __future__ import annotations

from flashlin.testing.cases import conv, cross_entropy, delta, dplr, gla, hgrn, norm, norm_linear, pointwise, recurrent, rotary, simple_gla
from flashlin.testing.compare import Case

CASES: tuple[Case, ...] = tuple(case for family in (simple_gla, delta, gla, dplr, recurrent, hgrn, norm, conv, pointwise, norm_linear, rotary,
                                                    cross_entropy) for case in family.CASES)
