"""Recipe of Mamba's selective scan: its launches and their tiles, in plain Python without torch or triton.

In its Problem, V is the number of channels, H the number of groups that share B and C, and K the number N of
states per channel. One program computes a strip of channels and keeps all their states in registers. A thread
has 16 elements of the states, and a program has at most 8 warps, so that the decays also fit in registers.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit, Op, Sizes, Unsupported
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, moving

FAMILY = "selective"
BD = 32  # limit of the channels per program
SEGMENT = 32  # tokens between two states that the forward keeps for the backward
PER_THREAD = 16  # elements of the states per thread


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the forward launch and, if gradients are needed, the backward launch."""
    kernels = ("selective_forward", "selective_backward") if problem.needs_grad else ("selective_forward",)
    BN, groups = block(problem.K, 4), max(problem.H, 1)
    rows = min(BD, 8 * 32 * PER_THREAD // BN)
    strips = groups * cdiv(problem.V // groups, rows)
    # Shared memory is for the sums of each warp and for at most one layout conversion of a tile. The kernels
    # compute the offsets of the BN states in B and C in 32 bits. The span bounds these offsets: with
    # contiguous tokens, states are T elements apart.
    return tuple(moving(kernel, problem, problem.N * strips, dict(BN=BN, BD=rows),
                        shared=8 * BN * rows + 4096, span=BN * max(rows, problem.T),
                        num_warps=max(1, BN * rows // (32 * PER_THREAD))) for kernel in kernels)


def kept(T: int) -> int:
    """Return how many states of each channel the forward keeps: one before each segment except the first."""
    return max(0, T - 1) // SEGMENT


def columns_of(states: int) -> int:
    """Return the columns of a tensor with ``states`` states per row: the next multiple of 4.

    So rows of float32 begin at multiples of 16 bytes.
    """
    return -(-states // 4) * 4


MAX_STATES = 256  # limit of the states per channel, because one program has all of them in registers
SPECS = (Family(
    FAMILY, launches, (Op("selective_scan_fn", "selective_scan"),),
    axes={"H": "groups that share B and C", "K": "states of a channel", "V": "channels"},
    typical={"training": Sizes(4, 2048, 1, 16, 5120)},
    limits=(Limit("K", MAX_STATES, "{} states of a channel"),),
    unsupported=(Unsupported("fixed", "B or C of shape [D, N]", "B and C with a token dimension"),)),)
