"""A function that launches Triton kernels, shielded: every launch inside it is planned, and it is called in
parts of its batch if need be.

Which launches are inside is known to the thread that makes them. Backward runs in threads of torch's own, so
the nodes of the function's graph say it there, each while it runs.
"""
from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flashlin.compat.installed_triton import interpreting
from flashlin.compat.locks import ThreadLock
from flashlin.guards.plan_types import UnsupportedError
from flashlin.kernels.shield.problem import lengths
from flashlin.shielding import autotune as tuning


class _Inside(threading.local):
    """How many shielded functions this thread is in."""
    depth = 0


_inside = _Inside()
_launchers: dict[int, Any] = {}
_hooked: set[type] = set()
_lock = ThreadLock()


class ShieldedFunction:
    """What ``shield`` makes of a function. batch: the batch's dimension by name of the argument."""

    def __init__(self, function: Callable[..., Any], batch: dict[str, int | None], batch_size: str | None,
                 shield: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str = getattr(function, "__name__", repr(function))
        self._function, self._batch, self._size, self._shield = function, batch, batch_size, shield
        self._signature = inspect.signature(function)
        self._parts: dict[Any, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook(self._shield)
        if not self._batch:
            return self._guarded(args, kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        sizes = lengths(self._batch, bound.arguments)
        whole = int(bound.arguments[self._size]) if self._size and sizes else min(sizes.values(), default=0)
        for name, size in sizes.items():
            if size != whole:
                raise ValueError(f"{name}: got {size} elements in dimension {self._batch[name]}, need the "
                                 f"batch of {whole}")
        if not whole:  # nothing to cut
            return self._guarded(args, kwargs)
        key = tuple((name, bound.arguments[name].shape, bound.arguments[name].dtype) for name in sizes)
        part = self._parts.get(key, whole)
        while True:
            counts = [min(part, whole - begin) for begin in range(0, whole, part)]
            try:
                results = [self._guarded(*self._cut(bound, sizes, number * part, count))
                         for number, count in enumerate(counts)]
            # planned, and nothing of that launch started: half as many may do
            except UnsupportedError as error:
                if part < 2 or not any("chunk_batch" in reason.remedies for reason in error.plan.refused):
                    raise
                part = self._parts[key] = -(-part // 2)
            else:
                return _joined(results, counts, self.__name__)

    def _cut(self, bound: inspect.BoundArguments, names: Iterable[str], begin: int,
             count: int) -> tuple[Any, dict[str, Any]]:
        views = {name: bound.arguments[name].narrow(self._batch[name], begin, count) for name in names}
        size = {self._size: count} if self._size else {}
        part = inspect.BoundArguments(self._signature, {**bound.arguments, **views, **size})
        return part.args, part.kwargs

    def _guarded(self, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {tensor.grad_fn for tensor in _tensors((args, kwargs))}
        with inside():
            result = self._function(*args, **kwargs)
        _watch(result, given)
        return result


@contextmanager
def inside() -> Iterator[None]:
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


def hook(shield: Callable[[Any], Any]) -> None:
    """Have Triton's kernels ask whether they are inside; once, for good. Outside, everything is as before."""
    from triton.runtime.jit import JITFunction
    kinds: list[type] = [JITFunction]
    if interpreting():
        from triton.runtime.interpreter import InterpretedFunction
        kinds.append(InterpretedFunction)
    with _lock:
        for kind in kinds:
            if kind not in _hooked:
                _hooked.add(kind)
                kind.run = _asking(kind.run, shield)  # type: ignore[attr-defined]  # Triton's
    tuning.hook("functions", lambda: _inside.depth > 0)


def _asking(start: Callable[..., Any], shield: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not _inside.depth:
            return start(kernel, *args, **kwargs)
        launcher = _launchers.get(id(kernel))
        if launcher is None:
            launcher = shield(kernel)
            launcher._start = functools.partial(start, kernel)
            _launchers[id(kernel)] = launcher  # keeps the kernel, so that its id stays its own
        return launcher.run(*args, **kwargs)
    return run


def _watch(result: Any, given: set[Any]) -> None:
    """Let the function's own nodes of autograd's graph, between its results and its arguments, count as
    inside when they run."""
    waiting: list[Any] = [tensor.grad_fn for tensor in _tensors(result)]
    seen = {None, *given}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            _run_inside(node)


def _run_inside(node: Any) -> None:
    """What autograd calls is looked up on the node itself. The node is not to own what owns it, or it would
    outlive its tensors."""
    kind, itself = type(node), weakref.ref(node)

    def apply(*gradients: Any) -> Any:
        with inside():
            return kind.apply(itself(), *gradients)
    node.apply = apply


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _joined(results: list[Any], sizes: list[int], name: str) -> Any:
    """Results of the parts as one result: tensors along their first dimension, tuples and dicts part by
    part."""
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, torch.Tensor):
        for tensor, size in zip(results, sizes, strict=True):
            if not tensor.dim() or tensor.shape[0] != size:
                raise ValueError(f"{name}: returns a tensor of shape {tuple(tensor.shape)} for a batch of "
                                 f"{size}, need the batch first")
        return torch.cat(results)
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in results], sizes, name) for key in first}
    if isinstance(first, (tuple, list)):
        joined = [_joined([part[at] for part in results], sizes, name) for at in range(len(first))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if any(part != first for part in results):
        raise ValueError(f"{name}: returns {first!r} for one part of the batch and another value for the "
                         "next, need tensors with the batch first")
    return first
