"""Locks: ``locked`` between processes, and ``ThreadLock`` between the threads of one process."""
from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]  # on other systems it is a module


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file against other processes for the length of a ``with`` block.

    path: the file. It is created if it is missing, and its content never changes. A symbolic link is not
        followed, because other users may be able to write to the folder.

    Raises OSError if the file cannot be opened, or if the system has no file locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, "no file locks on this system", str(path))
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # If another thread has forked a child meanwhile, the child has a copy of the handle. Closing only
            # our handle would leave the file locked until that child ends.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


class ThreadLock:
    """A reentrant lock that is free in a forked child.

    A fork copies only the thread that calls it. A plain lock that another thread holds at that moment stays
    locked in the child forever. This lock is replaced in the child.

    wait: seconds that a fork waits for the thread that holds the lock, so that the child sees no half-made
        change. After that time the fork continues, so a deadlock is impossible. Set it only for a lock that
        lives as long as the process.
    """

    def __init__(self, wait: float = 0.0) -> None:
        self.wait = wait
        self._lock = threading.RLock()
        _LOCKS.add(self)
        if wait:
            _WAITED.append(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def free(self) -> bool:
        """Release the lock once. Return False if this thread does not hold it."""
        with suppress(RuntimeError):
            self._lock.release()
            return True
        return False


_LOCKS: weakref.WeakSet[ThreadLock] = weakref.WeakSet()
_WAITED: list[ThreadLock] = []  # a list, because other threads may add to it while a fork reads it
_forking = threading.local()  # ``held``: the locks that this thread holds while it forks


def _before_fork() -> None:
    _forking.held = tuple([one for one in tuple(_WAITED) if one._lock.acquire(timeout=one.wait)])


def _after_fork() -> None:
    for one in vars(_forking).pop("held", ()):
        one._lock.release()


def _after_fork_in_child() -> None:
    _after_fork()
    for one in list(_LOCKS):
        if one._lock.acquire(blocking=False):  # the lock is free, or this thread holds it
            one._lock.release()
        else:
            one._lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
