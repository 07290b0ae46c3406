"""The short convolution in float64, token by token, written from the mathematics. Everything else is checked
against it."""
from __future__ import annotations

import torch


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
             residual: torch.Tensor | None = None, initial_state: torch.Tensor | None = None,
             silu: bool = False, cu_seqlens: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [B, T, D], final state [N, D, W]) in float64, differentiable. x [B, T, D], weight [D, W], bias [D],
    initial_state [N, D, W].

    y_t = act(bias + sum_w weight[:, w] x_{t - W + 1 + w}) + residual_t, where the state's slot w holds token
    w - W of its sequence.
    """
    B, T, D = x.shape
    W = weight.shape[1]
    edges = None if cu_seqlens is None else cu_seqlens.tolist()
    spans = [(b, 0, T) for b in range(B)] if edges is None else [(0, edges[n], edges[n + 1])
                                                                 for n in range(len(edges) - 1)]
    rows = [[x.new_zeros(D, dtype=torch.float64)] * T for _ in range(B)]
    # unbind: the gradient of an index into x would be as large as x
    tokens = [row.unbind(0) for row in x.double()]
    added = [row.unbind(0) for row in (torch.zeros_like(x) if residual is None else residual).double()]
    taps = weight.double().unbind(1)
    states = []
    for n, (b, start, end) in enumerate(spans):
        zeros = x.new_zeros(D, W, dtype=torch.float64)
        window = list((zeros if initial_state is None else initial_state[n].double()).unbind(1))
        for t in range(start, end):
            window = [*window[1:], tokens[b][t]]
            z = sum((taps[w] * window[w] for w in range(W)), zeros[:, 0] if bias is None else bias.double())
            z = z / (1 + (-z).exp()) if silu else z
            rows[b][t] = z + added[b][t]
        states.append(torch.stack(window, 1))
    y = torch.stack([torch.stack(row) for row in rows]) if B and T else x.new_zeros(B, T, D,
                                                                                    dtype=torch.float64)
    return y, torch.stack(states) if states else x.new_zeros(0, D, W, dtype=torch.float64)


def shift(x: torch.Tensor, cache: torch.Tensor | None = None,
          cu_seqlens: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_{t - 1} - x_t [B, T, D], last tokens [N, D]) in float64, differentiable; before a sequence's first
    token comes its cache [N, D], or 0."""
    B, T, D = x.shape
    edges = None if cu_seqlens is None else cu_seqlens.tolist()
    spans = [(b, 0, T) for b in range(B)] if edges is None else [(0, edges[n], edges[n + 1])
                                                                 for n in range(len(edges) - 1)]
    rows = [[x.new_zeros(D, dtype=torch.float64)] * T for _ in range(B)]
    lasts = []
    for n, (b, start, end) in enumerate(spans):
        last = x.new_zeros(D, dtype=torch.float64) if cache is None else cache[n].double()
        for t in range(start, end):
            rows[b][t], last = last - x[b, t].double(), x[b, t].double()
        lasts.append(last)
    y = torch.stack([torch.stack(row) for row in rows]) if B and T else x.new_zeros(B, T, D,
                                                                                    dtype=torch.float64)
    return y, torch.stack(lasts) if lasts else x.new_zeros(0, D, dtype=torch.float64)
