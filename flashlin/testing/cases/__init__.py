"""The cases of every op, by family: the one table behind the tests, doctor --run and the GPU records."""
from __future__ import annotations

from flashlin.testing.cases import (
    conv,
    cross_entropy,
    delta,
    dplr,
    gla,
    hgrn,
    mamba,
    norm,
    norm_linear,
    pointwise,
    recurrent,
    rotary,
    rwkv6,
    simple_gla,
)
from flashlin.testing.compare import Case

FAMILIES = (simple_gla, delta, gla, rwkv6, dplr, recurrent, hgrn, norm, conv, pointwise, norm_linear, rotary, cross_entropy,
            mamba)
CASES: tuple[Case, ...] = tuple(case for family in FAMILIES for case in family.CASES)
