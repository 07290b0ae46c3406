"""States that an op overwrites must have separate memory for each element.

Expanded and overlapping states raise an error that names the argument.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlin

N, H, P, D, W = 2, 3, 4, 6, 4
ones = torch.ones


def state_update(state: torch.Tensor) -> Any:
    return flashlin.selective_state_update(state, ones(N, H, P), ones(N, H, P), -ones(H, P, D), ones(N, H, D),
                                           ones(N, H, D))


def recurrent(state: torch.Tensor) -> Any:
    q = ones(N, 1, H, P)
    return flashlin.fused_recurrent_delta_rule(q, q, ones(N, 1, H, D), initial_state=state,
                                               inplace_state=True)


def rotary(x: torch.Tensor) -> Any:
    return flashlin.rotary_embedding(x, ones(P, D // 2), ones(P, D // 2), inplace=True)


WINDOW, STATE = (N, D, W), (N, H, P, D)
CALLS: dict[str, tuple[str, tuple[int, ...], Callable[[torch.Tensor], Any]]] = {
    "selective_state_update": ("state", STATE, state_update),
    "fused_recurrent_delta_rule": ("initial_state", STATE, recurrent),
    "causal_conv1d_update": ("cache", WINDOW,
                             lambda cache: flashlin.causal_conv1d_update(ones(N, D), cache,
                                                                         weight=ones(D, W))),
    "mamba_causal_conv1d_update": ("conv_state", WINDOW,
                                   lambda state: flashlin.mamba_causal_conv1d_update(ones(N, D), state,
                                                                                     ones(D, W))),
    "causal_conv1d_fn": ("final_states_out", WINDOW, lambda out: flashlin.causal_conv1d_fn(
        ones(N, D, 5), ones(D, W + 1), return_final_states=True, final_states_out=out)),
    "rotary_embedding": ("x", (N, P, H, D), rotary)}


@pytest.mark.parametrize("op", CALLS)
def test_what_lies_on_itself_is_refused_by_name(op: str) -> None:
    name, shape, call = CALLS[op]
    for dim in range(len(shape)):
        expanded = torch.zeros([1 if i == dim else size for i, size in enumerate(shape)]).expand(shape)
        with pytest.raises(ValueError, match=f"{name}: got strides .*need"):
            call(expanded)
    windows = torch.zeros(100).as_strided(shape, (1,) * len(shape))
    with pytest.raises(ValueError, match=f"{name}: got strides .*need"):
        call(windows)
    call(torch.zeros(shape))


# without fused_recurrent_delta_rule, because its pools must be contiguous
@pytest.mark.parametrize("op", [op for op in CALLS if op != "fused_recurrent_delta_rule"])
def test_what_only_lies_far_apart_or_turned_round_is_written_through(op: str) -> None:
    _, shape, call = CALLS[op]
    whole = torch.full([2 * size for size in reversed(shape)], 0.5)
    view = whole[tuple(slice(None, None, 2) for _ in shape)].permute(*reversed(range(len(shape))))
    before = whole.clone()
    call(view)
    plain = torch.full(shape, 0.5)
    call(plain)
    assert view.equal(plain) and not view.equal(torch.full(shape, 0.5))
    view.fill_(0.5)
    assert whole.equal(before)
