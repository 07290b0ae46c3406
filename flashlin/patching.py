"""patch("triton"): flashlin's repairs put into a package that one cannot edit. Explicit, reversible, and twice is once."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flashlin import tuning

_undo: dict[str, Callable[[], None]] = {}


def patch(package: str) -> None:
    """Repair ``package`` for this process. ``triton``: ``triton.autotune`` becomes ``flashlin.autotune``, and kernels that were decorated
    before are tuned by it too.

    Raises ValueError for a package nobody has a patch for, ImportError where it is not installed.
    """
    if package not in PATCHES:
        raise ValueError(f"package: got {package!r}, need one of {', '.join(map(repr, PATCHES))}")
    if package not in _undo:
        _undo[package] = PATCHES[package]()


def unpatch(package: str) -> None:
    """Put everything back as it was. Nothing happens where it is not patched. Raises ValueError as ``patch``."""
    if package not in PATCHES:
        raise ValueError(f"package: got {package!r}, need one of {', '.join(map(repr, PATCHES))}")
    if package in _undo:
        _undo.pop(package)()


@contextmanager
def patched(package: str) -> Iterator[None]:
    """``patch`` for a while; inside of a ``patch`` it changes nothing, neither when it begins nor when it ends."""
    before = package in _undo
    patch(package)
    try:
        yield
    finally:
        if not before:
            unpatch(package)


def _triton() -> Callable[[], None]:
    import triton
    import triton.runtime
    import triton.runtime.autotuner
    homes: tuple[Any, ...] = (triton, triton.runtime, triton.runtime.autotuner)
    before: list[tuple[Any, Any]] = [(home, home.autotune) for home in homes]
    for home in homes:
        home.autotune = tuning.autotune
    tuning.hook("patch", lambda: True)

    def undo() -> None:
        for home, original in before:
            home.autotune = original
        tuning.unhook("patch")
    return undo


PATCHES: dict[str, Callable[[], Callable[[], None]]] = {"triton": _triton}
