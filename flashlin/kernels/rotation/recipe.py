"""Recipe of Mamba-3's rotation: its launches and their tiles, in plain Python without torch or triton.

Its Problem has N sequences of T tokens and H heads of K channels. V is the number of channel pairs that are
rotated.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.configs import is_hopper
from flashlin.kernels.elementwise import block, cdiv, moving

FAMILY = "rotation"
BT = 32  # tokens per chunk; one program sums the angles of a chunk
BS = 32  # chunks that turn_carry adds in one step
# The rotation runs with WARPS; the sums run with FEWER, and so do the backward kernels on Hopper. There they
# took 402 us instead of 463 us on an H200 (benchmarks/notes/mamba.md). On other GPUs, the backward kernels
# would spill 1 KB per thread or more with 2 warps.
WARPS, FEWER = 4, 2
SHARED = 16  # limit of the heads whose gradients one program adds; larger groups are divided into slices


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the launches of the forward rotation and, if gradients are needed, of its backward."""
    BR = block(problem.V, 4)
    rest = problem.K - 2 * BR  # channels that are not rotated
    pairs = dict(BT=BT, BR=BR, BX=block(rest, 4) if rest > 0 else 0)
    chunks = cdiv(problem.T, BT) * problem.N * problem.H
    # Shared memory is for one layout conversion of a tile. Only offsets within a tile are 32-bit numbers.
    far = BT * problem.H * problem.K

    def launch(kernel: str, tile: dict[str, int], programs: int = chunks, num_warps: int = WARPS) -> Launch:
        return moving(kernel, problem, programs, tile, shared=8 * BT * block(problem.K, 4) + 4096, span=far,
                      num_warps=num_warps)
    forward = (launch("turn_totals", dict(BT=BT, BR=BR), num_warps=FEWER),
               launch("turn_carry", dict(BT=BT, BS=BS, BR=BR), problem.N * problem.H), launch("turn", pairs))
    if not problem.needs_grad:
        return forward
    warps = FEWER if is_hopper(target) else WARPS
    back = [launch("turn_back", dict(BT=BT, BR=BR), num_warps=warps)]
    if rest > 0:
        back.append(launch("turn_back_rest", pairs, num_warps=warps))
    return (*forward, *back, launch("turn_finish", dict(BT=BT, BR=BR)))


SPECS = (Family(FAMILY, launches, axes={"K": "channels of a head", "V": "pairs of them that are turned"},
                limits=(Limit("K", 512, "heads of {} channels"),)),)
