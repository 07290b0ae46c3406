"""The recurrences of Mamba2 and Mamba and the steps around them in float64, token by token, written from the
mathematics. Everything else, ``kernels/selective`` too, is checked against it."""
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

Tensor = torch.Tensor


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def step_size(dt: Tensor, bias: Tensor | None, softplus: bool,
              limit: tuple[float, float] = (-math.inf, math.inf)) -> Tensor:
    dt = dt if bias is None else dt + bias
    dt = torch.logaddexp(dt, torch.zeros_like(dt)) if softplus else dt
    return dt.clamp(*limit)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    h0: Tensor | None = None,
    seq_idx: Tensor | None = None,
    edges: list[int] | None = None,
    softplus: bool = False,
    limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(y [b, T, H, P], the state after each row [b, H, P, N], and with edges that at the end of each packed
    sequence [n, H, P, N]): h_t = e^{dt_t A} h_{t-1} + dt_t x_t B_t^T,  y_t = (h_t C_t + D x_t) silu(z_t).

    x, z [b, T, H, P], dt [b, T, H], A, dt_bias [H], B, C [b, T, G, N], D [H] or [H, P], h0 [b, H, P, N]. The
    state is zero before a token whose seq_idx [b, T] is not that of the token before it, and before each of
    the edges but the first.
    """
    b, T, H, P = x.shape
    G, N = B.shape[2:]
    dt = step_size(dt, dt_bias, softplus, limit)
    skip = torch.zeros(H, 1, dtype=x.dtype,
                       device=x.device) if D is None else D if D.ndim == 2 else D[:, None]
    of_head = [head // (H // G) for head in range(H)]
    rows, finals, ends = [], [], []
    for i in range(b):
        state = x.new_zeros(H, P, N) if h0 is None else h0[i]
        spans = [(0, T)] if edges is None else list(pairwise(edges))
        found, last = [], state
        for n, (first, end) in enumerate(spans):
            state = torch.zeros_like(state) if n else state
            for t in range(first, end):
                if t > first and seq_idx is not None and seq_idx[i, t] != seq_idx[i, t - 1]:
                    state = torch.zeros_like(state)
                new = (dt[i, t, :, None] * x[i, t])[:, :, None] * B[i, t, of_head][:, None, :]
                state = (dt[i, t] * A).exp()[:, None, None] * state + new
                found.append((state * C[i, t, of_head][:, None, :]).sum(-1) + skip * x[i, t])
                last = state
            ends.append(state)
        rows.append(torch.stack(found) if found else x.new_zeros(0, H, P))
        finals.append(last)
    y = torch.stack(rows) if rows else torch.zeros_like(x)
    y = y if z is None else y * silu(z)
    return y, torch.stack(finals) if finals else x.new_zeros(0, H, P,
                                                             N), None if edges is None else torch.stack(ends)


def selective(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y [b, D, T], the last state [b, D, N]) of Mamba's scan: h_t = e^{dt_t A} h_{t-1} + dt_t u_t B_t,  y_t
    = (h_t . C_t + D u_t) silu(z_t).

    u, delta, z [b, D, T], A [D, N], B, C [b, N, T], [b, G, N, T] or [D, N], D, bias [D].
    """
    dt = step_size(delta, None if bias is None else bias[:, None], softplus)

    def by_token(x: Tensor, i: int) -> Sequence[Tensor]:
        """[D, N] for each token."""
        if x.ndim == 2:
            return [x] * u.shape[2]
        groups = x[i, None] if x.ndim == 3 else x[i]
        return torch.stack([groups[d // (len(A) // len(groups))] for d in range(len(A))]).unbind(2)
    rows, lasts = [], []
    for i in range(u.shape[0]):
        h, columns = torch.zeros_like(A), []
        for steps, x, b_t, c_t in zip(dt[i].unbind(1), u[i].unbind(1), by_token(B, i), by_token(C, i),
                                      strict=True):
            h = (steps[:, None] * A).exp() * h + (steps * x)[:, None] * b_t
            columns.append((h * c_t).sum(1) + (0 if D is None else D * x))
        rows.append(torch.stack(columns, 1) if columns else u[i] * dt[i])
        lasts.append(h)
    y = torch.stack(rows)
    return y if z is None else y * silu(z), torch.stack(lasts)


def step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y [b, H, P], state [b, H, P, N]) after one token. x, dt, z [b, H, P], A [H, P, N], B, C [b, G, N], D,
    dt_bias [H, P]."""
    dt = step_size(dt, dt_bias, softplus)
    heads = state.shape[1] // max(B.shape[1], 1)
    B, C = (m.repeat_interleave(heads, 1) for m in (B, C))
    state = (dt[..., None] * A).exp() * state + (dt * x)[..., None] * B[:, :, None]
    y = (state * C[:, :, None]).sum(-1)
    y = y if D is None else y + D * x
    return y if z is None else y * silu(z), state


def window(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None,
           seqlens: Tensor | None = None, silu_: bool = False) -> tuple[Tensor, Tensor]:
    """(y [b, D, T], state [b, D, L]) after T tokens of the convolution. A sequence's state is its last L
    tokens, the newest last; with seqlens [b] a ring, in which token t of the whole sequence has slot t mod
    L."""
    b, D, T = x.shape
    L, W = state.shape[2], weight.shape[1]
    ys, states = [], []
    for i in range(b):
        slots = list(state[i].unbind(1))
        # oldest first
        past = slots if seqlens is None else [slots[(int(seqlens[i]) + j) % L] for j in range(L)]
        columns = []
        for t in range(T):
            past = [*past, x[i, :, t]]
            value = sum((weight[:, w] * past[len(past) - W + w] for w in range(W)),
                        torch.zeros_like(x[i, :, t]) if bias is None else bias)
            columns.append(silu(value) if silu_ else value)
            if seqlens is not None:
                slots[(int(seqlens[i]) + t) % L] = x[i, :, t]
        states.append(torch.stack(past[len(past) - L:] if seqlens is None else slots, 1))
        ys.append(torch.stack(columns, 1) if columns else x.new_zeros(D, 0))
    return (torch.stack(ys), torch.stack(states)) if ys else (torch.zeros_like(x), state.clone())
