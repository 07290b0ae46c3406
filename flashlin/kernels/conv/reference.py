"""Reference of the short convolution, token by token in float64, for tests of all implementations."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.oracle import before, token_by_token


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
             initial_state: Tensor | None = None, activation: str | None = None,
             cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the short convolution y [B, T, D] and its final state [N, D, W]; both are differentiable.

    y_t = act(bias + sum_w weight[:, w] x_{t - W + 1 + w}) + residual_t

    Slot w of a state contains token w - W of its sequence. The shapes are: x, residual [B, T, D], weight [D,
    W], bias [D], initial_state [N, D, W]. Rows of y that belong to no sequence are zero.
    """
    def step(window: Tensor, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([window[:, 1:], x[:, None]], 1)
        z = (window * weight).sum(-1) + (0 if bias is None else bias.double())
        return window, (z / (1 + (-z).exp()) if activation else z) + residual
    x, weight = x.double(), weight.double()
    tokens = {"x": x, "residual": torch.zeros_like(x) if residual is None else residual.double()}
    return token_by_token(step, tokens, before(initial_state, x, cu_seqlens, *weight.shape), cu_seqlens)


def shift(x: Tensor, cache: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x_{t - 1} - x_t [B, T, D] and the last tokens [N, D]; both are differentiable.

    cache: [N, D], the token before the first token of each sequence; None for zeros.
    """
    def step(last: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, last - x
    return token_by_token(step, {"x": x.double()}, before(cache, x, cu_seqlens, *x.shape[2:]), cu_seqlens)
