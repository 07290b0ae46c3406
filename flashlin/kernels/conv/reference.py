"""The short convolution in float64, written from the mathematics. Everything else is checked against it."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.spans import spans_of


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    silu: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [B, T, D], final state [N, D, W]) in float64, differentiable. x, residual [B, T, D], weight [D, W],
    bias [D], initial_state [N, D, W]. Tokens of no sequence are zero.

    y_t = act(bias + sum_w weight[:, w] x_{t - W + 1 + w}) + residual_t, where the state's slot w holds token
    w - W of its sequence.
    """
    B, T, _ = x.shape
    D, W = weight.shape
    spans = spans_of(B, T, cu_seqlens)
    x, weight = x.double(), weight.double()
    states = x.new_zeros(len(spans), D, W) if initial_state is None else initial_state.double().clone()
    y = torch.zeros_like(x)
    for n, (b, first, end) in enumerate(spans):
        tokens = torch.cat([states[n].mT, x[b, first:end]])
        windows = tokens.unfold(0, W, 1)[1:]  # [tokens, D, W]; without the first, which is the state
        z = (windows * weight).sum(-1) + (0 if bias is None else bias.double())
        z = z / (1 + (-z).exp()) if silu else z
        y[b, first:end] = z + (0 if residual is None else residual[b, first:end].double())
        states[n] = tokens[-W:].mT
    return y, states


def shift(x: Tensor, cache: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x_{t - 1} - x_t [B, T, D], last tokens [N, D]) in float64, differentiable; before a sequence's first
    token comes its cache [N, D], or 0."""
    B, T, D = x.shape
    spans = spans_of(B, T, cu_seqlens)
    x = x.double()
    lasts = x.new_zeros(len(spans), D) if cache is None else cache.double().clone()
    y = torch.zeros_like(x)
    for n, (b, first, end) in enumerate(spans):
        tokens = torch.cat([lasts[n, None], x[b, first:end]])
        y[b, first:end] = tokens[:-1] - tokens[1:]
        lasts[n] = tokens[-1]
    return y, lasts
