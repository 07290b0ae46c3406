"""Functions that keep NaN and infinity within their sequence if several sequences share one scan.

A row of a batch may contain several sequences (``seq_idx`` of Mamba2). The scan separates them with a decay
of zero, but 0 x NaN = NaN. So one NaN or infinity would reach all later sequences of its row, and its
gradient all earlier ones. Three functions in plain torch avoid this for every path:

    contained   replaces values that are not finite with 0 before the scan, and returns a mark (0 or NaN)
                for each token
    spread      spreads a mark to the later tokens of its sequence
    released    adds the marks to the outputs of the scan

Their gradients do the same in the other direction. The gradients of outputs are contained, the marks are
spread to earlier tokens, and the gradients of inputs are released.

Inside a transform of torch.func and in forward-mode AD, outputs are marked in the same way. Gradients and
tangents are not marked. A gradient or tangent that is not finite may then reach other sequences of its row.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashlin.compat.tracing import transformed


def contained(xs: Sequence[Tensor], dims: int = 2, endless: bool = False) -> tuple[list[Tensor], Tensor]:
    """Return the tensors with 0 for elements that are not finite, and marks for these elements.

    dims: number of leading dimensions that the tensors share, and that the marks have. A mark is NaN if any
        tensor has such an element at this position, else 0.
    endless: True to keep -inf in the first tensor, a log decay, and to treat it as finite.
    """
    if transformed():
        ys = [_finite(x, endless and at == 0) for at, x in enumerate(xs)]
        *_, marks = _contained(dims, endless, *(x.detach() for x in xs))
    else:
        *ys, marks = _Contained.apply(dims, endless, *xs)
    return ys, marks


def released(x: Tensor, marks: Tensor) -> Tensor:
    """Return x + marks, where marks have the leading dimensions of x and are 0 or NaN.

    In backward, elements of the gradient of x that are not finite become 0, and the gradient of the marks
    becomes NaN in their positions.
    """
    y: Tensor = (_plus if transformed() else _Released.apply)(x, marks)
    return y


def spread(marks: Tensor, begins: Tensor) -> Tensor:
    """Return NaN for each token whose sequence has a marked token (NaN) up to it, else 0; [b, T].

    begins: [b, T], True for the first token of each sequence. The first token of a row must be True.

    In backward, a marked token marks the gradients of all tokens of its sequence. A gradient that is NaN
    marks the gradients of the earlier tokens of its sequence.
    """
    if transformed():
        return _nan_where(_reached(marks.isnan(), begins), marks)
    up_to: Tensor = _Spread.apply(marks, begins)
    return up_to


def _marks(x: Tensor, dims: int, endless: bool = False) -> Tensor:
    """Return, for each position in the first ``dims`` dimensions, NaN if a value of x is not finite, else 0.

    With endless, -inf counts as finite.
    """
    rest = tuple(range(dims, x.ndim))
    largest = x.amax(rest).clamp(min=0) if endless else torch.linalg.vector_norm(x, torch.inf, rest)
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
        # The marks are spread from the end of each sequence. If a token is marked, the last token of its
        # sequence is reached, so all gradients of the sequence are marked.
        ends = begins.roll(-1, 1)
        return _nan_where(_reached((reached | dy.isnan()).flip(1), ends.flip(1)).flip(1), dy), None


def _reached(marked: Tensor, begins: Tensor) -> Tensor:
    """Return True for each token whose sequence has a marked token up to it; [b, T].

    marked: [b, T], True for marked tokens. begins: [b, T], True for the first token of each sequence.
    """
    sequence = begins.cumsum(1)
    first = torch.searchsorted(sequence, sequence)  # index of the first token of each token's sequence
    count = marked.cumsum(1)
    return count > (count - marked.long()).gather(1, first)


def _nan_where(marked: Tensor, like: Tensor) -> Tensor:
    return torch.where(marked, torch.nan, 0.0).to(like.dtype)
