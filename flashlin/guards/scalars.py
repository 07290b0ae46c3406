"""Checks of arguments that are no tensors: numbers, counts, choices, flags. A wrong one is a TypeError or
ValueError that names it, what it got and what it needs. None of them is ever a tensor: asking for its value
would wait for a GPU, and more than one element has no value at all."""
from __future__ import annotations

import sys
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

import torch

INT64, INT32 = 2**63 - 1, 2**31 - 1
LARGEST = sys.float_info.max
LONG = 10**30  # integers from here on are not printed in full
ABOVE_ZERO = sys.float_info.min  # a smaller one may count as 0, where denormal numbers are flushed


def number(name: str, value: Any, low: float = -LARGEST, high: float = LARGEST,
           need: str = "a finite number") -> float:
    """value as a float in low .. high, which is never NaN and, unless those are, never infinite. numpy's
    numbers will do, a bool will not: it is a flag in a number's place."""
    if type(value) is not float and (isinstance(value, bool)
                                     or not isinstance(value, (Real, torch.SymFloat, torch.SymInt))):
        raise TypeError(f"{name}: got {_shown(value)}, need {need}")
    try:
        result = float(value)
    except OverflowError:  # of an integer that no float can hold
        raise ValueError(f"{name}: got {_short(value)}, need {need}") from None
    if not low <= result <= high:
        raise ValueError(f"{name}: got {_short(value)}, need {need}")
    return result


def integer(name: str, value: Any, low: int | None = None, need: str = "an integer",
            high: int = INT64) -> int:
    """Return value as an int from low (None: the smallest int64) to high. torch accepts no other integers."""
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
    """value is one of them: strings, integers, None. need: other words for which ones."""
    # int before Integral: what is one is found without a look into abc's tables
    if not (value is None or isinstance(value, (str, int, Integral))) or value not in choices:
        raise ValueError(f"{name}: got {_shown(value)}, need "
                         f"{need or 'one of ' + ', '.join(map(str, choices))}")


def flag(name: str, value: Any) -> bool:
    """value as a bool. None is False, as layers pass on a use_cache that nobody has set; integers and numpy's
    bools will do."""
    if type(value) is bool:
        return value
    if value is None or isinstance(value, (int, torch.SymBool)) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"{name}: got {_shown(value)}, need True or False")


def flags(**given: Any) -> None:
    """Each is fit for ``if``."""
    for name, value in given.items():
        if type(value) is not bool:
            flag(name, value)


def _shown(value: Any) -> str:
    """Values that fit into a sentence; of others what they are."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return str(_short(value)) if type(value) is int else repr(value) if plain else type(value).__name__


def _short(value: Any) -> Any:
    """Return value, or a short description of an integer with too many digits to print."""
    long = isinstance(value, int) and not -LONG < value < LONG
    return f"an integer of {value.bit_length()} bits" if long else value
