"""Checks that run on a GPU and whose result the host reads later.

The GPU writes the result of a check, its answer, and copies it to pinned memory. The next flashlin call
(``poll``) or the exit of the process reads it there without waiting for the GPU. ``flashlin.synchronize()``
waits for all answers.

``poll`` does not read an answer that all ranks of a group share. A rank that raises alone would leave the
other ranks waiting in an exchange. All ranks read such an answer in the same later call (``settle``). That
call waits only if the host is more than ``BEHIND`` such calls ahead of the GPU.

An answer is two int64 values: a position and the value found there. Nothing is wrong if the position is -1,
or if the value is valid. The ``verdict`` method of the checked call turns the answer into a message. A
captured CUDA graph can use neither events nor host copies. Each captured call therefore has a flag on the
device, which keeps the first wrong answer of any replay until ``synchronize`` reads it.
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

SLOTS, FLAGS = 256, 1024    # slots per allocated block; flags of captured calls per device
SHOWN = 5                   # bad answers that one message shows in full
BEHIND = 8                  # number of later calls after which ranks read a shared answer
PATIENCE = 1.0              # seconds that the exit of the process waits for pending answers


class Verdict(Hashable, Protocol):
    """A call whose check runs on a GPU; it turns the answer into an error message."""

    def verdict(self, position: int, value: int) -> str:
        """Return the error message for an answer, or an empty string if nothing is wrong."""


class Slot(NamedTuple):
    """Memory for one answer.

    pair: the answer on the device, [2] int64.
    host: its pinned copy on the host, [2] int64.
    event: is recorded after the copy, so that it shows when the copy has finished.
    """
    pair: Tensor
    host: Tensor
    event: torch.cuda.Event


class Flags(NamedTuple):
    """Captured calls of one device and their answers.

    table: the answers on the device, [FLAGS, 2] int64.
    calls: the captured calls, each with its row in the table.
    """
    table: Tensor
    calls: dict[Verdict, int]


Made = TypeVar("Made")
Owed: TypeAlias = deque[tuple[Slot, Verdict]]
owed: Owed = deque()
_shared: Owed = deque()     # answers that all ranks of a group share
_free: dict[torch.device, list[Slot]] = {}
_flags: dict[torch.device, Flags] = {}
_lock = Lock()


def poll() -> None:
    """Raise ValueError if answers that have arrived report an error.

    The function never waits for a GPU. Without pending answers it costs one truth test.
    """
    if owed:
        _raise(_arrived(owed))


def settle() -> None:
    """Raise ValueError if a deferred check that all ranks share has found an error.

    The function waits for all shared answers except those of the last ``BEHIND`` checks, which a later call
    reads. Every rank calls it once in each call that several ranks make together. During a graph capture it
    does nothing.
    """
    if len(_shared) > BEHIND and not capturing():
        _raise(_waited(_shared, BEHIND))


def synchronize() -> None:
    """Wait for every check that flashlin has started on a GPU, including checks of captured graphs.

    Raises ValueError for the first failed check, with a line for each further failure. Each failure is raised
    once. Without pending checks the call costs nothing. Do not call it while a graph is being captured.
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
    """Return a free slot for an answer on a device that ``prime`` has prepared; pass it to ``send`` later.

    One block of slots is nearly always enough, because CUDA lets the host run only about a thousand launches
    ahead of the GPU. With many streams the host may be further ahead. Then another block is allocated, so
    that no call waits for a slot.
    """
    with _lock:
        if not _free[device]:
            _free[device] += apart(partial(_slots, device))
        return _free[device].pop()


def send(slot: Slot, call: Verdict, shared: bool = False) -> None:
    """Start the copy of an answer to the host, on the current stream, and queue it for a later call.

    slot: its ``pair`` contains the answer, or work already queued on the current stream writes it.
    call: the checked call, which makes the error message.
    shared: all ranks of a group send this answer, and ``settle`` reads it instead of ``poll``.
    """
    slot.host.copy_(slot.pair, non_blocking=True)
    slot.event.record(torch.cuda.current_stream(slot.pair.device))
    (_shared if shared else owed).append((slot, call))


