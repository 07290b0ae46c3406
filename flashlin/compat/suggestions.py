"""Suggestions for error messages about an unknown name: at most five known names that resemble it."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from functools import wraps
from typing import Any, ParamSpec, TypeVar

MOST = 5
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def similar(given: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return at most five of the known names that resemble ``given``, the closest first.

    If some names contain ``given``, only these are returned, and names that begin with it come first.
    Otherwise the names with the closest spelling are returned.

    cutoff: the least similarity of a spelling, from 0 to 1.
    """
    asked, names = given.lower(), {name.lower(): name for name in known}
    close = [name for name in names if len(asked) > 2 and asked in name]
    close.sort(key=lambda name: (not name.startswith(asked), len(name), name))
    if not close:
        likeness = {name: SequenceMatcher(None, name, asked).ratio() for name in names}
        enough = max(cutoff, max(likeness.values(), default=0.0) - 0.1)
        close = [name for name in names if likeness[name] >= enough]
        close.sort(key=lambda name: (likeness[name], name), reverse=True)
    return [names[name] for name in close if names[name] != given][:MOST]


def either(names: list[str]) -> str:
    """Return the names as a list in words: ``"a, b or c"``."""
    return " or ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.6, most: int = MOST) -> str:
    """Return ``"; did you mean a or b?"``, or ``""`` if no known name resembles ``given``."""
    close = similar(given, known, cutoff)[:most]
    return f"; did you mean {either(close)}?" if close else ""


def need_one_of(given: object, known: Iterable[str]) -> str:
    """Return the part of an error message that lists the accepted names and suggests similar ones."""
    names = list(known)
    meant = did_you_mean(str(given), names)
    if len(names) <= MOST:
        return f"need one of {', '.join(names)}{meant}"
    return (f"need one of {len(names)} known names{meant}" if meant else
            f"need one of {', '.join(names[:MOST])} or {len(names) - MOST} others")


def keywords_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's explicit parameters, without ``*args`` and ``**kwargs``."""
    code = function.__code__
    return code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]


def suggests_keywords(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Decorate a function so that its TypeError for an unknown keyword suggests similar keywords."""
    known = keywords_of(function)

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{function.__name__}: got unexpected keyword {name}, "
                                f"{need_one_of(name, known)}")
        return function(*args, **kwargs)
    return checked
