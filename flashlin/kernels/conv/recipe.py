"""Which launches a short convolution makes, and with which tiles. Plain Python: no tensor, no torch, no
triton.

A Problem's K is the number of channels D, its V the width W of the filters. Rows are tokens of any sequence
of the batch.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Limit, Op, Sizes
from flashlin.guards.problem import Launch, Problem

FAR = 2**20  # elements from one row of x to the next; rows that lie farther apart are copied


class Config(NamedTuple):
    """Programs of ``elements`` (tokens times channels, of which at most BD), so many warps, and per
    multiprocessor if rows are shared out.

    elements: of filters with up to 4 taps. All taps' loads are under way at once, so wider filters get
    smaller tiles for their registers.
    """
    elements: int
    BD: int
    num_warps: int
    per_sm: int = 0


ROWS, WEIGHTS, UPDATE = Config(4096, 128, 4), Config(2048, 128, 4, 6), Config(128, 128, 4)


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launches, then backward's; fixed filters get no gradient."""
    found = [_rows("conv_forward", ROWS, problem, target)]
    if "final_state" in problem.options:
        found.append(_states("conv_state", problem))
    if problem.needs_grad:
        found += [] if "fixed" in problem.options else [_rows("conv_backward_weights", WEIGHTS, problem,
                                                              target)]
        found.append(_rows("conv_backward_x", ROWS, problem, target))
        if "initial_state" in problem.options:
            found.append(_states("conv_backward_state", problem))
    return tuple(found)


def launches_of_update(problem: Problem, target: Target) -> tuple[Launch, ...]:
    return (_states("conv_update", problem),)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _rows(kernel: str, config: Config, problem: Problem, target: Target) -> Launch:
    """Programs of BT tokens and BD channels; the weights' are so few that each takes every so many-th block
    of tokens."""
    BD = min(max(16, _power(problem.K)), config.BD)
    BT = max(1, config.elements // max(1, _power(problem.V) // 4) // BD)
    strips, blocks = -(-problem.K // BD), -(-problem.B * problem.T // BT)
    if config.per_sm:
        blocks = min(blocks, -(-config.per_sm * target.sms // strips))
    tile = (("BT", BT), ("BD", BD), *((("BW", _power(problem.V)),) if config.per_sm else ()))
    return _launch(kernel, config, problem, strips * blocks, tile, BT * BD, BT * FAR)


def _states(kernel: str, problem: Problem) -> Launch:
    """Programs of one sequence and BD channels, all W slots of each."""
    BD, BW = min(max(16, _power(problem.K)), UPDATE.BD), _power(problem.V)
    return _launch(kernel, UPDATE, problem, problem.N * -(-problem.K // BD), (("BD", BD), ("BW", BW)),
                   BD * BW, problem.K * problem.V)


def _launch(kernel: str, config: Config, problem: Problem, programs: int, tile: tuple[tuple[str, int], ...],
            elements: int, span: int) -> Launch:
    # shared: what is measured is one exchange of a tile between warps, and the sums of each warp
    traits = frozenset({"bf16"}) if problem.dtype == "bfloat16" and problem.dot == "native" else frozenset()
    warps = config.num_warps if problem.max_warps >= 8 else min(config.num_warps, problem.max_warps)
    return Launch(kernel, (programs,), warps, 1, tile, 4 * elements + 4096, span, traits)


def counted(sizes: Sizes) -> Sizes:
    return sizes._replace(H=1)


def one_token(sizes: Sizes) -> Sizes:
    return sizes._replace(T=1, H=1)


MAX_WIDTH = 16  # taps of a filter, which are unrolled
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
        axes=AXES, typical={**_TYPICAL, **DECODING}, counted=counted, limits=LIMITS),
    Family("conv_update", launches_of_update, axes=AXES, typical=DECODING, counted=one_token, limits=LIMITS))
