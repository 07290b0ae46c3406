"""What is not finite stays in its sequence, where sequences share a state. In plain torch, for any path.

A scan that forgets by a decay of zero computes 0 x NaN = NaN: one such element would reach every later sequence of its row, and by the gradients
every earlier one. So a scan whose sequences share rows (seq_idx of Mamba2) never sees it. What goes in is *contained*: 0 stands for what is not
finite, and a mark is left for its token and head, 0 or NaN. The marks are *spread* over their sequence, and what comes out is *released*: the marks
are added to it. Backward the gradients of outputs are contained, theirs released, and the marks that connect them are spread the other way.
"""
from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def contained(x: Tensor, marks: Tensor, lowest: float = 0.0) -> tuple[Tensor, Tensor]:
    """x, with 0 for what is not finite (and ``lowest`` for -inf, which is not marked if that is what it is), and marks with what is met. marks: of
    x's first dimensions."""
    found: tuple[Tensor, Tensor] = _Contained.apply(x, marks, lowest)
    return found


def released(x: Tensor, marks: Tensor) -> Tensor:
    """x + marks; a gradient that is not finite does not reach x, but it marks."""
    y: Tensor = _Released.apply(x, marks)
    return y


def spread(marks: Tensor, own: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Two marks [R, H] for each of R tokens in a row: that of its sequence up to there, together with the token's own, which other tokens do not
    see; and the former alone. begins: whether a token begins a sequence, [R].

    Where anything of a sequence is marked, so are all its gradients. Else a token's gradient is marked where that of a later one is, and its own
    where its own is."""
    found: tuple[Tensor, Tensor] = _Spread.apply(marks, own, begins)
    return found


def _marks(x: Tensor, dims: int, lowest: float = 0.0) -> Tensor:
    """0, or NaN where any of an element's last dimensions, down to so many, is not finite."""
    x = (x.clamp(min=-1) if lowest == -torch.inf else x) * 0
    return x.float().flatten(dims).sum(-1) if x.ndim > dims else x.float()


def _finite(x: Tensor, lowest: float = 0.0) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=lowest)


def _over(marks: Tensor, x: Tensor) -> Tensor:
    """Marks in a shape that broadcasts with x, in its dtype."""
    return marks.reshape(*marks.shape, *[1] * (x.ndim - marks.ndim)).to(x.dtype)


class _Contained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: Tensor, lowest: float) -> tuple[Tensor, Tensor]:
        return _finite(x, lowest), marks + _marks(x, marks.ndim, lowest)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dmarks: Tensor) -> tuple[Tensor, Tensor, None]:
        return dy + _over(dmarks, dy), dmarks, None


class _Released(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: Tensor) -> Tensor:
        ctx.dims = marks.ndim
        return x + _over(marks, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return _finite(dy), _marks(dy, ctx.dims)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marks: Tensor, own: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(len(begins), device=marks.device)
        start = torch.where(begins, place, 0).cummax(0).values[:, None].expand_as(marks)
        nan = torch.full((), torch.nan, dtype=marks.dtype, device=marks.device)
        first = torch.full_like(start, len(begins)).scatter_reduce(0, start, torch.where(marks.isnan(), place[:, None], len(begins)), "amin")
        up_to = torch.where(place[:, None] >= first.gather(0, start), nan, 0)
        both = up_to + own
        ctx.save_for_backward(place, start, both)
        return both, up_to

    @staticmethod
    def backward(ctx: Any, dboth: Tensor, dup_to: Tensor) -> tuple[Tensor, Tensor, None]:
        place, start, both = ctx.saved_tensors
        last = torch.where(both.isnan(), len(place), torch.where((dboth + dup_to).isnan(), place[:, None], -1))
        last = torch.full_like(start, -1).scatter_reduce(0, start, last, "amax").gather(0, start)
        nan = torch.full((), torch.nan, dtype=both.dtype, device=both.device)
        return torch.where(place[:, None] <= last, nan, 0), torch.where(last == len(place), nan, dboth), None
