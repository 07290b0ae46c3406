"""HGRN's recurrence in float64, token by token, written from the mathematics. Everything else is checked
against it."""
from __future__ import annotations

import torch


def recurrence(x: torch.Tensor, g: torch.Tensor, h0: torch.Tensor | None = None,
               cu_seqlens: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = e^{g_t} h_{t-1} + x_t: (all h [B, T, D], final states [N, D]) in float64, differentiable. x, g
    [B, T, D], h0 [N, D] or zeros."""
    B, T, D = x.shape
    edges = None if cu_seqlens is None else cu_seqlens.tolist()
    spans = [(b, 0, T) for b in range(B)] if edges is None else [(0, edges[n], edges[n + 1])
                                                                 for n in range(len(edges) - 1)]
    rows = [[x.new_zeros(D, dtype=torch.float64)] * T for _ in range(B)]
    states = []
    for n, (b, first, end) in enumerate(spans):
        h = x.new_zeros(D, dtype=torch.float64) if h0 is None else h0[n].double()
        for t in range(first, end):
            h = g[b, t].double().exp() * h + x[b, t].double()
            rows[b][t] = h
        states.append(h)
    o = torch.stack([torch.stack(row) for row in rows]) if B and T else x.new_zeros(B, T, D,
                                                                                    dtype=torch.float64)
    return o, torch.stack(states) if states else x.new_zeros(0, D, dtype=torch.float64)
