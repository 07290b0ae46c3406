"""Our function, called as another package's is called."""
from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from flashlin.integrations.bindings import named_like

# Parameters of the originals that our signatures have only to say, by name, that they must be None.
REFUSED = frozenset({"process_group"})
_told: set[tuple[str, str]] = set()


def by_name(original: Callable[..., Any], ours: Callable[..., Any]) -> Any:
    """``ours`` under the name and signature of ``original``, for callers of that.

    Positions are those of the original, whose order differs between releases. What only the original knows
    goes to the original, if it is not its default: those calls run as without flashlin, and that is told
    once. A keyword that the original takes by ``**kwargs`` and that nobody knows is dropped, and told once:
    the original ignores it without a word.
    """
    theirs, mine = inspect.signature(original), inspect.signature(ours)
    order, my_order = positional(theirs), positional(mine)
    defaults = {name: one.default for name, one in theirs.parameters.items()}
    swallows = any(one.kind is one.VAR_KEYWORD for one in theirs.parameters.values())
    served = frozenset(name for name, one in mine.parameters.items()
                       if one.kind is not one.VAR_KEYWORD) - REFUSED
    # so many leading arguments are the same and served: the usual call is passed on as it is
    same = next((at for at, (a, b) in enumerate(zip(order, my_order, strict=False))
                 if a != b or a in REFUSED), min(len(order), len(my_order)))
    name = original.__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= same and all(key in served for key in kwargs):
            return ours(*args, **kwargs)
        given: dict[str, Any] = {**dict(zip(order, args, strict=False)), **kwargs}
        if len(given) < len(args) + len(kwargs):  # too many positions, or an argument given twice
            return original(*args, **kwargs)  # a TypeError, in its own words
        missing = unserved(given, served, defaults)
        if missing:
            tell(name, missing, "which only the package's own function has; that one runs")
            return original(*args, **kwargs)
        unknown = [key for key in given if key not in served and key not in defaults]
        if unknown and not swallows:
            return original(*args, **kwargs)  # the same
        if unknown:
            tell(name, ", ".join(unknown), "which the package's own function ignores, too")
        return ours(**{key: value for key, value in given.items() if key in served})
    stand_in = named_like(call, original, signature=theirs)
    stand_in.__wrapped__ = original  # registries that know the original find it: fla.backends.register
    return stand_in


def positional(signature: inspect.Signature) -> list[str]:
    return [name for name, one in signature.parameters.items()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def unserved(given: Mapping[str, Any], served: frozenset[str], defaults: Mapping[str, Any]) -> str:
    """Arguments of the original alone that are not its defaults, as text."""
    return ", ".join(key for key, value in given.items()
                     if key not in served and key in defaults and value is not defaults[key]
                     and not (isinstance(value, (bool, int, float, str)) and value == defaults[key]))


def tell(function: str, arguments: str, what: str) -> None:
    """Once for each function and arguments."""
    if (function, arguments) not in _told:
        _told.add((function, arguments))
        warnings.warn(f"{function}: got {arguments}, {what}", stacklevel=4)
