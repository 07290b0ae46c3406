"""Shield of a function that launches Triton kernels.

Every launch inside the function is planned. If a launch is too large, the function is called on slices of its
batch. A thread-local counter shows whether a launch is inside a shielded function. Backward runs in other
threads, so each autograd node of the function increases the counter while it runs.
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
from flashlin.compat.signatures import signature_of
from flashlin.guards.plan_types import UnsupportedError
from flashlin.kernels.shield.problem import lengths
from flashlin.shielding import autotune as tuning


class _Inside(threading.local):
    """Thread-local counter of the shielded functions that are running in a thread."""
    depth = 0


_inside = _Inside()
_launchers: dict[int, Any] = {}
_hooked: set[type] = set()
_lock = ThreadLock()


class ShieldedFunction:
    """A function that ``shield`` wraps; calling it plans every Triton launch inside it."""

    def __init__(self, function: Callable[..., Any], batch: dict[str, int | None], batch_size: str | None,
                 shield: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, function)
        self.__name__: str = getattr(function, "__name__", repr(function))
        self._function, self._batch, self._size, self._shield = function, batch, batch_size, shield
        self._signature = signature_of(function)
        self._parts: dict[Any, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with planned launches, on slices of the batch if a launch is too large."""
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
        if not whole:  # no batch to split
            return self._guarded(args, kwargs)
        key = tuple((name, bound.arguments[name].shape, bound.arguments[name].dtype) for name in sizes)
        part = self._parts.get(key, whole)
        while True:
            counts = [min(part, whole - begin) for begin in range(0, whole, part)]
            try:
                results = [self._guarded(*self._cut(bound, sizes, number * part, count))
                         for number, count in enumerate(counts)]
            # Planning refused a launch before it started. A slice of half the size may fit.
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
    """Mark the launches of this thread in the ``with`` block as inside a shielded function."""
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


def hook(shield: Callable[[Any], Any]) -> None:
    """Patch Triton's kernel classes so that launches inside a shielded function are planned.

    The patch is applied once per process and stays. Launches outside a shielded function are not changed.
    shield: makes the launcher of a kernel.
    """
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
            _launchers[id(kernel)] = launcher  # keeps the kernel alive, so that no other gets its id
        return launcher.run(*args, **kwargs)
    return run


def _watch(result: Any, given: set[Any]) -> None:
    """Plan launches in the backward of a shielded function, by patching the function's autograd nodes.

    The nodes lie between its results and its arguments in the autograd graph.
    result: the results of the function.
    given: the autograd nodes of its arguments, at which the search stops.
    """
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
    """Patch ``apply`` of an autograd node, so that its launches count as inside a shielded function.

    Autograd looks up ``apply`` on the node itself. The replacement keeps only a weak reference to the node. A
    strong reference would form a cycle, which would keep the node and its tensors alive too long.
    """
    kind, itself = type(node), weakref.ref(node)

    def apply(*gradients: Any) -> Any:
        with inside():
            return kind.apply(itself(), *gradients)
    node.apply = apply


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    for part in parts:
        yield from _tensors(part)


def _joined(results: list[Any], sizes: list[int], name: str) -> Any:
    """Join the results for the slices of a batch into one result.

    Tensors are concatenated along their first dimension. Tuples, lists and dicts are joined item by item.
    """
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
        raise ValueError(f"{name}: returns {first!r} for one slice of the batch and another value for the "
                         "next, need tensors with the batch first")
    return first
