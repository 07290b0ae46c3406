"""Recipe of the short convolution: its launches and their tiles.

In a Problem, K is the number of channels D, and V is the width W of the filters. A row is one token of any
sequence of the batch. This module is plain Python: it needs no tensors, torch or triton.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, having, moving

FAR = 2**20  # largest stride between rows of x, in elements; rows that are farther apart are copied
CHANNELS = 128  # limit of the channels per program, unless a Config sets another limit


class Config(NamedTuple):
    """The configuration of a kernel of the short convolution.

    elements: tokens times channels of a program, for filters with up to 4 taps. The loads of all taps are in
        flight at once, so wider filters get smaller tiles to save registers.
    channels: largest number of channels per program.
    num_warps: warps of a program.
    per_sm: programs per multiprocessor, if each takes several blocks of rows; 0 for one program per block.
    """
    elements: int
    channels: int = CHANNELS
    num_warps: int = 4
    per_sm: int = 0


# Programs for the gradient of the weights have one warp, because several warps would have to synchronise for
# each sum over rows.
ROWS, WEIGHTS = Config(4096), Config(1024, channels=256, num_warps=1, per_sm=10)


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the launches of forward and then of backward.

    The option "fixed" marks constant filters, as in ``token_shift``. They get no gradient.
    """
    made = [_rows("conv_forward", ROWS, problem, target)]
    if "final_state" in problem.options:
        made.append(_states("conv_state", problem))
    if problem.needs_grad and "fixed" not in problem.options:
        made.append(_rows("conv_backward_weights", WEIGHTS, problem, target))
    if problem.needs_grad:
        made.append(_rows("conv_backward_x", ROWS, problem, target))
        if "initial_state" in problem.options:
            made.append(_states("conv_backward_state", problem))
    return tuple(made)


def _rows(kernel: str, config: Config, problem: Problem, target: Target) -> Launch:
    """Return a launch in which a program computes BT tokens and BD channels at a time.

    If the Config has ``per_sm``, the number of programs is limited, and each takes several blocks of tokens.
    """
    BD, BW = block(problem.K, 16, config.channels), block(problem.V)
    BT = max(1, config.elements // max(1, BW // 4) // BD)
    strips, blocks = cdiv(problem.K, BD), cdiv(problem.B * problem.T, BT)
    if config.per_sm:
        blocks = min(blocks, cdiv(config.per_sm * target.sms, strips))
    # This bound on shared memory was measured. It covers one fp32 tile, which warps exchange, and the sums of
    # each warp.
    return moving(kernel, problem, strips * blocks, dict(BT=BT, BD=BD, BW=BW), shared=4 * BT * BD + 4096,
                  span=BT * FAR, num_warps=config.num_warps)


def _states(kernel: str, problem: Problem) -> Launch:
    """Return a launch in which a program computes BD channels of one sequence's state, with all W slots."""
    BD, BW = block(problem.K, 16, CHANNELS), block(problem.V)
    return moving(kernel, problem, problem.N * cdiv(problem.K, BD), dict(BD=BD, BW=BW),
                  shared=4 * BD * BW + 4096, span=problem.K * problem.V)


MAX_WIDTH = 16  # limit of the taps per filter, because loops over taps are unrolled
AXES, LIMITS = {"K": "channels", "V": "taps of a filter"}, (Limit("V", MAX_WIDTH, "filters of {} taps"),)
_TYPICAL = {"training": Sizes(4, 2048, K=4096, V=4),
            "packed": Sizes(1, 32768, K=4096, V=4, N=16, packed=True)}
DECODING = {"decoding": Sizes(64, 1, K=4096, V=4)}
_SHIFTS = {use: sizes._replace(V=2) for use, sizes in {**_TYPICAL, **DECODING}.items()}
SPECS = (
    Family("conv", launches, (
        Op("causal_conv1d", "conv", options=("bias", "silu")),
        Op("causal_conv1d_update", "conv", options=("silu",), family="conv_update",
           in_place="causal_conv1d of one token"),
        Op("token_shift", "token_shift", options=("fixed",), typical=_SHIFTS),
        Op("causal_conv1d_fn", "causal_conv1d", options=("bias", "silu"))),
        axes=AXES, typical={**_TYPICAL, **DECODING}, counted=having(H=1), limits=LIMITS),
    Family("conv_update", lambda problem, target: (_states("conv_update", problem),), axes=AXES,
           typical=DECODING, counted=having(T=1, H=1), limits=LIMITS))
