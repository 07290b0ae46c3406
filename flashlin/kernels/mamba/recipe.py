"""Which launches the decoding steps of a Mamba layer make, and with which tiles. Plain Python: no tensor, no
torch, no triton.

Of a state update H counts heads, V is the head's size P and K the state's size N; of a convolution's K is the
channels D and V the width W.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit, Op, Sizes
from flashlin.guards.problem import Launch, Problem
from flashlin.kernels.conv.recipe import AXES, DECODING, LIMITS, UPDATE, counted

STATE_UPDATE, WINDOW = "state_update", "conv_window"
ELEMENTS = 2048  # of the state in a program: 16 a thread


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """A program for each sequence, head and strip of its rows; or for each sequence and strip of channels."""
    if problem.family == STATE_UPDATE:
        BN = max(16, _power(problem.K))
        BP = max(1, min(_power(problem.V), ELEMENTS // BN))
        return (_launch("state_update", problem, problem.H * -(-problem.V // BP), (("BP", BP), ("BN", BN)),
                        BP * BN),)
    BD = min(max(16, _power(problem.K)), UPDATE.BD)
    return (_launch("conv_window", problem, -(-problem.K // BD), (("BD", BD),),
                    BD * max(16, _power(problem.V))),)


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _launch(kernel: str, problem: Problem, of_sequence: int, tile: tuple[tuple[str, int], ...],
            elements: int) -> Launch:
    # shared: sums of each warp, and at most one exchange of a tile between warps; offsets in 32 bits are
    # those of a tile
    traits = frozenset({"bf16"}) if problem.dtype == "bfloat16" and problem.dot == "native" else frozenset()
    warps = 4 if problem.max_warps >= 8 else min(4, problem.max_warps)
    return Launch(kernel, (problem.N * of_sequence,), warps, 1, tile, 4 * elements + 4096, elements, traits)


def _one_token(sizes: Sizes) -> Sizes:
    return sizes._replace(T=1)


MAX_STATE = 4096  # columns of a state, which a program adds up
SPECS = (
    Family(WINDOW, launches,
           (Op("mamba_causal_conv1d_update", "causal_conv1d", in_place="causal_conv1d_fn"),),
           axes=AXES, typical=DECODING, counted=counted, limits=LIMITS),
    Family(STATE_UPDATE, launches, (Op("selective_state_update", "state_update", in_place="plain torch"),),
           axes={"K": "columns of a head's state", "V": "size of a head"},
           typical={"decoding": Sizes(128, 1, 80, 128, 64)}, counted=_one_token,
           limits=(Limit("K", MAX_STATE, "states of {} columns"),)))
