"""Which launches a rotation by running angles makes, and with which tiles. Plain Python: no tensor, no torch,
no triton.

A Problem has N sequences of T tokens, H heads of K channels, of which V pairs are turned.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.configs import is_hopper
from flashlin.kernels.elementwise import block, cdiv, moving

FAMILY = "rotation"
BT = 32  # tokens of a chunk, whose angles are summed by one program
BS = 32  # chunks that are added up at a time
# Of the rotation; of its sums, and, on Hopper, of the way back, which took 402 us for 463 on an H200
# (benchmarks/NOTES.md). On other cards the way back by 2 would spill 1 KB a thread and more.
WARPS, FEWER = 4, 2
SHARED = 16  # heads of a group, at most, whose gradients a program adds up


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """The sums of chunks, what is carried from chunk to chunk and the rotation; then the way back."""
    BR = block(problem.V, 4)
    rest = problem.K - 2 * BR  # channels that are not turned
    pairs = dict(BT=BT, BR=BR, BX=block(rest, 4) if rest > 0 else 0)
    chunks = cdiv(problem.T, BT) * problem.N * problem.H
    # shared: one exchange of a tile between threads; offsets in 32 bits are those of a tile
    far = BT * problem.H * problem.K

    def launch(kernel: str, tile: dict[str, int], programs: int = chunks, num_warps: int = WARPS) -> Launch:
        return moving(kernel, problem, programs, tile, shared=8 * BT * block(problem.K, 4) + 4096, span=far,
                      num_warps=num_warps)

    def carried() -> Launch:
        return launch("turn_carry", dict(BT=BT, BS=BS, BR=BR), problem.N * problem.H)
    forward = (launch("turn_totals", dict(BT=BT, BR=BR), num_warps=FEWER), carried(), launch("turn", pairs))
    if not problem.needs_grad:
        return forward
    warps = FEWER if is_hopper(target) else WARPS
    back = [launch("turn_back", dict(BT=BT, BR=BR), num_warps=warps)]
    if rest > 0:
        back.append(launch("turn_back_rest", pairs, num_warps=warps))
    return (*forward, *back, launch("turn_finish", dict(BT=BT, BR=BR)))


SPECS = (Family(FAMILY, launches, axes={"K": "channels of a head", "V": "pairs of them that are turned"},
                limits=(Limit("K", 512, "heads of {} channels"),)),)
