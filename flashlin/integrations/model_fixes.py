"""Repairs of errors in fla's models that do not come from kernels.

Models with errors that cannot be repaired give a warning.
"""
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
    """Register the repairs for a module of fla."""
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
    """A mode in which ``argsort`` keeps equal keys in their order."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return function(*args, **{**given, "stable": True} if function is Tensor.argsort else given)


def sorting_in_order(transform: Any) -> Any:
    """Return Mom's function that sorts tokens by memory, with a stable sort.

    Tokens of one memory must keep their order. Otherwise a token sees later tokens. torch guarantees the
    order only for a stable sort. Its unstable sort changes the order on a GPU for up to 32 keys. It also does
    so on a CPU with AVX, for more than 16 keys (seen with AVX-512 and torch 2.13).

    transform: Mom's function.
    """
    def call(*args: Any, **given: Any) -> Any:
        with InOrder():
            return transform(*args, **given)
    return named_like(call, transform, signature=inspect.signature(transform))


def reorder_cache(self: Any, beam_idx: Tensor) -> None:
    """Select the beams of a layer's cache.

    This method is for fla before 0.6.0. There the cache inherits the method of transformers, which selects
    keys and values, but it has only states. The states have the shape [B, ...].
    """
    def chosen(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, Tensor):
            raise TypeError(f"the cache contains a {type(value).__name__}, which cannot be split into beams: "
                            "generate with num_beams=1, or use_cache=False")
        return value.index_select(0, beam_idx.to(value.device))
    self.state = tree_map(chosen, self.state)


def warning(forward: Callable[..., Any], model: str, said: set[str], *, mixes: str = "",
            ahead: str = "") -> Callable[..., Any]:
    """Return ``forward`` of a model of fla, wrapped to warn once for all classes of the ``model``.

    mixes: reason that the model mixes the documents of a row, for a call with cu_seqlens.
    ahead: reason that a token sees later tokens, for a call in training.
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
