"""One process at a time."""
from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module elsewhere


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path``, which is made if need be, against other processes. Its content is left alone, and a link
    is not followed: the folder may be one that others write to. Raises OSError where it cannot be opened, or
    where the system has no such locks."""
    if fcntl is None:
        raise OSError(errno.ENOLCK, "no file locks on this system", str(path))
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
