"""Parallel compilation in the first run of a family: all kernels of forward, then those of backward.

Triton compiles a kernel at its first launch, so a run would compile one kernel after the other. Here a launch
that needs compilation is deferred, together with all later launches, and a thread compiles its kernel.
Compilation releases Python's lock most of the time. Meanwhile the host code continues, as long as it only
makes buffers and views. The deferred launches start in their order at the end of the run. They start earlier
in two cases:

- torch is called for any other operation, which may read the kernels' results.
- A kernel is launched that needs compilation and is already deferred. The launch may be for the next slice
  of the batch, which reuses the memory of the deferred launches.

The launches themselves determine which kernels compile, so no list of kernels has to be maintained.

To find the launches of backward, its host code runs on tensors without memory, and the kernels it would
launch are only compiled. This assumes that backward will run, with a gradient of the first output only. If
that is wrong, seconds of one core are lost, and the results are the same.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashlin.compat import launch
from flashlin.compat.installed_triton import make_key
from flashlin.compat.launch_cache import Kernel
from flashlin.guards.plan_types import Plan

MOST = 16  # threads that compile at a time; no call has many more kernels
aten = torch.ops.aten
MAKING = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
          aten.empty_strided.default)
FILLING = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.clone.default, aten._to_copy.default)
NEW = (aten.new_empty.default, aten.new_zeros.default)
PLAIN = (aten.empty.memory_format, aten.empty_strided.default)

# The GPU for which this thread foresees kernels, since tensors without memory are on no GPU.
place: ContextVar[torch.device | None] = ContextVar("place", default=None)
_compiling: dict[Any, threading.Thread] = {}
_foreseen: set[Any] = set()
if hasattr(os, "register_at_fork"):  # a forked child does not inherit these threads
    os.register_at_fork(after_in_child=_compiling.clear)


def compile_together(function: Callable[..., Any], plan: Plan, arguments: tuple[Any, ...], device: int,
                     forward: Any) -> Any:
    """Run ``function(plan, *arguments)`` for the first time with such arguments, and compile in parallel.

    device: the current device.
    forward: (operator, x, how) if the function is an operator's forward, else None.
    """
    if cores() < 2 or capturing():
        return function(plan, *arguments)
    queue = Queue(device)
    try:
        with launch.noting(held=queue.hold):
            made = function(plan, *arguments)
        queue.end()
        if forward is not None:
            operator, x, how = forward
            if how.needs_grad:
                foresee(queue, plan, operator, x, how, made)
        queue.begin()
    finally:
        queue.end()
    return made


def capturing() -> bool:
    """Return True if a CUDA graph is being captured in this stream; a capture has its own memory pool."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Queue:
    """Deferred launches, each with its compile key; the key is None if the kernel is already compiled."""

    def __init__(self, device: int) -> None:
        self.device, self.starts = device, list[tuple[Any, tuple[Any, ...]]]()
        self.slots = threading.Semaphore(min(cores(), MOST))  # wakes threads in first-come order
        self.order: _Order | None = None
        # Import Gluon before threads start. Two threads that import it at the same time can deadlock.
        with suppress(ImportError):
            import_module("triton.experimental.gluon.language")

    def hold(self, *start: Any) -> None:
        """Receive a launch in place of ``launch.begin``: start it now, or compile its kernel and defer it."""
        key = self.lacking(*start)
        if key is not None and any(key == other for other, _ in self.starts):
            self.begin()
            key = self.lacking(*start)
        if key is not None:
            self.compile(key, True, *start)
        elif not self.starts:
            launch.begin(*start)
            return
        self.starts.append((key, start))
        if self.order is None:
            self.order = _Order(self)
            self.order.__enter__()

    def foresee(self, *start: Any) -> None:
        """Compile the kernel of a launch that will come later, without launching it."""
        if (key := self.lacking(*start)) is not None:
            self.compile(key, False, *start)

    def lacking(self, known: Kernel, programs: int, values: tuple[Any, ...], warps: int, stages: int) -> Any:
        """Return the compile key of a launch's kernel, or None if it is already compiled."""
        return known.lacks(values, warps, stages, self.device)

    def compile(self, key: Any, load: bool, known: Kernel, programs: int, values: tuple[Any, ...],
                warps: int, stages: int) -> None:
        """Compile a launch's kernel in a thread, unless a thread already compiles it.

        load: also load the kernel to the GPU. The kernels of backward are not loaded ahead, because a load
            could disturb the capture of a CUDA graph that has begun in the meantime.
        """
        if (key, load) not in _compiling:
            # Triton creates this cache on first access, which must not happen in a thread.
            _ = known.kernel.device_caches[self.device]
            thread = threading.Thread(target=self._compile, args=(_compiling.get((key, False)), load, known,
                                                                  values, warps, stages))
            # If no thread can start (interpreter exit, thread limit), the launch itself compiles.
            with suppress(RuntimeError):
                thread.start()
                _compiling[key, load] = thread

    def _compile(self, first: threading.Thread | None, load: bool, known: Kernel, values: tuple[Any, ...],
                 warps: int, stages: int) -> None:
        if first is not None:  # another thread compiles this kernel without loading it; wait for it
            first.join()
        # An error is dropped here, because the launch compiles again and raises it. At exit the interpreter
        # waits for this thread, so the thread compiles only while the main thread is alive.
        with self.slots, suppress(Exception):
            if threading.main_thread().is_alive():
                if torch.cuda.is_initialized():
                    torch.cuda.set_device(self.device)  # the current device is per thread
                make_key()
                known.compile(values, warps, stages, load)

    def begin(self) -> None:
        """Start the deferred launches in order, each after its kernel is compiled.

        A launch whose compilation failed compiles again and raises the compiler's error.
        """
        starts, self.starts = self.starts, []
        for key, start in starts:
            for load in (False, True):
                if (compiling := _compiling.get((key, load))) is not None:
                    compiling.join()
                    _compiling.pop((key, load), None)
            launch.begin(*start)

    def end(self) -> None:
        """Stop watching torch's operations."""
        order, self.order = self.order, None
        if order is not None:
            order.__exit__(None, None, None)


