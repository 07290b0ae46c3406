"""HGRN's recurrence in float64, token by token, written from the mathematics. Everything else is checked
against it."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.spans import spans_of


def recurrence(x: Tensor, g: Tensor, h0: Tensor | None = None,
               cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_t = e^{g_t} h_{t-1} + x_t: (all h [B, T, D], final states [N, D]) in float64, differentiable. x, g
    [B, T, D], h0 [N, D] or zeros. Tokens of no sequence are zero."""
    B, T, D = x.shape
    spans = spans_of(B, T, cu_seqlens)
    x, g = x.double(), g.double()
    h0 = x.new_zeros(len(spans), D) if h0 is None else h0.double()
    o, last = torch.zeros_like(x), h0.clone()
    for n, (b, first, end) in enumerate(spans):
        states = [h0[n]]
        for x_t, g_t in zip(x[b, first:end], g[b, first:end], strict=True):
            states.append(g_t.exp() * states[-1] + x_t)
        o[b, first:end] = torch.stack(states)[1:]
        last[n] = states[-1]
    return o, last
