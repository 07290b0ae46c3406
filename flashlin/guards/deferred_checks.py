"""Checks whose answer comes later from a GPU. The device writes the answer and copies it to pinned memory.
The next flashlin call (``poll``) or the exit of the process reads it there, without waiting for the GPU.
``flashlin.synchronize()`` waits.

An answer that each rank of a group has is not polled, because a rank that raises alone leaves the others
waiting in an exchange. Every rank reads it in the same later call (``settle``). That call waits only if the
host is more than BEHIND such calls ahead of the GPU.

An answer is two int64, a position (-1: nothing is wrong) and the value found there; a verdict turns them into
a message. Inside a captured graph there is neither event nor copy: each captured call has a flag on the
device that keeps the first wrong answer of any replay until ``synchronize`` reads it.
"""
from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

SLOTS, FLAGS = 256, 1024    # answers on their way, made in blocks of so many; captured calls of one device
SHOWN = 5                   # bad answers spelled out in one message
BEHIND = 8                  # later calls of ranks after which they read an answer
PATIENCE = 1.0              # seconds the exit of the process gives to answers that are still on their way


class Verdict(Hashable, Protocol):
    """A call that is being checked."""

    def verdict(self, position: int, value: int) -> str:
        """What is wrong, in words; empty where nothing is."""


class Slot(NamedTuple):
    """Room for one answer: pair [2] int64 on the device, its pinned copy host [2], and the event behind the
    copy."""
    pair: Tensor
    host: Tensor
    event: torch.cuda.Event


class Flags(NamedTuple):
    """The captured calls of one device and their answers: row r of table [FLAGS, 2] int64 belongs to the r-th
    call."""
    table: Tensor
    calls: dict[Verdict, int]


Made = TypeVar("Made")
Owed: TypeAlias = deque[tuple[Slot, Verdict]]
owed: Owed = deque()
_shared: Owed = deque()     # answers that each rank of a group has
_free: dict[torch.device, list[Slot]] = {}
_flags: dict[torch.device, Flags] = {}
_lock = Lock()


def poll() -> None:
    """Raise ValueError for answers that have arrived and are bad. Waits for nothing; one truth test where
    nothing is owed."""
    if owed:
        _raise(_arrived(owed))


def settle() -> None:
    """Raise ValueError for bad answers that ranks share, all but the last BEHIND; wait for them if the GPU
    has not written them yet. Each rank calls this once in each call that several ranks make."""
    if len(_shared) > BEHIND and not capturing():
        _raise(_waited(_shared, BEHIND))


def synchronize() -> None:
    """Wait for every check that flashlin has started on a GPU, those of captured graphs included.

    Raises ValueError for the first one that failed, with a line for each further one; none is raised twice.
    Costs nothing where nothing is owed. Not for use while a graph is being captured.
    """
    messages = _waited(owed) + _waited(_shared)
    for device, flags in _flags.items():
        if flags.calls:
            torch.cuda.synchronize(device)
            bad = _judge(flags, flags.table)
            messages += [message for _, message in bad]
            for row, _ in bad:
                flags.table[row].fill_(-1)
    _raise(messages)


def take(device: torch.device) -> Slot:
    """A slot of a primed device to write an answer to, for ``send``. One block nearly always does, because
    CUDA itself holds a host back that runs a thousand launches ahead; where it does not (many streams),
    another is made, so that nobody waits for a slot."""
    with _lock:
        if not _free[device]:
            _free[device] += apart(partial(_slots, device))
        return _free[device].pop()


def send(slot: Slot, call: Verdict, shared: bool = False) -> None:
    """The answer in ``slot.pair`` is written, or will be by what the current stream still has to do: send it
    to the host. shared: each rank of a group sends it, for ``settle``."""
    slot.host.copy_(slot.pair, non_blocking=True)
    slot.event.record(torch.cuda.current_stream(slot.pair.device))
    (_shared if shared else owed).append((slot, call))


def flag(device: torch.device, call: Verdict) -> Tensor | None:
    """Where a captured call leaves its answer, [2] int64; the same call gets the same one. None, with a
    warning, where none is left."""
    # captured without a warm-up: the graph's own pool has to hold the table, and keeps it for as long
    if device not in _flags:
        with torch.inference_mode(False):
            table = torch.empty(FLAGS, 2, dtype=torch.int64, device=device)
            # filled now and outside the graph, or every replay would clear it
            with torch.cuda.stream(torch.cuda.Stream(device)):
                table.fill_(-1)
        _install(device, table)
    table, calls = _flags[device]
    row = calls.setdefault(call, len(calls))
    if row < FLAGS:
        return table[row]
    del calls[call]
    warnings.warn(
        f"flashlin: captured graphs hold more than {FLAGS} different checks; {call} is not reported",
        stacklevel=4)
    return None


