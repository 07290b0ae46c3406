"""The installed Triton: its module, the key of its cache, and its modes. It is imported on first use."""
from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from flashlin.compat.locks import ThreadLock
from flashlin.compat.releases import nearest
from flashlin.compat.versions import is_unreleased, release

_keyed = ThreadLock()


@cache
def triton_module() -> Any:
    """Return the module ``triton``, imported on the first call."""
    return import_module("triton")


def interpreting() -> bool:
    """Return True if TRITON_INTERPRET makes Triton run kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def possible() -> bool:
    """Return True if flashlin may start compiled kernels directly on the installed Triton.

    A direct start calls Triton's compiled launcher without ``JITFunction.run`` (``launch_cache.py``).
    """
    return _compared(triton_module().__version__)


@cache
def _compared(version: str) -> bool:
    known = nearest(version)
    return (known.direct and release(known.version)[:2] == release(version)[:2] and not is_unreleased(version)
            and not interpreting())


def make_key() -> None:
    """Compute the key of Triton's cache, which Triton then keeps for the whole process.

    Triton reads its whole library to compute the key.
    """
    with _keyed:
        triton_module().runtime.cache.triton_key()


def expect_kernels() -> None:
    """Compute the key of Triton's cache in a thread, while this thread plans the first call."""
    if possible():
        with suppress(RuntimeError):  # the process ends or has too many threads, so no thread can start
            threading.Thread(target=make_key, daemon=True).start()
