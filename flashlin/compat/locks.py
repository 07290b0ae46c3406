"""One process at a time."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path``, which is made, against other processes. Raises OSError where it cannot be written."""
    import fcntl  # not on Windows, where neither releases nor verdicts are kept
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
