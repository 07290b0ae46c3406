"""Which launches Mamba's selective scan makes, and with which tiles. Plain Python: no tensor, no torch, no
triton.

Of a Problem V is the number of channels, H that of the groups which share B and C, and K that of a channel's
states N. A program is a strip of channels with all their states, in registers: 16 elements of them a thread,
and at most 8 warps, so that their decays fit in as well.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit, Op, Sizes, Unsupported
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, moving

FAMILY = "selective"
BD = 32  # channels of a program, at most
SEGMENT = 32  # tokens between states that forward keeps for backward
PER_THREAD = 16


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launch and backward's."""
    kernels = ("selective_forward", "selective_backward") if problem.needs_grad else ("selective_forward",)
    BN, groups = block(problem.K, 4), max(problem.H, 1)
    rows = min(BD, 8 * 32 * PER_THREAD // BN)
    strips = groups * cdiv(problem.V // groups, rows)
    # shared: sums of each warp, and at most one exchange of a tile between threads; in 32 bits are the places
    # of B's and C's states, which are T apart where their tokens are together
    return tuple(moving(kernel, problem, problem.N * strips, dict(BN=BN, BD=rows),
                        shared=8 * BN * rows + 4096, span=BN * max(rows, problem.T),
                        num_warps=max(1, BN * rows // (32 * PER_THREAD))) for kernel in kernels)


def kept(T: int) -> int:
    """States that forward keeps of each channel: one before each segment but the first."""
    return max(0, T - 1) // SEGMENT


def columns_of(states: int) -> int:
    """Columns of the tensors in which kernels keep states: rows begin at multiples of 16 bytes."""
    return -(-states // 4) * 4


MAX_STATES = 256  # of a channel, which are all in one program's registers
SPECS = (Family(
    FAMILY, launches, (Op("selective_scan_fn", "selective_scan"),),
    axes={"H": "groups that share B and C", "K": "states of a channel", "V": "channels"},
    typical={"training": Sizes(4, 2048, 1, 16, 5120)},
    limits=(Limit("K", MAX_STATES, "{} states of a channel"),),
    unsupported=(Unsupported("fixed", "B or C of shape [D, N]", "B and C with a token dimension"),)),)
