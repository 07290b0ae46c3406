"""Errors for second-order gradients, and gradients by plain torch inside library operators.

The kernels compute first-order gradients only. Differentiating those gradients again raises an error that
names the op, and never returns an incomplete gradient. ``create_graph=True`` alone is allowed. Every input
that a gradient depends on must lead to the error. Therefore backward reads only inputs and outputs of its
autograd function.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashlin.guards.tensors import resolved
from flashlin.ops._common.entry import any_autocast, without_autocast, without_autocast_behind

X = TypeVar("X", bound=tuple[Any, ...])
INSTEAD = 'FLASHLIN_PATH=torch or flashlin.settings(path="torch") has them, in plain torch'


def _refusal(call: str, instead: str) -> str:
    """Return the error text for a second differentiation."""
    return (f"{call.split(' ')[0]}: got a second differentiation, need a first one: there are no "
            f"second-order gradients here; {instead}")


class _Once(torch.autograd.Function):
    """An identity on the first ``count`` tensors that raises an error when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, refusal: str, count: int, *tensors: Tensor | None) -> Any:
        ctx.refusal = refusal
        return tuple(None if x is None else x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.refusal)


def once(who: Callable[[Any], tuple[str, str]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for the backward of an autograd function that has no second-order gradients.

    The decorated backward gets a list of its saved tensors as second argument and may empty the list. The
    tensors may be unpacked only once, as torch.utils.checkpoint requires. If the gradients are differentiated
    again, an error names the op. A derivative of a gradient with respect to a saved tensor also raises this
    error; with torch's once_differentiable it does not.
    who: maps ctx to (call string that begins with the op's name, hint about an alternative with second-order
        gradients).
    """
    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def differentiate(ctx: Any, *grads: Tensor | None) -> Any:
            if any_autocast():
                without_autocast_behind(ctx)
                return outside_autocast(ctx, *grads)
            for x in grads:
                if x is not None and x.is_neg():
                    return differentiate(ctx, *map(resolved, grads))
            saved = [*ctx.saved_tensors]
            if not torch.is_grad_enabled():     # backward runs without create_graph
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                gradients = backward(ctx, [*saved], *grads)
            return _Once.apply(_refusal(*who(ctx)), len(gradients), *gradients, *saved, *grads)
        outside_autocast = without_autocast(differentiate)
        return differentiate
    return decorated


def once_traced(operator: Any) -> None:
    """Make it an error to differentiate a library operator that returns gradients.

    The last two arguments of the operator are the call string, which begins with the op's name, and the names
    of the gradients it returns.
    """
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *_, ctx.call, _ = inputs

    def refuse(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_refusal(ctx.call, INSTEAD))
    operator.register_autograd(refuse, setup_context=keep)


def pulled_back(function: Callable[[X], Sequence[Tensor | None]], x: X, wanted: Collection[str],
                grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return the gradients, by name, of the wanted fields of the NamedTuple x.

    grads: gradients of the function's outputs; None for zero.
    It uses torch.func.vjp, which also works inside a library operator, where autograd is off.
    """
    named: Any = x  # for mypy, a tuple bound by X has no _asdict
    fields = {name: y for name, y in named._asdict().items() if name in wanted}

    def of_wanted(given: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        return tuple(function(named._replace(**given)))
    outputs, back, *_ = torch.func.vjp(of_wanted, fields)
    gradients, = back(tuple(torch.zeros_like(o) if grad is None else grad.to(o.dtype)
                            for o, grad in zip(outputs, grads, strict=True)))
    return dict(gradients)
