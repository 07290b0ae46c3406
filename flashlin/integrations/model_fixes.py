"""What fla's models do wrong themselves, beside their kernels: mended where a function can do it, told where
none can."""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from flashlin.integrations.bindings import Bindings, named_like
from flashlin.integrations.documents import APART, once


def mend(module: ModuleType, bindings: Bindings) -> None:
    """Note what takes the place of what a module of fla gets wrong."""
    names = vars(module)
    transform = names.get("transform")
    if (module.__name__ == "fla.layers.mom" and isinstance(transform, FunctionType)
            and not bindings.knows(transform)):
        bindings.swap(transform, sorting_in_order(transform), "its own, which keeps tokens in their order")
    layer = names.get("FLALayer")
    if (isinstance(layer, type) and layer.__module__ == module.__name__
            and "reorder_cache" not in vars(layer)):
        bindings.put(layer, "reorder_cache", reorder_cache, "flashlin's, for beams")


class InOrder(TorchFunctionMode):
    """``argsort`` leaves equal keys in their order."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return function(*args, **{**given, "stable": True} if function is Tensor.argsort else given)


def sorting_in_order(transform: Any) -> Any:
    """Mom's function that sorts tokens by memory. Within a memory they must stay as they came, and torch
    promises that only where it is asked for: on a GPU up to 32 keys, on a CPU with AVX more, come as they
    like, and then a token sees later ones."""
    def call(*args: Any, **given: Any) -> Any:
        with InOrder():
            return transform(*args, **given)
    return named_like(call, transform, signature=inspect.signature(transform))


def reorder_cache(self: Any, beam_idx: Tensor) -> None:
    """Of a layer's cache before fla 0.6.0, which takes that of transformers for keys and values and has
    neither. Its states are [B, ...] each."""
    def chosen(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, Tensor):
            raise TypeError(f"the cache holds a {type(value).__name__}, of which nobody knows what belongs "
                            "to which beam: generate with num_beams=1, or use_cache=False")
        return value.index_select(0, beam_idx.to(value.device))
    self.state = tree_map(chosen, self.state)


def warning(forward: Callable[..., Any], model: str, said: set[str], *, mixes: str = "",
            ahead: str = "") -> Callable[..., Any]:
    """Return ``forward`` of a model of fla with one warning for all classes of the ``model``.

    mixes: why the model mixes the documents of a row whatever it is told, for a call with cu_seqlens. ahead:
    why tokens see later ones, for a call in training.
    """
    warn = once(said)

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        if mixes and given.get("cu_seqlens") is not None:
            warn(model, f"{type(self).__name__} got cu_seqlens, and {mixes}: documents of one row run into "
                        f"each other. {APART}")
        if ahead and self.training:
            warn(model, f"{type(self).__name__}: {ahead}. It is so with every kernel.")
        return forward(self, *args, **given)
    return call
