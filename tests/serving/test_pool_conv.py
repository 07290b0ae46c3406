"""Tests of flashlin.serving's convolutions: pieces of prompts, then tokens and drafts, with one pool.

The results are compared with one convolution of the whole sequence.
"""
from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from flashlin import serving
from flashlin.testing.compare import poisoned

D, W, SLOTS = 6, 4, 6


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return silu of the causal convolution of one request, x [T, D], in float64, tap by tap."""
    padded = torch.cat([x.new_zeros(W - 1, D), x]).double()
    y = bias.double() + sum(padded[w:w + len(x)] * weight[:, w].double() for w in range(W))
    return y / (1 + (-y).exp())


def call(x: torch.Tensor, pool: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], indices: list[int],
         lengths: list[int], has: list[bool], seqlens: list[int] | None) -> torch.Tensor:
    with torch.no_grad(), poisoned():
        return serving.causal_conv1d_prefill(
            x[None], pool, *weights, torch.tensor(indices, dtype=torch.int32),
            torch.tensor([0, *accumulate(lengths)]), torch.tensor(has, dtype=torch.bool), "silu",
            None if seqlens is None else torch.tensor(seqlens))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("L", [W - 1, W + 2], ids="L={}".format)
@pytest.mark.parametrize("ring", [False, True], ids=["shifted", "ring"])
def test_pieces_then_tokens_then_drafts(ring: bool, L: int, dtype: torch.dtype) -> None:
    """Two requests, with padding between them, match the convolution of the whole sequence.

    They run in pieces of several lengths, then token by token. With a ring buffer, they run with drafts, some
    of which are rejected.
    """
    weights = torch.randn(D, W), torch.randn(D)
    x = {slot: torch.randn(40, D).to(dtype) for slot in (4, 1)}
    wanted = {slot: whole(rows, *weights) for slot, rows in x.items()}
    pool = torch.randn(SLOTS, D, L).to(dtype)
    before, done = pool.clone(), {4: 0, 1: 0}
    allowed = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-2)
    for a, b in ((1, 0), (1, 7), (2, 0), (0, 1), (9, 2), (5, 5)):
        parts = [x[4][done[4]:done[4] + a], torch.randn(2, D).to(dtype), x[1][done[1]:done[1] + b]]
        y = call(torch.cat(parts), pool, weights, [4, SLOTS, 1], [a, 2, b], [done[4] > 0, True, done[1] > 0],
                 [done[4], 3, done[1]] if ring else None)
        torch.testing.assert_close(y[:a].double(), wanted[4][done[4]:done[4] + a], **allowed)
        torch.testing.assert_close(y[a + 2:].double(), wanted[1][done[1]:done[1] + b], **allowed)
        assert not y[a:a + 2].any()
        done[4], done[1] = done[4] + a, done[1] + b
        assert done[1] or torch.equal(pool[1], before[1]), "a request without tokens leaves its slot as it is"
    drafts = L - (W - 1) if ring else 0
    for step in range(6):
        T = 1 + drafts
        rows = torch.stack([x[slot][done[slot]:done[slot] + T] for slot in (4, 1)] + [torch.randn(T, D)
                                                                                  .to(dtype)])
        accepted = 1 + step % T
        rows[:, accepted:] = torch.randn(3, T - accepted, D).to(dtype)  # rejected drafts
        more: dict[str, Any] = dict(cache_seqlens=torch.tensor([done[4], done[1], 0])) if ring else {}
        y = serving.causal_conv1d_update(rows.mT, pool, *weights, "silu",
                                         conv_state_indices=torch.tensor([4, 1, -1]), **more)
        for n, slot in enumerate((4, 1)):
            torch.testing.assert_close(y[n, :, :accepted].mT.double(),
                                       wanted[slot][done[slot]:done[slot] + accepted], **allowed)
            done[slot] += accepted
        assert not y[2].any()
    rest = [0, 2, 3, 5]
    assert torch.equal(pool[rest], before[rest])


def test_a_piece_after_tokens_goes_on_from_them() -> None:
    weights, x = (torch.randn(D, W), torch.randn(D)), torch.randn(9, D)
    pool = torch.randn(2, D, W)
    call(x[:3], pool, weights, [1], [3], [False], None)
    serving.causal_conv1d_update(x[3:4], pool, *weights, "silu", conv_state_indices=torch.tensor([1]))
    y = call(x[4:], pool, weights, [1], [5], [True], None)
    torch.testing.assert_close(y.double(), whole(x, *weights)[4:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("N", "rows", "slots"), [(0, 0, 3), (2, 0, 3), (2, 2, 0)])
def test_nothing_to_do(N: int, rows: int, slots: int) -> None:
    pool = torch.randn(slots, D, W)
    before = pool.clone()
    y = call(torch.randn(rows, D), pool, (torch.randn(D, W), torch.randn(D)), [*range(N)],
             [rows // N] * N if N else [], [True] * N, None)
    assert y.shape == (rows, D) and not y.any() and torch.equal(pool, before)


@pytest.mark.parametrize(("changed", "error", "said"), [
    ({"x": torch.zeros(3, D)}, ValueError, r"x: got shape \[3, 6\], need \[1, total, D\]"),
    ({"conv_state": torch.zeros(SLOTS, D, W - 2)}, ValueError, "conv_state: got L = 2 tokens"),
    ({"conv_state": torch.zeros(SLOTS, D + 1, W)}, ValueError, "conv_state: got shape"),
    ({"conv_state": torch.zeros(1, D, W).expand(SLOTS, D, W)}, ValueError, "conv_state: got strides"),
    ({"weight": torch.zeros(D, W).requires_grad_()}, ValueError, "require gradients"),
    ({"conv_state_indices": torch.zeros(3, dtype=torch.int32)}, ValueError, "conv_state_indices: got shape"),
    ({"cu_seqlens": None}, TypeError, "cu_seqlens: got NoneType"),
    ({"has_initial_state": torch.tensor([1, 1])}, TypeError, "has_initial_state: got torch.int64"),
    ({"cache_seqlens": torch.tensor([1.0, 2.0])}, TypeError, "cache_seqlens: got torch.float32"),
    ({"activation": "gelu"}, ValueError, "activation: got 'gelu'"),
], ids=str)
def test_a_wrong_argument_is_named(changed: dict[str, Any], error: type[Exception], said: str) -> None:
    given = dict(x=torch.zeros(1, 3, D), conv_state=torch.zeros(SLOTS, D, W), weight=torch.zeros(D, W),
                 bias=None, conv_state_indices=torch.tensor([0, 1]), cu_seqlens=torch.tensor([0, 1, 3]),
                 has_initial_state=torch.tensor([True, False]))
    with pytest.raises(error, match=said):
        serving.causal_conv1d_prefill(**{**given, **changed})