def flag(device: torch.device, call: Verdict) -> Tensor | None:
    """Return the flag, [2] int64, into which a captured call writes its answer.

    Equal calls share a flag. If no flag is left, the function warns and returns None.
    """
    # Without a warm-up before the capture, the table is allocated in the graph's own memory pool, which keeps
    # it as long as the graph exists.
    if device not in _flags:
        with torch.inference_mode(False):
            table = torch.empty(FLAGS, 2, dtype=torch.int64, device=device)
            # Fill the table now and outside the graph; otherwise every replay would clear it.
            with torch.cuda.stream(torch.cuda.Stream(device)):
                table.fill_(-1)
        _install(device, table)
    table, calls = _flags[device]
    row = calls.setdefault(call, len(calls))
    if row < FLAGS:
        return table[row]
    del calls[call]
    warnings.warn(
        f"flashlin: captured graphs contain more than {FLAGS} different checks; {call} is not reported",
        stacklevel=4)
    return None


def prime(device: torch.device) -> bool:
    """Prepare a device for checks by allocating its flags; return True if they did not exist yet.

    A later graph capture needs the flags, but must not allocate them itself.
    """
    if device in _flags:
        return False
    with _lock:
        if device in _flags:
            return False
        _install(device, apart(partial(torch.full, (FLAGS, 2), -1, dtype=torch.int64, device=device)))
    return True


def capturing() -> bool:
    """Return True if the current stream is capturing a CUDA graph; events must not be queried then."""
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
    """Call ``make`` in a new thread and return its result; for tensors that must outlive the current call.

    In the caller's thread, inference mode, fake tensors, func transforms or the memory pool of a graph of
    torch.compile may be active. A tensor made there could be freed too early, or could refuse writes.
    """
    with ThreadPoolExecutor(1, "flashlin-pending") as pool:
        return pool.submit(make).result()


def _arrived(owed: Owed, behind: int = 0) -> list[str]:
    """Return the error messages of the answers that have arrived, oldest first, and free their slots.

    Stop at the first answer that has not arrived. Keep the last ``behind`` answers unread.
    """
    messages: list[str] = []
    if not owed or capturing():    # an event query would end the capture
        return messages
    with _lock:
        while len(owed) > behind and owed[0][0].event.query():
            slot, call = owed.popleft()
            answer = slot.host.tolist()
            _free[slot.pair.device].append(slot)
            messages += filter(None, [call.verdict(*answer)])
    return messages


def _waited(owed: Owed, behind: int = 0) -> list[str]:
    """Wait for all answers but the last ``behind``, then return the result of ``_arrived``."""
    for slot, _ in tuple(owed)[:max(len(owed) - behind, 0)]:
        slot.event.synchronize()
    return _arrived(owed, behind)


def _judge(flags: Flags, table: Tensor) -> list[tuple[int, str]]:
    """Return (row, message) for each flag in ``table`` that reports an error."""
    answers = table[:len(flags.calls)].tolist()
    return [(row, message) for call, row in flags.calls.items() if (message := call.verdict(*answers[row]))]


def _raise(messages: list[str]) -> None:
    if messages:
        raise ValueError(f'{_joined(messages)}\n  note     the call did not wait for the GPU; '
                         'flashlin.settings(tokens="sync") raises in the call itself')


def _joined(messages: list[str]) -> str:
    more = [f"\n  and {len(messages) - SHOWN} more like these"] if len(messages) > SHOWN else []
    return "\n  also     ".join(messages[:SHOWN]) + "".join(more)


def _at_exit() -> None:
    """Print the errors that are known at exit or arrive within ``PATIENCE`` seconds.

    An exception would have no handler here. A GPU that hangs must not block the exit.
    """
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
    except Exception:  # after a CUDA error every call fails, and that error has been reported already
        pass
    if messages:
        print(f"flashlin: {_joined(messages)}", file=sys.stderr)


def _copied(table: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start a copy of a table to the host on the current stream; return the copy and the event after it."""
    host, event = torch.empty(table.shape, dtype=table.dtype, device="cpu",
                              pin_memory=torch.cuda.is_available()), torch.cuda.Event()
    host.copy_(table, non_blocking=True)
    event.record(torch.cuda.current_stream(table.device))
    return host, event


def _in_child() -> None:
    """Drop all pending answers in a forked child, such as a worker of a DataLoader.

    The child can neither query the events of its parent nor destroy them. Their slots therefore go back to
    the free list, which keeps the events alive.
    """
    global _lock
    _lock = Lock()      # another thread of the parent may have held it during the fork
    for one in (owed, _shared):
        while one:
            slot, _ = one.popleft()
            _free[slot.pair.device].append(slot)
