"""Kernels in Triton's interpreter, made faster for the tests.

The interpreter of Triton patches ``triton.language`` again for every call of a jitted function. It looks up
the numpy dtype for every operation, and checks integer sums for overflow with five more operations. It reduces
with a kernel's own function one element at a time. This module patches the language once per kernel, looks up
each dtype once, checks overflow with numpy, and reduces by halves. This saves more than half of the time under
Triton 3.7.1. If a release lacks the functions that this module replaces, the tests are slower but still work.
"""
from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from flashlin.compat.versions import release

_is_builtin = tl.core.is_builtin
_EXACTLY = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if _is_builtin(member)]


def _patch_builtin(package: Any, *rest: Any) -> None:
    """Patch the language of a jitted function, unless the kernel that calls it has already done so."""
    names = _builtins(package)
    if names and _is_builtin(getattr(package, names[0])):
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), *rest)


def _remembering(look_up: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    known: dict[str, np.dtype] = {}

    def dtype_of(kind: Any) -> np.dtype:
        element = kind.scalar
        if element.name not in known:
            known[element.name] = look_up(element)
        return known[element.name]
    return dtype_of


def _check_overflow(one: Any, other: Any, operation: Any) -> None:
    """Raise an error for an integer overflow, such as an index of 2**31 or more."""
    kind, name = one.type.scalar, operation.__name__
    if kind.int_bitwidth < 64:
        exact = _EXACTLY[name](one.handle.data.astype(np.int64), other.handle.data.astype(np.int64))
        fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
        assert fits, f"int{kind.int_bitwidth} overflow detected for operation {name}"


def _reduce_halves(reduction: Any, given: tuple[Any, ...]) -> Any:
    """Reduce ``given`` with the kernel's own function, which must be commutative, by halves along the axis."""
    if reduction.axis is None or reduction.keep_dims:
        return _reduce_elements(reduction, given)
    kinds = [x.dtype for x in given]
    left = [np.moveaxis(x.handle.data, reduction.axis, 0) for x in given]
    while len(left[0]) > 1:
        half = len(left[0]) // 2
        pairs = [reduction.to_tensor(x[part], kind) for part in (slice(half), slice(half, None))
                 for x, kind in zip(left, kinds, strict=True)]
        found = reduction.combine_fn.fn(*pairs)
        left = [x.handle.data for x in (found if isinstance(found, tuple) else (found,))]
    return [reduction.to_tensor(x[0], kind) for x, kind in zip(left, kinds, strict=True)]


def _replace(place: Any, name: str, by: Any) -> None:
    if hasattr(place, name):
        setattr(place, name, by)


if hasattr(interpreter, "_patch_attr"):
    _replace(interpreter, "_patch_builtin", _patch_builtin)
if hasattr(interpreter, "_get_np_dtype"):
    _replace(interpreter, "_get_np_dtype", _remembering(interpreter._get_np_dtype))
if hasattr(interpreter, "interpreter_semantic"):
    _replace(interpreter.interpreter_semantic, "binary_op_sanitize_overflow_impl", _check_overflow)
if release(triton.__version__) >= (3, 4) and hasattr(interpreter.ReduceOps, "generic_reduce"):
    _reduce_elements = interpreter.ReduceOps.generic_reduce
    interpreter.ReduceOps.generic_reduce = _reduce_halves
