"""Recipe of the rotary embedding: its launch and its tiles.

In a Problem, T is the number of tokens of the whole batch. Each has H heads of K channels, and V pairs of
these channels are rotated. Forward and backward use one kernel. This module is plain Python: it needs no
tensors, torch or triton.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, moving

ELEMENTS, COLUMNS = 2048, 512  # pairs of a program; at most COLUMNS of them belong to one row
FAR = 2**20  # largest stride between tokens, in elements; tokens that are farther apart are copied


def strips(D: int, R: int, BR: int) -> tuple[int, int]:
    """Return the number of strips of BR rotated pairs, and the number of strips of 2 BR copied channels.

    A head has D channels and R rotated pairs.
    """
    return cdiv(R, BR), cdiv(D - 2 * R, 2 * BR)


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the launch of the rotary embedding; forward and backward have the same one."""
    BR = block(problem.V, 8, COLUMNS)
    BT = ELEMENTS // BR
    span = max((BT // max(problem.H, 1) + 1) * FAR, (BT + problem.H) * problem.K)
    # This bound on shared memory was measured. It covers one fp32 tile, which warps exchange.
    return (moving("rotary", problem, cdiv(problem.T * problem.H, BT) * sum(strips(problem.K, problem.V, BR)),
                   dict(BT=BT, BR=BR), shared=8 * ELEMENTS + 4096, span=span),)


SPECS = (Family(
    "rotary", launches, (Op("rotary_embedding", "rotary"),),
    axes={"K": "channels of a head", "V": "pairs of them that are rotated"},
    typical={"training": Sizes(1, 16384, 32, 128), "packed": Sizes(1, 32768, 32, 128, packed=True),
             "decoding": Sizes(1, 64, 32, 128)},
    # All tokens are in one row. By default K // 2 pairs are rotated.
    counted=lambda sizes: sizes._replace(B=1, T=sizes.B * sizes.T, V=sizes.V or max(sizes.K // 2, 1), N=0)),)
