"""What is not finite stays in its sequence, where sequences share a state. In plain torch, for any path.

A scan that forgets by a decay of zero computes 0 x NaN = NaN: one such element would reach every later
sequence of its row, and by the gradients every earlier one. So a scan whose sequences share rows (seq_idx of
Mamba2) never sees it. What goes in is *contained*: 0 stands for what is not finite, and its token gets a
mark, 0 or NaN. The marks are *spread* over their sequence, and what comes out is *released*: the marks are
added to it. Backward the gradients of outputs are contained, theirs released, and the marks that connect them
are spread the other way.

Inside a transform of torch.func and in forward-mode AD, outputs are marked in the same way. Gradients and
tangents are not marked: a gradient or tangent that is not finite may reach other sequences of its row.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashlin.compat.tracing import transformed


def contained(xs: Sequence[Tensor], dims: int = 2, endless: bool = False) -> tuple[list[Tensor], Tensor]:
    """The tensors with 0 for what is not finite, and marks for it, of the tensors' first dims. endless: -inf
    in the first one (a log decay) is as good as finite, and stays."""
    if transformed():
        ys = [_finite(x, endless and at == 0) for at, x in enumerate(xs)]
        *_, marks = _contained(dims, endless, *(x.detach() for x in xs))
    else:
        *ys, marks = _Contained.apply(dims, endless, *xs)
    return ys, marks


def released(x: Tensor, marks: Tensor) -> Tensor:
    """x + marks, which are of its first dimensions; a gradient that is not finite does not reach x, but it
    marks."""
    y: Tensor = (_plus if transformed() else _Released.apply)(x, marks)
    return y


def spread(marks: Tensor, begins: Tensor) -> Tensor:
    """The marks [b, T] of each sequence up to each token. begins: whether a token begins a sequence, [b, T];
    the first of a row does.

    Where a token is marked, so are all gradients of its sequence; where a gradient is, so are those of the
    tokens up to there."""
    if transformed():
        return _nan_where(_reached(marks.isnan(), begins), marks)
    up_to: Tensor = _Spread.apply(marks, begins)
    return up_to


def _marks(x: Tensor, dims: int, endless: bool = False) -> Tensor:
    """0, or NaN where the largest absolute value in the dimensions after the first dims is not finite."""
    rest = tuple(range(dims, x.ndim))
    largest = x.amax(rest) if endless else torch.linalg.vector_norm(x, torch.inf, rest)
    return 0 * largest.float()


def _finite(x: Tensor, endless: bool = False) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=-torch.inf if endless else 0.0)


def _contained(dims: int, endless: bool, first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return (_finite(first, endless), *(_finite(x) for x in others),
            sum((_marks(x, dims) for x in others), start=_marks(first, dims, endless)))


def _plus(x: Tensor, marks: Tensor) -> Tensor:
    return x + marks.reshape(*marks.shape, *[1] * (x.ndim - marks.ndim)).to(x.dtype)


class _Contained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dims: int, endless: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        return _contained(dims, endless, *xs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_plus(dy, dys[-1]) for dy in dys[:-1])


class _Released(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: Tensor) -> Tensor:
        ctx.dims = marks.ndim
        return _plus(x, marks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return _finite(dy), _marks(dy, ctx.dims)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marks: Tensor, begins: Tensor) -> Tensor:
        reached = _reached(marks.isnan(), begins)
        ctx.save_for_backward(reached, begins)
        return _nan_where(reached, marks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        reached, begins = ctx.saved_tensors
        # The same from each sequence's end. Where a token is marked the last one of its sequence is reached,
        # so that from there all are.
        ends = begins.roll(-1, 1)
        return _nan_where(_reached((reached | dy.isnan()).flip(1), ends.flip(1)).flip(1), dy), None


def _reached(marked: Tensor, begins: Tensor) -> Tensor:
    """[b, T] bool: whether a sequence has a marked token up to each one. begins: as of spread."""
    sequence = begins.cumsum(1)
    first = torch.searchsorted(sequence, sequence)  # each token's sequence's first
    count = marked.cumsum(1)
    return count > (count - marked.long()).gather(1, first)


def _nan_where(marked: Tensor, like: Tensor) -> Tensor:
    return torch.where(marked, torch.nan, 0.0).to(like.dtype)
