"""Which launches a rotary embedding makes, and with which tiles. Plain Python: no tensor, no torch, no
triton.

A Problem has T tokens, through the whole batch, of H heads of K channels, of which V pairs are rotated.
Forward and backward are one kernel.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, moving

ELEMENTS, COLUMNS = 2048, 512  # pairs of a program, of which at most COLUMNS belong to one row
FAR = 2**20  # elements from one token to the next; tokens that lie farther apart are copied


def strips(D: int, R: int, BR: int) -> tuple[int, int]:
    """How many strips of BR pairs are rotated, and how many of 2 BR channels are copied because they are
    not."""
    return cdiv(R, BR), cdiv(D - 2 * R, 2 * BR)


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    BR = block(problem.V, 8, COLUMNS)
    BT = ELEMENTS // BR
    span = max((BT // max(problem.H, 1) + 1) * FAR, (BT + problem.H) * problem.K)
    # shared: what is measured is an exchange of a tile between warps
    return (moving("rotary", problem, cdiv(problem.T * problem.H, BT) * sum(strips(problem.K, problem.V, BR)),
                   dict(BT=BT, BR=BR), shared=8 * ELEMENTS + 4096, span=span),)


def counted(sizes: Sizes) -> Sizes:
    return Sizes(1, sizes.B * sizes.T, sizes.H, sizes.K, sizes.V or max(sizes.K // 2, 1), packed=sizes.packed)


SPECS = (Family(
    "rotary", launches, (Op("rotary_embedding", "rotary"),),
    axes={"K": "channels of a head", "V": "pairs of them that are rotated"},
    typical={"training": Sizes(1, 16384, 32, 128), "packed": Sizes(1, 32768, 32, 128, packed=True),
             "decoding": Sizes(1, 64, 32, 128)},
    counted=counted),)
