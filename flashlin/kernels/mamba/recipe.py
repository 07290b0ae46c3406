"""The launches and tiles of the decoding steps of a Mamba layer.

In problems of the state update, H is the number of heads, V the head's size P, and K the state's size N. In
problems of the convolution, K is the number of channels D, and V the width W. Plain Python: this module
imports neither torch nor triton.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.conv.recipe import AXES, CHANNELS, DECODING, LIMITS
from flashlin.kernels.elementwise import block, cdiv, having, moving

STATE_UPDATE, WINDOW = "state_update", "conv_window"
ELEMENTS = 2048  # state elements per program, which is 16 per thread


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the single launch of a decoding step.

    The state update has one program for each sequence, head and strip of state rows. The convolution has one
    program for each sequence and strip of channels.
    """
    if problem.family == STATE_UPDATE:
        BN = block(problem.K, 16)
        BP = block(problem.V, 1, max(1, ELEMENTS // BN))
        tile, elements, programs = dict(BP=BP, BN=BN), BP * BN, problem.H * cdiv(problem.V, BP)
    else:
        BD = block(problem.K, 16, CHANNELS)
        tile, elements, programs = dict(BD=BD), BD * block(problem.V, 16), cdiv(problem.K, BD)
    # Shared memory: the sums of each warp, and at most one exchange of a tile between warps. Only the offsets
    # within a tile have 32 bits.
    return (moving(problem.family, problem, problem.N * programs, tile, shared=4 * elements + 4096,
                   span=elements),)


MAX_STATE = 4096  # columns of a state; one program sums over all of them
SPECS = (
    Family(WINDOW, launches,
           (Op("mamba_causal_conv1d_update", "causal_conv1d", in_place="causal_conv1d_fn"),),
           axes=AXES, typical=DECODING, counted=having(H=1), limits=LIMITS),
    Family(STATE_UPDATE, launches, (Op("selective_state_update", "state_update", in_place="plain torch"),),
           axes={"K": "columns of a head's state", "V": "size of a head"},
           typical={"decoding": Sizes(128, 1, 80, 128, 64)}, counted=having(T=1),
           limits=(Limit("K", MAX_STATE, "states of {} columns"),)))
