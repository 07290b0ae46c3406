"""Start flashlin's kernels. Every start of one of them goes through ``start``.

Other code can watch or replace the starts here. ``noting`` records or holds back the starts of a thread.
``replace_starter`` replaces all starts, to record launches on a machine without a GPU.
"""
from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from flashlin.compat.launch_cache import Kernel

if TYPE_CHECKING:
    from flashlin.guards.plan_types import Launch, Plan

# The keys are ids of jitted functions, because hashing such a function reads its source. Each Kernel keeps
# its function alive, so an id stays unique.
_kernels: dict[int, Kernel] = {}
Starter = Callable[["Launch", Any, int, dict[str, Any]], None]


def start(launch: Launch, kernel: Any, programs: int, arguments: dict[str, Any],
          shared: dict[str, Any] | None = None) -> None:
    """Start ``programs`` programs of a ``@triton.jit`` kernel with the tile, warps and stages of ``launch``.

    The kernel runs on the device of its first argument, which is a tensor, and on the current stream.

    arguments: all arguments of the kernel except the tile, by name, in any order, constexprs included. A name
        that the kernel does not have raises TypeError.
    shared: tensors and numbers that several kernels of a call use. This kernel gets those for which it has a
        parameter that is no constexpr. A name in both ``arguments`` and ``shared`` raises TypeError.
    """
    if shared is not None:
        arguments = with_shared(kernel, arguments, shared)
    _starter(launch, kernel, programs, arguments)


def start_planned(plan: Plan, kernel: Any, arguments: dict[str, Any]) -> None:
    """Start the plan's launch of a kernel, with the planned number of programs.

    arguments: as for ``start``.
    """
    launch = plan.launch(kernel.fn.__name__)
    start(launch, kernel, launch.grid[0], arguments)


def with_shared(kernel: Any, arguments: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments together with the shared values for which the kernel has a parameter.

    A parameter that is a constexpr gets no shared value. Raises TypeError if a name is in both.
    """
    together = {name: shared[name] for name in _varying(kernel.fn) if name in shared}
    different = len(together) + len(arguments)
    together.update(arguments)
    if len(together) < different:
        raise TypeError(f"arguments of {kernel.fn.__name__}: also shared: "
                        f"{' '.join(sorted(shared.keys() & arguments.keys()))}")
    return together


def _start(launch: Launch, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    values = in_order(launch, kernel, arguments)
    known = _kernels.get(id(kernel))
    if known is None:
        known = _kernels[id(kernel)] = Kernel(kernel)
    (_notes.held or begin)(known, programs, values, launch.num_warps, launch.num_stages)


def begin(known: Kernel, programs: int, values: tuple[Any, ...], num_warps: int, num_stages: int) -> None:
    """Start a kernel now, even if starts of this thread are held back.

    values: the arguments of all parameters of the kernel, in their order.
    """
    device = values[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            compiled = known.start(programs, values, num_warps, num_stages)
    else:
        compiled = known.start(programs, values, num_warps, num_stages)
    if _notes.starts is not None:
        _notes.starts.append((compiled, programs, values))


def in_order(launch: Launch, kernel: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments and the launch's tile sizes in the order of the kernel's parameters.

    Raises TypeError unless ``arguments`` and the tile together name each parameter of the kernel exactly
    once, and nothing else.
    """
    given = arguments.copy()
    given.update(launch.tile)
    try:
        values = _reader(kernel.fn)(given)
        if len(values) == len(arguments) + len(launch.tile):
            return values
    except KeyError:
        pass  # the error below names the missing parameter and all other faults
    names, own = set(given), set(_parameters(kernel.fn))
    twice = set(arguments) & set(dict(launch.tile))
    wrong = [(own - names, "missing"), (names - own, "unknown"), (twice, "of the tile")]
    said = ", ".join(f"{fault}: {' '.join(sorted(which))}" for which, fault in wrong if which)
    raise TypeError(f"arguments of {kernel.fn.__name__}: {said}")


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


@cache
def _varying(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a kernel's parameters that are not constexprs."""
    kinds = function.__annotations__
    return tuple(name for name in _parameters(function) if "constexpr" not in str(kinds.get(name)))


@cache
def _reader(function: Callable[..., Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return the function that reads a kernel's arguments from a dict, in the order of its parameters.

    It is cached for each kernel, because every call of an op needs it.
    """
    return itemgetter(*_parameters(function))


_starter: Starter = _start
replaced = False  # True while a function given to replace_starter receives every start


class _Notes(threading.local):
    """Settings of one thread that change or record its starts of kernels.

    starts: a list to which each start is appended as (compiled kernel, programs, arguments in their order).
        The compiled kernel is None if the kernel was started by ``JITFunction.run``.
    held: a function that is called with the arguments of ``begin``, instead of ``begin``.
    coming: a function that waits until the initial states of this call have arrived.
    """
    starts: list[Any] | None = None
    held: Callable[..., None] | None = None
    coming: Callable[[], None] | None = None


_notes = _Notes()


@contextmanager
def noting(**notes: Any) -> Iterator[None]:
    """Set fields of this thread's ``_Notes`` for the length of a ``with`` block."""
    vars(_notes).update(notes)
    try:
        yield
    finally:
        for name in notes:
            setattr(_notes, name, None)


@contextmanager
def entering(wait: Callable[[], None]) -> Iterator[None]:
    """Delay the wait for initial states in a ``with`` block until a kernel of this thread needs them.

    The states arrive from another rank during the block. The first call of ``enter`` calls ``wait``. If the
    block has no such call, its end calls ``wait``.
    """
    with noting(coming=wait):
        yield
        enter()


def enter() -> None:
    """Wait for the initial states, if they have not arrived yet.

    Host code calls this before it starts a kernel that reads the initial states. The call is recorded like a
    start, because a replay also has to wait, even if the recorded run did not have to.
    """
    if _notes.starts is not None:
        _notes.starts.append(enter)
    coming, _notes.coming = _notes.coming, None
    if coming is not None:
        with torch._C._DisableTorchDispatch():  # the torch ops of the wait itself are not recorded
            coming()


def replace_starter(starter: Starter | None) -> None:
    """Call ``starter`` for every start instead of starting the kernel; None starts kernels again.

    This records launches on machines without a GPU.
    """
    global _starter, replaced
    _starter, replaced = starter or _start, starter is not None
