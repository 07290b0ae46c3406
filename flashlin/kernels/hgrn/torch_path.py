"""HGRN's recurrence in plain, differentiable torch, for CPUs, float64 and cards that no Triton compiles for.
No loop over tokens: spans of 1, 2, 4, ... tokens are joined, each being a pair (a, x) that turns h into a h +
x, so nothing is divided by a decay."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.sequences import sequences_of, wide


def compute(x: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o [B, T, D], states [N, D]) in float32, or float64 if a tensor is. bounds, on whichever device, are
    not read on the host."""
    x, g = wide(x, g)
    N = x.shape[0] if bounds is None else bounds.shape[0] - 1
    h0 = x.new_zeros(N, x.shape[2]) if h0 is None else h0.to(x.dtype)
    if x.shape[1] == 0 or N == 0:
        return torch.where(x.new_ones(1, dtype=torch.bool), 0, x + g), h0.clone()  # zeros, but with gradients
    if bounds is not None:
        return _packed(x, g, h0, bounds)
    o = joined(g.exp(), x, h0)
    return o, o[:, -1].clone()


def _packed(x: Tensor, g: Tensor, h0: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """One row in which no sequence is joined with the one before, and each starts from its own state. Rows of
    no sequence are zeros."""
    of, inside = sequences_of(bounds, x.shape[1])
    inside = inside[:, None]
    first, before = _first_rows(bounds, of, h0)
    x, a = torch.where(inside, x, 0), torch.where(inside, g, 0).exp()
    o = _joined(a, x + torch.where(first & inside, a * before, 0), of)
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
        first, state = _first_rows(bounds, sequences_of(bounds, o.shape[1])[0], h0.to(o.dtype))
        before = torch.where(first, state, before)
    return o - g.exp() * before


def _first_rows(bounds: Tensor, of: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a row is the first of its sequence [T, 1], and its sequence's initial state [T, D]. of [T]: the
    number of each row's sequence."""
    n = of.clamp(0, h0.shape[0] - 1)
    return (torch.arange(len(of), device=of.device) == bounds[n])[:, None], h0[n]


def joined(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
    """All h [B, T, D, ...] of h_t = a_t h_{t-1} + x_t from h0 [B, D, ...] on; a, x [B, T, D, ...]."""
    return _joined(a, torch.cat([x[:, :1] + a[:, :1] * h0[:, None], x[:, 1:]], 1))


def _joined(a: Tensor, x: Tensor, of: Tensor | None = None) -> Tensor:
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
