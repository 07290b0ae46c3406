"""Compare versions with ranges of releases, with the same result for every release of ``packaging``.

``SpecifierSet`` treats nightlies and release candidates differently from one release of packaging to the
next. A range therefore has two plain bounds here, and a version is compared by its release number alone. An
unreleased build (dev, rc, ``+git``) of the release that contains a fix counts as affected, because its number
does not tell whether the build contains the fix.
"""
from __future__ import annotations

from functools import lru_cache

from packaging.version import Version


@lru_cache(maxsize=256)
def release(version: str) -> tuple[int, ...]:
    """Return the release number of a version: ``(3, 7, 1)`` for ``"3.7.1+gitabc"``.

    A text that is no version gives ``()``, which compares as older than every release.
    """
    try:
        return Version(version).release
    except ValueError:  # not a version, or a number with more digits than Python converts
        return ()


@lru_cache(maxsize=256)
def is_unreleased(version: str) -> bool:
    """Return True for nightlies, release candidates and builds from git."""
    try:
        parsed = Version(version)
    except ValueError:  # not a version, or a number with more digits than Python converts
        return bool(version)
    return parsed.is_prerelease or (parsed.local or "").startswith("git")


@lru_cache(maxsize=4096)
def affected(version: str, since: str | None, fixed_in: str | None) -> bool:
    """Return True if a version is ``since`` or newer, and older than ``fixed_in``.

    None leaves that side of the range open. An unreleased build of ``fixed_in`` counts as older. An empty
    ``version`` means that the package is not installed, and is never affected.
    """
    here = _padded(version)
    if not version or (since is not None and here < _padded(since)):
        return False
    return (fixed_in is None or here < _padded(fixed_in)
            or (here == _padded(fixed_in) and is_unreleased(version)))


def between(what: str, since: str | None, fixed_in: str | None) -> str:
    """Return a range of releases in words: "Triton 3.2.0 and newer, before 3.3.0".

    what: name of the program. since, fixed_in: as for ``affected``.
    """
    if fixed_in is None:
        return f"{what} {since} and newer" if since else f"any {what}"
    return f"{what} {since} and newer, before {fixed_in}" if since else f"{what} before {fixed_in}"


def _padded(version: str) -> tuple[int, ...]:
    return (*release(version), 0, 0, 0)[:3]