class Mode(TorchDispatchMode):
    """A dispatch mode that does not make torch import its compiler, which takes a second or two."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Order(Mode):
    """Dispatch mode that starts deferred launches before torch may read what they write."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in MAKING and function not in FILLING and not is_view(function):
            self.queue.begin()
        return function(*args, **(kwargs or {}))


class _Shadows(Mode):
    """Dispatch mode that computes nothing and returns tensors without memory.

    For operations on tensors without memory, torch would import its compiler and sympy. So this mode
    derives the shape and the dtype of a result itself. It raises NotImplementedError if it cannot do so.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            given = dict(zip([argument.name for argument in function._schema.arguments], args, strict=False))
            return next({**given, **kwargs}[argument.name] for argument in function._schema.arguments
                        if argument.alias_info is not None and argument.alias_info.is_write)
        dtype = kwargs.get("dtype") or (args[0].dtype if function in LIKE + NEW else None)
        if function in LIKE:
            return torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype, device="meta")
        if function in NEW or function is aten.zeros.default:
            return torch.empty(args[-1], dtype=dtype, device="meta")
        if function in PLAIN or is_view(function):
            return function(*args, **kwargs)
        raise NotImplementedError(str(function))


def is_view(function: Any) -> bool:
    """Return True if an operation only reads its argument and returns a view of it."""
    aliases = [returned.alias_info for returned in function._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def foresee(queue: Queue, plan: Plan, operator: Any, x: Any, how: Any, made: Any) -> None:
    """Compile the kernels that backward will launch if only the first output has a gradient.

    made: the outputs of forward.
    """
    needs = [t is not None and t.requires_grad for t in x]
    facts = (operator.name, how, *needs, *[launch.config for launch in plan.launches],
             *[t is not None and t.dtype for t in x])
    if facts in _foreseen or not any(needs):
        return
    _foreseen.add(facts)
    shadows: dict[int, Tensor] = {}

    def shadow(t: Tensor | None) -> Tensor | None:
        return None if t is None else shadows.setdefault(id(t), like(t))
    before = place.set(torch.device("cuda", queue.device))
    try:
        kept_x, kept_y = operator.kept(x, operator.outputs(*made), how)
        x, y = operator.tensors(*map(shadow, kept_x)), operator.outputs(*map(shadow, kept_y))
        first = torch.empty(made[0].shape, dtype=made[0].dtype, device="meta")
        grads = operator.outputs(first, *[None] * (len(operator.output_names) - 1))
        with launch.noting(held=queue.foresee), _Shadows():
            operator.gradients(partial(operator.backward, plan, x, y, grads, how), grads, how, needs)
    except Exception:
        # Host code that is correct on a GPU may fail in any manner on tensors without memory. Forward must
        # not fail because of it. Backward compiles the missing kernels and raises real errors.
        # tests/ops/test_compile_ahead.py fails if no kernel was compiled here.
        pass
    finally:
        place.reset(before)


def like(t: Tensor) -> Tensor:
    """Return a tensor without memory that has t's layout and its offset from a multiple of 16 bytes."""
    apart = t.data_ptr() % 16 // t.itemsize
    room = torch.empty(apart + t.untyped_storage().nbytes() // t.itemsize, dtype=t.dtype, device="meta")
    return room.as_strided(t.shape, t.stride(), apart)
