"""The first run of a family's kernels: they compile all at once, and backward's as soon as forward's do.

Triton compiles a kernel when it is started, so a run would wait for one after the other. Here a start whose
kernel has to be compiled is put off, with all that come after it, and a thread compiles (most of that time
without Python's lock). The host's code goes on meanwhile as long as it makes buffers and views. The end of
the run starts what was put off, in its order; so does whatever else torch is asked for, which may read what
kernels write, and a kernel that is put off already: the batch's next part wants its memory. So what compiles
is what starts, and no list of kernels is kept anywhere.

What backward will start is found out by its host code on tensors without memory, whose starts are compiled
and nothing more. A wrong guess costs seconds of a core, and decides nothing.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashlin.compat import launch
from flashlin.compat.installed_triton import make_key
from flashlin.compat.launch_cache import Kernel
from flashlin.guards.plan_types import Plan

MOST = 16  # threads that compile at a time: no call has many more kernels
aten = torch.ops.aten
MAKING = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
          aten.empty_strided.default)
FILLING = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.clone.default, aten._to_copy.default)
NEW = (aten.new_empty.default, aten.new_zeros.default)
PLAIN = (aten.empty.memory_format, aten.empty_strided.default)

_compiling: dict[Any, threading.Thread] = {}
_foreseen: set[Any] = set()
if hasattr(os, "register_at_fork"):  # a child has none of these threads
    os.register_at_fork(after_in_child=_compiling.clear)


def compile_together(function: Callable[..., Any], plan: Plan, arguments: tuple[Any, ...], device: int,
                     forward: Any) -> Any:
    """``function(plan, *arguments)``, for the first time with such arguments. device: the current one.
    forward: (operator, x, how), if this is an operator's forward."""
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
    """Whether a CUDA graph is captured here, whose memory is its own."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Queue:
    """Starts that were put off, each with what tells its compiled kernel, None for one that is there."""

    def __init__(self, device: int) -> None:
        self.device, self.starts = device, list[tuple[Any, tuple[Any, ...]]]()
        self.slots = threading.Semaphore(min(cores(), MOST))  # served in the order of asking
        self.order: _Order | None = None

    def hold(self, *start: Any) -> None:
        """In the place of ``launch.begin``."""
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
        """The same for a start that will come later."""
        key = self.lacking(*start)
        if key is not None:
            self.compile(key, False, *start)

    def lacking(self, known: Kernel, programs: int, values: tuple[Any, ...], warps: int, stages: int) -> Any:
        return known.lacks(values, warps, stages, self.device)

    def compile(self, key: Any, load: bool, known: Kernel, programs: int, values: tuple[Any, ...],
                warps: int, stages: int) -> None:
        """In a thread, unless one is at it. load: to the card, too, which might disturb a later capture."""
        if (key, load) not in _compiling:
            # made by the first who asks, which threads may not be
            _ = known.kernel.device_caches[self.device]
            thread = threading.Thread(target=self._compile, args=(_compiling.get((key, False)), load, known,
                                                                  values, warps, stages))
            with suppress(RuntimeError):  # the process ends, or may have no more threads: the start compiles
                thread.start()
                _compiling[key, load] = thread

    def _compile(self, first: threading.Thread | None, load: bool, known: Kernel, values: tuple[Any, ...],
                 warps: int, stages: int) -> None:
        if first is not None:  # it compiles this kernel, but does not load it
            first.join()
        # its start raises the same; a process that ends waits for this thread
        with self.slots, suppress(Exception):
            if threading.main_thread().is_alive():
                if torch.cuda.is_initialized():
                    torch.cuda.set_device(self.device)  # of this thread
                make_key()
                known.compile(values, warps, stages, load)

    def begin(self) -> None:
        """Start what was put off, each when it has been compiled. A compiler's error is raised by the start
        itself, which asks it again."""
        starts, self.starts = self.starts, []
        for key, start in starts:
            if (compiling := _compiling.get((key, True))) is not None:
                compiling.join()
                _compiling.pop((key, True), None)
                _compiling.pop((key, False), None)
            launch.begin(*start)

    def end(self) -> None:
        """From here on torch is not watched."""
        order, self.order = self.order, None
        if order is not None:
            order.__exit__(None, None, None)


class Mode(TorchDispatchMode):
    """A dispatch mode that does not make torch import its compiler, which takes a second or two."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Order(Mode):
    """Has the queue's starts begin before torch does what may read what they write."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in MAKING and function not in FILLING and not is_view(function):
            self.queue.begin()
        return function(*args, **(kwargs or {}))


class _Shadows(Mode):
    """Nothing is computed. What is alike is made here, since torch would import its compiler and sympy for
    it. Raises NotImplementedError where nobody knows what would come out."""

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
    """Whether what it returns is a part of what it gets, which it only looks at."""
    aliases = [returned.alias_info for returned in function._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def foresee(queue: Queue, plan: Plan, operator: Any, x: Any, how: Any, made: Any) -> None:
    """Compile what backward will start, if the gradient of the first output is what it gets. made: by
    forward."""
    needs = [t is not None and t.requires_grad for t in x]
    facts = (operator.name, how, *needs, *[launch.config for launch in plan.launches],
             *[t is not None and t.dtype for t in x])
    if facts in _foreseen or not any(needs):
        return
    _foreseen.add(facts)
    shadows: dict[int, Tensor] = {}

    def shadow(t: Tensor | None) -> Tensor | None:
        return None if t is None else shadows.setdefault(id(t), like(t))
    try:
        kept_x, kept_y = operator.kept(x, operator.outputs(*made), how)
        x, y = operator.tensors(*map(shadow, kept_x)), operator.outputs(*map(shadow, kept_y))
        first = torch.empty(made[0].shape, dtype=made[0].dtype, device="meta")
        grads = operator.outputs(first, *[None] * (len(operator.output_names) - 1))
        with launch.noting(held=queue.foresee), _Shadows():
            operator.gradients(partial(operator.backward, plan, x, y, grads, how), grads, how, needs)
    except Exception:
        # Of any kind, since host code that is right on a card may fail on tensors without memory, and forward is
        # not to fail for it. Backward compiles what is missing, and raises what is wrong;
        # tests/ops/test_compile_ahead.py tells where nothing was foreseen.
        pass


def like(t: Tensor) -> Tensor:
    """A tensor without memory, as far from a multiple of 16 bytes."""
    apart = t.data_ptr() % 16 // t.itemsize
    room = torch.empty(apart + t.untyped_storage().nbytes() // t.itemsize, dtype=t.dtype, device="meta")
    return room.as_strided(t.shape, t.stride(), apart)
