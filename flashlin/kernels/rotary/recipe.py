"""Which launches a rotary embedding makes, and with which tiles. Plain Python: no tensor, no torch, no
triton.

A Problem has T tokens, through the whole batch, of H heads of K channels, of which V pairs are rotated.
Forward and backward are one kernel.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Op, Sizes
from flashlin.guards.problem import Launch, Problem

ELEMENTS, COLUMNS, WARPS = 2048, 512, 4  # pairs of a program, of which at most COLUMNS belong to one row
FAR = 2**20  # elements from one token to the next; tokens that lie farther apart are copied


def strips(D: int, R: int, BR: int) -> tuple[int, int]:
    """How many strips of BR pairs are rotated, and how many of 2 BR channels are copied because they are
    not."""
    return -(-R // BR), -(-(D - 2 * R) // (2 * BR))


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    BR = min(max(8, 1 << (problem.V - 1).bit_length()), COLUMNS)
    BT = ELEMENTS // BR
    traits = frozenset({"bf16"}) if problem.dtype == "bfloat16" and problem.dot == "native" else frozenset()
    warps = WARPS if problem.max_warps >= 8 else min(WARPS, problem.max_warps)
    # shared: what is measured is an exchange of a tile between warps
    programs, span = -(-problem.T * problem.H // BT) * sum(strips(problem.K, problem.V,
                                                                  BR)), (BT // max(problem.H, 1) + 1) * FAR
    return (Launch("rotary", (programs,), warps, 1, (("BT", BT), ("BR", BR)), 8 * ELEMENTS + 4096,
                   max(span, (BT + problem.H) * problem.K), traits),)


def counted(sizes: Sizes) -> Sizes:
    return Sizes(1, sizes.B * sizes.T, sizes.H, sizes.K, sizes.V or max(sizes.K // 2, 1), packed=sizes.packed)


SPECS = (Family(
    "rotary", launches, (Op("rotary_embedding", "rotary"),),
    axes={"K": "channels of a head", "V": "pairs of them that are rotated"},
    typical={"training": Sizes(1, 16384, 32, 128), "packed": Sizes(1, 32768, 32, 128, packed=True),
             "decoding": Sizes(1, 64, 32, 128)},
    counted=counted),)