def prime(device: torch.device) -> bool:
    """Make what a later capture on this device needs and must not allocate. Whether that was still to be
    done."""
    if device in _flags:
        return False
    with _lock:
        if device in _flags:
            return False
        _install(device, apart(partial(torch.full, (FLAGS, 2), -1, dtype=torch.int64, device=device)))
    return True


def capturing() -> bool:
    """Whether a CUDA graph is being captured here and now, where events must be left alone."""
    return bool(torch.cuda.is_current_stream_capturing())


def _install(device: torch.device, table: Tensor) -> None:
    if not _flags:      # the first check of this process
        atexit.register(_at_exit)
        if hasattr(os, "register_at_fork"):     # not on Windows
            os.register_at_fork(after_in_child=_in_child)
    _free[device] = []
    _flags[device] = Flags(table, {})


def _slots(device: torch.device) -> list[Slot]:
    pairs = torch.empty(SLOTS, 2, dtype=torch.int64, device=device)
    hosts = torch.empty(SLOTS, 2, dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available())
    return [Slot(pair, host, torch.cuda.Event())
            for pair, host in zip(pairs.unbind(), hosts.unbind(), strict=True)]


def apart(make: Callable[[], Made]) -> Made:
    """Call ``make`` in a thread of its own and return what it returns: tensors that outlive the call.
    Inference mode, fake tensors, func transforms and the memory pool of torch.compile's graphs belong to the
    caller's thread, and would turn them into tensors that die or cannot be written to."""
    with ThreadPoolExecutor(1, "flashlin-pending") as pool:
        return pool.submit(make).result()


def _arrived(owed: Owed, behind: int = 0) -> list[str]:
    """Messages of the bad answers that are here, oldest first; their slots become free. Stops at the first
    that is not here yet, and at the last ``behind``."""
    messages: list[str] = []
    if not owed or capturing():    # asking an event would end the capture
        return messages
    with _lock:
        while len(owed) > behind and owed[0][0].event.query():
            slot, call = owed.popleft()
            position, value = slot.host.tolist()
            _free[slot.pair.device].append(slot)
            messages += filter(None, [call.verdict(position, value)])
    return messages


def _waited(owed: Owed, behind: int = 0) -> list[str]:
    """``_arrived``, after waiting for all of these answers."""
    for slot, _ in tuple(owed)[:max(len(owed) - behind, 0)]:
        slot.event.synchronize()
    return _arrived(owed, behind)


def _judge(flags: Flags, table: Tensor) -> list[tuple[int, str]]:
    """(row, message) of the flags in ``table`` that are bad."""
    answers = table[:len(flags.calls)].tolist()
    told = [(row, call.verdict(*answers[row])) for call, row in flags.calls.items()]
    return [(row, message) for row, message in told if message]


def _raise(messages: list[str]) -> None:
    if messages:
        raise ValueError(f'{_joined(messages)}\n  note     the GPU was not waited for; '
                         'flashlin.settings(tokens="sync") raises in the call itself')


def _joined(messages: list[str]) -> str:
    more = [f"\n  and {len(messages) - SHOWN} more like these"] if len(messages) > SHOWN else []
    return "\n  also     ".join(messages[:SHOWN]) + "".join(more)


def _at_exit() -> None:
    """Print what is known or comes within PATIENCE. An exception would help nobody here, and a GPU that hangs
    must not hang the exit."""
    messages: list[str] = []
    try:
        owed.extend(_shared)
        late = [(flags, *_copied(flags.table)) for flags in _flags.values() if flags.calls]
        deadline = time.monotonic() + PATIENCE
        while owed or late:
            messages += _arrived(owed)
            for arrived in [item for item in late if item[2].query()]:
                messages += [message for _, message in _judge(arrived[0], arrived[1])]
                late.remove(arrived)
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
    except Exception:  # a dead CUDA context refuses everything, and has been reported by whoever met it
        pass
    if messages:
        print(f"flashlin: {_joined(messages)}", file=sys.stderr)


def _copied(table: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A copy on its way to the host behind what the current stream still has to do, and the event that says
    it is there."""
    host, event = torch.empty(table.shape, dtype=table.dtype, device="cpu",
                              pin_memory=torch.cuda.is_available()), torch.cuda.Event()
    host.copy_(table, non_blocking=True)
    event.record(torch.cuda.current_stream(table.device))
    return host, event


def _in_child() -> None:
    """A forked child (a DataLoader's worker, say) cannot ask its parent's GPU, nor may it end its parent's
    events: keep them, unasked."""
    global _lock
    _lock = Lock()      # the parent may have held it
    for one in (owed, _shared):
        while one:
            slot, _ = one.popleft()
            _free[slot.pair.device].append(slot)
