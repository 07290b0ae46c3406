"""Recipe of HGRN's recurrence: its launches and their tiles.

In a Problem, K and V are both the number of channels D. Each channel is an independent recurrence. The
kernels are limited by memory bandwidth, so many loads must be in flight at once. If there are few sequences
and channels, sequences are therefore split into segments. This module is plain Python: it needs no tensors,
torch or triton.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, moving

# Tokens and channels of a block. A program is one warp, so that a scan over tokens needs no barriers.
BT, BD = 16, 64
# Programs per multiprocessor: with fewer than ENOUGH, sequences are split until there are about WANTED.
ENOUGH, WANTED = 3, 8
SHORTEST = 8 * BT  # fewest tokens of a segment


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the launches of forward and then of backward.

    Both directions use ``hgrn_ends``, which computes the transfers of segments, so it is listed once.
    """
    S = segments(problem, target)
    made = [_launch("hgrn_ends", problem, S - 1)] if S > 1 else []
    made.append(_launch("hgrn_forward", problem, S))
    if problem.needs_grad:
        made.append(_launch("hgrn_backward", problem, S))
    return tuple(made)


def segments(problem: Problem, target: Target) -> int:
    """Return the number of segments of each sequence.

    In split sequences, ``hgrn_ends`` reads the inputs a second time. Sequences are therefore split only if
    the GPU has too few programs otherwise.
    """
    programs = max(1, problem.N * strips(problem.K))
    if problem.invariant or programs >= ENOUGH * target.sms:
        return 1
    return max(1, min(cdiv(WANTED * target.sms, programs), problem.T // SHORTEST))


def strips(D: int) -> int:
    """Return the number of programs for D channels of a segment."""
    return cdiv(D, block(D, 16, BD))


def _launch(kernel: str, problem: Problem, segments: int) -> Launch:
    width = block(problem.K, 16, BD)
    # Shared memory is for tiles that change their layout.
    return moving(kernel, problem, (problem.batch_part or problem.N) * segments * strips(problem.K),
                  dict(BT=BT, BD=width), shared=8 * BT * width + 1024, span=BT * problem.K, num_warps=1)


SPECS = (Family(
    "hgrn", launches, (Op("chunk_hgrn", "hgrn"), Op("fused_recurrent_hgrn", "hgrn")),
    axes={"K": "channels, of each of which the state is one number"},
    typical={"training": Sizes(4, 2048, K=4096), "packed": Sizes(1, 32768, K=4096, N=16, packed=True),
             "decoding": Sizes(64, 1, K=4096)},
    counted=lambda sizes: sizes._replace(H=1, V=sizes.K)),)
