"""Run one step of a model in debug mode, and report the first layer that goes wrong."""
from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flashlin import policy
from flashlin.diagnostics.report import Check, line
from flashlin.ops._common import numerics


def one_step(model: nn.Module, batch: Any) -> Iterator[Check]:
    """Yield lines about a forward of the model on the batch, and a backward if the result has gradients.

    The loss is ``output.loss``, or else the sum of the means of the floating-point outputs. The gradients and
    torch's random state are restored afterwards. Buffers may change, such as running means of a batch norm.
    """
    names = {module: name or "(the model)" for name, module in model.named_modules()}
    before, running = {one: one.grad for one in model.parameters()}, [""]

    def enter(module: nn.Module, given: Any) -> None:
        _check(f"the input of layer {names[module]}", "code before this layer made it", given)
        running.append(names[module])
        numerics.own.layer = running[-1]

    def leave(module: nn.Module, given: Any, made: Any) -> None:
        running.pop()
        numerics.own.layer = running[-1]
        _check(f"the output of layer {names[module]} ({type(module).__name__})", "its input is finite", made)
        what = f"the gradient that arrives at the output of layer {names[module]}"
        for x in _floats(made):
            if x.requires_grad and x.grad_fn is not None:
                hooked: Any = x
                hooked.register_hook(partial(_check, what, "the code after this layer made it"))
    hooks = [hook for module in names for hook in (module.register_forward_pre_hook(enter),
                                                   module.register_forward_hook(leave))]
    with (warnings.catch_warnings(record=True) as caught,
          torch.random.fork_rng({one.device for one in before if one.is_cuda}), policy.settings(debug=True)):
        warnings.simplefilter("always", numerics.NumericsWarning)
        try:
            for one in before:
                one.grad = None  # backward adds to an existing gradient in place
            made = (model(**batch) if isinstance(batch, Mapping) else
                    model(*batch) if isinstance(batch, (tuple, list)) else model(batch))
            loss = getattr(made, "loss", None)
            loss = sum((x.float().mean() for x in _floats(made)), torch.zeros(())) if loss is None else loss
            if loss.requires_grad:
                loss.backward()
            result = line("one step", "ok", f"every value is finite, the loss is {loss.item():.4g}")
        except FloatingPointError as error:
            result = line("one step", "problem", str(error))
        except Exception as error:  # of the model or of the batch
            result = line("one step", "could not check", f"{type(error).__name__}: {error}")
        finally:
            for hook in hooks:
                hook.remove()
            for one, gradient in before.items():
                one.grad = gradient
            numerics.own.layer = ""
    for said in dict.fromkeys(str(one.message) for one in caught if one.category is numerics.NumericsWarning):
        yield line("one step", "degraded", said)
    yield result


def _floats(made: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in tuples, lists, mappings and outputs of transformers."""
    if isinstance(made, Tensor) and made.is_floating_point():
        yield made
    for one in made.values() if isinstance(made, Mapping) else made if isinstance(made, (tuple, list)) else ():
        yield from _floats(one)


def _check(what: str, why: str, made: Any) -> None:
    for x in _floats(made):
        if (wrong := ~torch.isfinite(x.detach())).any():
            index = wrong.nonzero()[0].tolist()
            raise FloatingPointError(f"{what} is {x.detach()[wrong][0].item()} at index {index} of "
                                     f"{list(x.shape)}: {why}")
