"""Gradients of gradients, and gradients by plain torch where autograd itself is off.

Kernels make first-order gradients only; to differentiate those again is an error that names the op, and never
a gradient without its second half. ``create_graph=True`` alone is fine. So that the error is met from every
input that a gradient depends on, what backward reads is either an input or an output of its function.
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
    return (f"{call.split(' ')[0]}: got a second differentiation, need a first one: there are no "
            f"second-order gradients here; {instead}")


class _Once(torch.autograd.Function):
    """The first ``count`` tensors, whose derivative by all of them is an error."""

    @staticmethod
    def forward(ctx: Any, refusal: str, count: int, *tensors: Tensor | None) -> Any:
        ctx.refusal = refusal
        return tuple(None if x is None else x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.refusal)


def once(who: Callable[[Any], tuple[str, str]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the backward of an autograd function, which gets as second argument a list of its saved
    tensors, and may empty it: they may be unpacked only once (torch.utils.checkpoint says so). What torch's
    once_differentiable does, except that it also sees a derivative by what was saved. who(ctx): what begins
    with the op's name, and what has second-order gradients."""
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
            if not torch.is_grad_enabled():     # no create_graph
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                gradients = backward(ctx, [*saved], *grads)
            return _Once.apply(_refusal(*who(ctx)), len(gradients), *gradients, *saved, *grads)
        outside_autocast = without_autocast(differentiate)
        return differentiate
    return decorated


def once_traced(operator: Any) -> None:
    """Differentiating a library operator that makes gradients is the same error. Its last arguments are the
    call, which begins with the op's name, and the names of the gradients it makes."""
    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *_, ctx.call, _ = inputs

    def refuse(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_refusal(ctx.call, INSTEAD))
    operator.register_autograd(refuse, setup_context=keep)


def pulled_back(function: Callable[[X], Sequence[Tensor | None]], x: X, wanted: Collection[str],
                grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Gradients of the wanted fields of x, a NamedTuple, by those of the function's outputs (None: zero), by
    name. By torch.func, which works inside of a library operator too, where autograd is off."""
    named: Any = x  # to mypy a tuple bound by X has no _asdict
    fields = {name: y for name, y in named._asdict().items() if name in wanted}

    def of_wanted(given: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        return tuple(function(named._replace(**given)))
    outputs, back, *_ = torch.func.vjp(of_wanted, fields)
    gradients: dict[str, Tensor]
    gradients, = back(tuple(torch.zeros_like(o) if grad is None else grad.to(o.dtype)
                            for o, grad in zip(outputs, grads, strict=True)))
    return gradients
