"""The one door through which every kernel of ours is started."""
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

_kernels: dict[int, Kernel] = {}  # by id, since they keep theirs alive; to hash one takes its source
Starter = Callable[["Launch", Any, int, dict[str, Any]], None]


def start(launch: Launch, kernel: Any, programs: int, arguments: dict[str, Any],
          shared: dict[str, Any] | None = None) -> None:
    """Start ``programs`` programs of a ``@triton.jit`` kernel with the tile, warps and stages of ``launch``,
    on the device of the kernel's first argument, a tensor, and its current stream.

    arguments: what the kernel takes besides the tile, constexprs included, by name and in any order; a name
    that it does not have is a TypeError. shared: tensors and numbers that several kernels of a call have in
    common, of which this one gets those that it has a parameter for, if that is no constexpr; no name may be
    in both.
    """
    if shared is not None:
        arguments = with_shared(kernel, arguments, shared)
    _starter(launch, kernel, programs, arguments)


def start_planned(plan: Plan, kernel: Any, arguments: dict[str, Any]) -> None:
    """Start the plan's launch of a kernel, with all programs that are planned. arguments: as of ``start``."""
    launch = plan.launch(kernel.fn.__name__)
    start(launch, kernel, launch.grid[0], arguments)


def with_shared(kernel: Any, arguments: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The arguments, and those of the shared values that the kernel takes."""
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
    """Start a kernel now. values: of all its parameters, in their order."""
    device = values[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            compiled = known.start(programs, values, num_warps, num_stages)
    else:
        compiled = known.start(programs, values, num_warps, num_stages)
    if _notes.starts is not None:
        _notes.starts.append((compiled, programs, values))


def in_order(launch: Launch, kernel: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments and the launch's tile in the order of the kernel's parameters.

    Raises TypeError if they are not exactly those parameters, each of them once.
    """
    given = arguments.copy()
    given.update(launch.tile)
    try:
        values = _reader(kernel.fn)(given)
        if len(values) == len(arguments) + len(launch.tile):
            return values
    except KeyError:
        pass  # said below, with what else is wrong
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
    """The parameters that are no constexprs."""
    kinds = function.__annotations__
    return tuple(name for name in _parameters(function) if "constexpr" not in str(kinds.get(name)))


@cache
def _reader(function: Callable[..., Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Takes a kernel's arguments out of a dict. Made once for a kernel: every call of an op needs it."""
    return itemgetter(*_parameters(function))


_starter: Starter = _start
replaced = False  # True while another function sees every start


class _Notes(threading.local):
    """Notes about the starts of a thread that are not replaced.

    starts: a list to which each start is added, as (compiled kernel or None if Triton found it, programs,
    arguments in their order). held: a function that is called with the arguments of ``begin``, in its place.
    coming: a function that waits for states that enter.
    """
    starts: list[Any] | None = None
    held: Callable[..., None] | None = None
    coming: Callable[[], None] | None = None


_notes = _Notes()


@contextmanager
def noting(**notes: Any) -> Iterator[None]:
    """Set these notes of this thread for the length of a block."""
    vars(_notes).update(notes)
    try:
        yield
    finally:
        for name in notes:
            setattr(_notes, name, None)


@contextmanager
def entering(wait: Callable[[], None]) -> Iterator[None]:
    """In the block, the states that enter are not there before ``wait``, which the first ``enter`` of this
    thread calls; if there is none, the end does."""
    with noting(coming=wait):
        yield
        enter()


def enter() -> None:
    """Host code calls it before it starts what reads the states that enter. Noted like a start, as itself: a
    run that is made again has to wait, too, even if the one that was watched had not."""
    if _notes.starts is not None:
        _notes.starts.append(enter)
    coming, _notes.coming = _notes.coming, None
    if coming is not None:
        with torch._C._DisableTorchDispatch():  # who watches the run sees that it waits, not how
            coming()


def replace_starter(starter: Starter | None) -> None:
    """Let ``starter`` see every start instead of the GPU (how launches are recorded on machines without one);
    None puts it back."""
    global _starter, replaced
    _starter, replaced = starter or _start, starter is not None
