"""HGRN's recurrence in plain, differentiable torch, for CPUs, float64 and cards that no Triton compiles for.
No loop over tokens: spans of 1, 2, 4, ... tokens are joined, each being a pair (a, x) that turns h into a h +
x, so nothing is divided by a decay."""
from __future__ import annotations

import torch

Tensor = torch.Tensor


def run(x: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o [B, T, D], states [N, D]) in float32, or float64 if a tensor is. bounds, on whichever device, are
    not read on the host."""
    compute = torch.float64 if torch.float64 in (x.dtype, g.dtype) else torch.float32
    x, g = x.to(compute), g.to(compute)
    N = x.shape[0] if bounds is None else bounds.shape[0] - 1
    h0 = x.new_zeros(N, x.shape[2]) if h0 is None else h0.to(compute)
    if x.shape[1] == 0 or N == 0:
        return torch.where(x.new_ones(1, dtype=torch.bool), 0, x + g), h0.clone()  # zeros, but with gradients
    if bounds is not None:
        return _packed(x, g, h0, bounds)
    a = g.exp()
    o = joined(a, torch.cat([x[:, :1] + a[:, :1] * h0[:, None], x[:, 1:]], 1))
    return o, o[:, -1].clone()


def _packed(x: Tensor, g: Tensor, h0: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """One row in which no sequence is joined with the one before, and each starts from its own state. Rows of
    no sequence are zeros."""
    rows, N = torch.arange(x.shape[1], device=x.device), h0.shape[0]
    of = torch.searchsorted(bounds, rows.to(bounds.dtype), right=True) - 1
    inside = ((of >= 0) & (of < N))[:, None]
    n = of.clamp(0, N - 1)
    first = (rows == bounds[n])[:, None] & inside
    x, a = torch.where(inside, x, 0), torch.where(inside, g, 0).exp()
    o = joined(a, x + torch.where(first, a * h0[n], 0), of)
    o = torch.where(inside, o, 0)
    ends = torch.where((bounds[1:] > bounds[:-1])[:, None], o[0, (bounds[1:] - 1).clamp(min=0)], h0)
    return o, ends


def inputs_of(o: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None) -> Tensor:
    """x, by what was made of it: o [B, T, D]. In o's dtype, for backward, which wants what o was and not what
    x was before rounding."""
    if h0 is None:
        h0 = o.new_zeros(o.shape[0] if bounds is None else bounds.shape[0] - 1, o.shape[2])
    before = torch.cat([h0[:, None] if bounds is None else o[:, :1], o[:, :-1]], 1)[:, :o.shape[1]]
    if bounds is not None and h0.shape[0]:
        rows = torch.arange(o.shape[1], device=o.device)
        n = (torch.searchsorted(bounds, rows.to(bounds.dtype), right=True) - 1).clamp(0, h0.shape[0] - 1)
        before = torch.where((rows == bounds[n])[:, None], h0[n].to(o.dtype), before)
    return o - g.exp() * before


def joined(a: Tensor, x: Tensor, of: Tensor | None = None) -> Tensor:
    """All h of h_t = a_t h_{t-1} + x_t with nothing before the first; a, x [B, T, D, ...]. of [T]: each
    token's sequence, B being 1 and D the last dimension. Other sequences are left out, not multiplied by
    zero: 0 times NaN is NaN."""
    size = 1
    while size < x.shape[1]:
        a_before, x_before = a[:, :-size], x[:, :-size]
        if of is not None:
            same = (of[size:] == of[:-size])[:, None]
            a_before, x_before = torch.where(same, a_before, 0), torch.where(same, x_before, 0)
        x = torch.cat([x[:, :size], x[:, size:] + a[:, size:] * x_before], 1)
        a = torch.cat([a[:, :size], a[:, size:] * a_before], 1)
        size *= 2
    return x
