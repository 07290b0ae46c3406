"""patch("triton"): flashlin's repairs put into a package that one cannot edit. Explicit, reversible, and
twice is once."""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flashlin.shielding import autotune as tuning

_undo: dict[str, Callable[[], None]] = {}  # of what is patched
_for_good: set[str] = set()
_blocks: Counter[str] = Counter()
_changing = threading.RLock()


def patch(package: str) -> None:
    """Repair ``package`` for this process. ``triton``: ``triton.autotune`` becomes ``flashlin.autotune``, and
    kernels that were decorated before are tuned by it too.

    Raises ValueError for a package nobody has a patch for, ImportError where it is not installed.
    """
    with _changing:
        _put_in(package)
        _for_good.add(package)


def unpatch(package: str) -> None:
    """Take ``patch`` back: everything is as it was, once no ``patched`` block is left. What others have put
    in the place of a repair since then stays. Nothing happens where it is not patched. Raises ValueError as
    ``patch``."""
    _known(package)
    with _changing:
        _for_good.discard(package)
        _take_out(package)


@contextmanager
def patched(package: str) -> Iterator[None]:
    """``patch`` for a while, in all threads of the process. The last of these blocks to end puts everything
    back, unless there is a ``patch`` beside them. Raises as ``patch``."""
    with _changing:
        _put_in(package)
        _blocks[package] += 1
    try:
        yield
    finally:
        with _changing:
            _blocks[package] -= 1
            _take_out(package)


def _known(package: str) -> None:
    if package not in PATCHES:
        raise ValueError(f"package: got {package!r}, need one of {', '.join(map(repr, PATCHES))}")


def _put_in(package: str) -> None:
    _known(package)
    if package not in _undo:
        _undo[package] = PATCHES[package]()


def _take_out(package: str) -> None:
    """Where nobody wants the repair any more."""
    if package in _undo and package not in _for_good and not _blocks[package]:
        _undo.pop(package)()


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
            if home.autotune is tuning.autotune:  # not another package's, which has come later
                home.autotune = original
        tuning.unhook("patch")
    return undo


PATCHES: dict[str, Callable[[], Callable[[], None]]] = {"triton": _triton}
