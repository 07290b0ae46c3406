"""Check that no other user can change the folders that flashlin trusts.

flashlin imports code from some folders, and reads files that decide its behaviour from others.
"""
from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def unsafe(folder: Path, what: str = "") -> str:
    """Return why another user could change a folder's contents, and what is needed; ``""`` if none can.

    The folder must belong to this user, and must not be world-writable. The same holds for its parent
    folders, with one exception. A parent may be a sticky folder such as /tmp, in which only the owner of an
    entry can rename the entry. This user or root must then own the entry. For a link, the target is checked.
    The folder may be missing. Write access for the group is allowed, because the user has chosen it.

    what: the name of the folder in the result. Raises OSError if the folder cannot be examined.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return ""
    user, shown = os.geteuid(), what or str(folder)
    real = Path(os.path.realpath(folder))
    below: os.stat_result | None = None
    for path in (real, *real.parents):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if path == real and status.st_uid != user:
            return f"{shown} belongs to another user (number {status.st_uid}), need a folder of your own"
        if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH:
            if path == real:
                return (f"{shown} can be written by everyone, need a folder that only you can write "
                        "(chmod o-w)")
            if not status.st_mode & stat.S_ISVTX:
                return f"{shown} is in {path}, which can be written by everyone, need a folder of your own"
            if below is not None and below.st_uid not in (user, 0):
                return (f"{shown} is in a folder in {path} that belongs to another user (number "
                        f"{below.st_uid}), need a folder of your own")
        below = status
    return ""


def in_cache() -> Path:
    """Return flashlin's folder in this user's cache folder, which is ``$XDG_CACHE_HOME`` or ``~/.cache``.

    A relative path in XDG_CACHE_HOME is ignored, as the XDG specification requires. Raises RuntimeError for a
    user without a home directory.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named if os.path.isabs(named) else Path.home() / ".cache", "flashlin")


def make(folder: Path) -> None:
    """Make a folder and its missing parents, with access for this user alone.

    Raises OSError if that is impossible, or if another user could change the folder's contents.
    """
    for path in (*reversed(folder.parents), folder):  # mkdir(parents=True) has no mode for the parents
        path.mkdir(mode=0o700, exist_ok=True)
    if why := unsafe(folder):
        raise PermissionError(errno.EPERM, why)
