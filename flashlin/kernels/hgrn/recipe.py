"""Which launches HGRN's recurrence makes, and with which tiles. Plain Python: no tensor, no torch, no triton.

A Problem's K is the number of channels D, each of which is a recurrence of its own; V is the same. The op
only moves memory: what counts is how much of it is under way, so where sequences and channels are few,
sequences are split into segments.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, moving

# tokens and channels of a block; a program is one warp, so that a scan over tokens needs no barriers
BT, BD = 16, 64
# programs for each multiprocessor: with fewer than the one, sequences are split until there are the other
ENOUGH, WANTED = 3, 8
SHORTEST = 8 * BT  # tokens of a segment


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launches and backward's. Both share the kernel that computes what each segment leaves
    behind."""
    S = segments(problem, target)
    made = [_launch("hgrn_ends", problem, S - 1)] if S > 1 else []
    made.append(_launch("hgrn_forward", problem, S))
    if problem.needs_grad:
        made.append(_launch("hgrn_backward", problem, S))
    return tuple(made)


def segments(problem: Problem, target: Target) -> int:
    """Into how many segments each sequence is split. The second reading of the inputs that this costs has to
    pay."""
    programs = max(1, problem.N * strips(problem.K))
    if problem.invariant or programs >= ENOUGH * target.sms:
        return 1
    return max(1, min(cdiv(WANTED * target.sms, programs), problem.T // SHORTEST))


def strips(D: int) -> int:
    """Programs that D channels take."""
    return cdiv(D, block(D, 16, BD))


def _launch(kernel: str, problem: Problem, segments: int) -> Launch:
    width = block(problem.K, 16, BD)
    # shared: tiles that change their layout
    return moving(kernel, problem, (problem.batch_part or problem.N) * segments * strips(problem.K),
                  dict(BT=BT, BD=width), shared=8 * BT * width + 1024, span=BT * problem.K, num_warps=1)


def counted(sizes: Sizes) -> Sizes:
    return sizes._replace(H=1, V=sizes.K)


SPECS = (Family(
    "hgrn", launches, (Op("chunk_hgrn", "hgrn"), Op("fused_recurrent_hgrn", "hgrn")),
    axes={"K": "channels, of each of which the state is one number"},
    typical={"training": Sizes(4, 2048, K=4096), "packed": Sizes(1, 32768, K=4096, N=16, packed=True),
             "decoding": Sizes(64, 1, K=4096)},
    counted=counted),)
