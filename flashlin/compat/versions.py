"""Release comparisons that mean the same for every release of ``packaging``.

``SpecifierSet`` treats nightlies and release candidates differently from one packaging release to the next,
so ranges are two plain bounds instead: a version is compared by its release number alone, and an unreleased
build (dev, rc, ``+git``) of the release that carries a fix counts as affected, because nobody can say whether
the fix is in it.
"""
from __future__ import annotations

from functools import lru_cache

from packaging.version import Version


@lru_cache(maxsize=256)
def release(version: str) -> tuple[int, ...]:
    """``"3.7.1+gitabc"`` -> ``(3, 7, 1)``; an unreadable or empty version -> ``()``, which is older than
    everything."""
    try:
        return Version(version).release
    except ValueError:  # no version, or a number of more digits than Python reads
        return ()


@lru_cache(maxsize=256)
def is_unreleased(version: str) -> bool:
    """True for nightlies, release candidates and builds from git."""
    try:
        parsed = Version(version)
    except ValueError:  # no version, or a number of more digits than Python reads
        return bool(version)
    return parsed.is_prerelease or (parsed.local or "").startswith("git")


@lru_cache(maxsize=4096)
def affected(version: str, since: str | None, fixed_in: str | None) -> bool:
    """Whether ``version`` lies in ``since .. fixed_in`` (fixed_in itself excluded; None leaves that side
    open).

    An empty ``version`` (the part is not installed) is never affected.
    """
    here = _padded(version)
    if not version or (since is not None and here < _padded(since)):
        return False
    return (fixed_in is None or here < _padded(fixed_in)
            or (here == _padded(fixed_in) and is_unreleased(version)))


def between(what: str, since: str | None, fixed_in: str | None) -> str:
    """The same range in words, ``what`` being a program: "Triton 3.2.0 and newer, before 3.3.0"."""
    if fixed_in is None:
        return f"{what} {since} and newer" if since else f"any {what}"
    return f"{what} {since} and newer, before {fixed_in}" if since else f"{what} before {fixed_in}"


def _padded(version: str) -> tuple[int, ...]:
    return (*release(version), 0, 0, 0)[:3]
