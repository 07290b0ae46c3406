"""Kernels in Triton's interpreter.

Which functions of its language are built in, the interpreter finds out anew for every call of a jitted function;
which of numpy's dtypes is meant, for every operation. Here both are looked up once, which takes off half of the
time (3.7.1). Where a release has other functions for it, tests are only slower.
"""
from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_is_builtin = tl.core.is_builtin


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if _is_builtin(member)]


def _patch_builtin(package: Any, *rest: Any) -> None:
    """Unless the kernel that calls this jitted function has done so."""
    names = _builtins(package)
    if names and _is_builtin(getattr(package, names[0])):
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), *rest)


def _remembering(look_up: Any) -> Any:
    known: dict[str, np.dtype] = {}

    def dtype_of(kind: Any) -> np.dtype:
        element = kind.scalar
        if element.name not in known:
            known[element.name] = look_up(element)
        return known[element.name]
    return dtype_of


if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
    interpreter._patch_builtin = _patch_builtin
if hasattr(interpreter, "_get_np_dtype"):
    interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype)
