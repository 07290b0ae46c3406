"""Torch path of HGRN's recurrence, for CPUs, float64 and GPUs that no Triton release supports.

It has no loop over tokens, and is differentiable. It combines spans of 1, 2, 4, ... tokens. A span is a pair
(a, x) that maps a state h to a h + x, so the code never divides by a decay.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.sequences import sequences_of, wide


def compute(x: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o [B, T, D] and the final states [N, D], in float64 if x or g has it, else in float32.

    bounds: [N + 1], the boundaries of packed sequences on any device, or None. The host does not read them.
    """
    x, g = wide(x, g)
    N = x.shape[0] if bounds is None else bounds.shape[0] - 1
    h0 = x.new_zeros(N, x.shape[2]) if h0 is None else h0.to(x.dtype)
    if x.shape[1] == 0 or N == 0:
        return torch.where(x.new_ones(1, dtype=torch.bool), 0, x + g), h0.clone()  # zeros with a graph
    if bounds is not None:
        return _packed(x, g, h0, bounds)
    o = joined(g.exp(), x, h0)
    return o, o[:, -1].clone()


def _packed(x: Tensor, g: Tensor, h0: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [1, T, D] and the final states [N, D] of packed sequences.

    Sequences are not combined with each other, and each starts from its own state in h0. Rows of no sequence
    are zeros in o.
    """
    of, inside = sequences_of(bounds, x.shape[1])
    inside = inside[:, None]
    first, before = _first_rows(bounds, of, h0)
    x, a = torch.where(inside, x, 0), torch.where(inside, g, 0).exp()
    o = _joined(a, x + torch.where(first & inside, a * before, 0), of)
    o = torch.where(inside, o, 0)
    ends = torch.where((bounds[1:] > bounds[:-1])[:, None], o[0, (bounds[1:] - 1).clamp(min=0)], h0)
    return o, ends


def inputs_of(o: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None) -> Tensor:
    """Recover the inputs x_t = o_t - e^{g_t} o_{t-1} of the recurrence from its output o, in o's dtype.

    Backward calls this function. It needs the x that gives exactly the stored o, which may be rounded. o, g
    and the result are [B, T, D].
    """
    if h0 is None:
        h0 = o.new_zeros(o.shape[0] if bounds is None else bounds.shape[0] - 1, o.shape[2])
    before = torch.cat([h0[:, None] if bounds is None else o[:, :1], o[:, :-1]], 1)[:, :o.shape[1]]
    if bounds is not None and h0.shape[0]:
        first, state = _first_rows(bounds, sequences_of(bounds, o.shape[1])[0], h0.to(o.dtype))
        before = torch.where(first, state, before)
    return o - g.exp() * before


def _first_rows(bounds: Tensor, of: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Return True for each row that is the first of its sequence [T, 1], and each row's initial state [T, D].

    of: [T], number of the row's sequence. h0: [N, D], the initial states of the sequences.
    """
    n = of.clamp(0, h0.shape[0] - 1)
    return (torch.arange(len(of), device=of.device) == bounds[n])[:, None], h0[n]


def joined(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
    """Return all states of h_t = a_t h_{t-1} + x_t, [B, T, D, ...], starting from h0 [B, D, ...].

    a, x: [B, T, D, ...].
    """
    return _joined(a, torch.cat([x[:, :1] + a[:, :1] * h0[:, None], x[:, 1:]], 1))


def _joined(a: Tensor, x: Tensor, of: Tensor | None = None) -> Tensor:
    """Return all states of h_t = a_t h_{t-1} + x_t, starting from zero.

    a, x and the result: [B, T, D, ...].
    of: [T], number of each token's sequence in a packed batch, or None. It requires B = 1, and D as the last
        dimension. Tokens of other sequences are masked rather than multiplied by zero, because 0 times NaN is
        NaN.
    """
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
