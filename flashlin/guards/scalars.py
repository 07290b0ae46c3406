"""Checks of arguments that are not tensors: numbers, counts, choices and flags.

A wrong argument raises TypeError or ValueError with the name of the argument, the given value and the
requirement. The checks reject tensors. A call that reads the value of a tensor would wait for the GPU, and a
tensor with more than one element has no single value.
"""
from __future__ import annotations

import sys
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

import torch

INT64, INT32 = 2**63 - 1, 2**31 - 1
LARGEST = sys.float_info.max
LONG = 10**30  # integers of this magnitude or more are not printed in full
ABOVE_ZERO = sys.float_info.min  # smallest normal float; machines may flush smaller ones to 0


def number(name: str, value: Any, low: float = -LARGEST, high: float = LARGEST,
           need: str = "a finite number") -> float:
    """Return a number as a float between low and high; raise TypeError or ValueError otherwise.

    NaN is always rejected, and infinity is rejected unless a bound is infinite. numpy's numbers are accepted.
    A bool is rejected, because it is probably a flag passed by mistake.
    name: the argument, for the error.
    need: the requirement, for the error.
    """
    if type(value) is not float and (isinstance(value, bool)
                                     or not isinstance(value, (Real, torch.SymFloat, torch.SymInt))):
        raise TypeError(f"{name}: got {_shown(value)}, need {need}")
    try:
        result = float(value)
    except OverflowError:  # an integer beyond the range of float
        raise ValueError(f"{name}: got {_short(value)}, need {need}") from None
    if not low <= result <= high:
        raise ValueError(f"{name}: got {_short(value)}, need {need}")
    return result


def integer(name: str, value: Any, low: int | None = None, need: str = "an integer",
            high: int = INT64) -> int:
    """Return an integer between low and high as an int; raise TypeError or ValueError otherwise.

    low: the smallest value; None for the smallest int64. The default of high is the largest int64. torch
    accepts no integers outside of int64.
    """
    if type(value) is not int and (isinstance(value, bool)
                                   or not isinstance(value, (Integral, torch.SymInt))):
        raise TypeError(f"{name}: got {_shown(value)}, need {need}")
    result = int(value)
    if low is not None and result < low:
        raise ValueError(f"{name}: got {_short(value)}, need {need}")
    if not -INT64 - 1 <= result <= high:
        limit = "at least -2**63" if result < 0 else f"below 2**{high.bit_length()}"
        raise ValueError(f"{name}: got {_short(value)}, need {need}, {limit}")
    return result


def choice(name: str, value: Any, choices: Collection[Any], need: str = "") -> None:
    """Raise ValueError unless value is one of the choices, which are strings, integers or None.

    need: the requirement in the error; by default the list of choices.
    """
    # int comes before Integral, because the check for an int is faster than a lookup in abc's registry.
    if not (value is None or isinstance(value, (str, int, Integral))) or value not in choices:
        raise ValueError(f"{name}: got {_shown(value)}, need "
                         f"{need or 'one of ' + ', '.join(map(str, choices))}")


def flag(name: str, value: Any) -> bool:
    """Return a flag as a bool; raise TypeError if it is not a bool, an integer or None.

    None counts as False, because layers pass on a ``use_cache`` that is not set. numpy's bools are accepted.
    """
    if type(value) is bool:
        return value
    if value is None or isinstance(value, (int, torch.SymBool)) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"{name}: got {_shown(value)}, need True or False")


def flags(**given: Any) -> None:
    """Raise TypeError unless each keyword argument is a valid flag: a bool, an integer or None."""
    for name, value in given.items():
        if type(value) is not bool:
            flag(name, value)


def _shown(value: Any) -> str:
    """Return a value as text for an error message: numbers and strings in full, else the type's name."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return str(_short(value)) if type(value) is int else repr(value) if plain else type(value).__name__


def _short(value: Any) -> Any:
    """Return value, or a short description of an integer with too many digits to print."""
    long = isinstance(value, int) and not -LONG < value < LONG
    return f"an integer of {value.bit_length()} bits" if long else value
