"""Call a function of flashlin with the arguments of another package's function."""
from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from flashlin.integrations.bindings import named_like

# Parameters that flashlin's functions do not support. They are in the signatures only so that a value other
# than None raises an error with the name of the parameter.
REFUSED = frozenset({"process_group"})
_told: set[tuple[str, str]] = set()


def by_name(original: Callable[..., Any], ours: Callable[..., Any]) -> Any:
    """Return a function that calls ``ours``, with the name and signature of ``original``.

    Positional arguments have the order of the original, which differs between releases. If a call has an
    argument that only the original supports, with a value that is not its default, the original runs, and a
    warning says so once. A keyword that neither function has is dropped, with one warning, if the original
    accepts it by ``**kwargs`` and ignores it.
    """
    theirs, mine = inspect.signature(original), inspect.signature(ours)
    order, my_order = positional(theirs), positional(mine)
    defaults = {name: one.default for name, one in theirs.parameters.items()}
    swallows = any(one.kind is one.VAR_KEYWORD for one in theirs.parameters.values())
    served = frozenset(name for name, one in mine.parameters.items()
                       if one.kind is not one.VAR_KEYWORD) - REFUSED
    # The number of leading parameters that both functions have in the same order. Most calls have no more
    # positional arguments, and are passed on unchanged.
    same = next((at for at, (a, b) in enumerate(zip(order, my_order, strict=False))
                 if a != b or a in REFUSED), min(len(order), len(my_order)))
    name = original.__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= same and all(key in served for key in kwargs):
            return ours(*args, **kwargs)
        given: dict[str, Any] = {**dict(zip(order, args, strict=False)), **kwargs}
        if len(given) < len(args) + len(kwargs):  # too many positions, or an argument given twice
            return original(*args, **kwargs)  # raises the function's own TypeError
        if missing := unserved(given, served, defaults):
            tell(name, missing, "which only the package's own function supports; that function runs")
            return original(*args, **kwargs)
        unknown = [key for key in given if key not in served and key not in defaults]
        if unknown and not swallows:
            return original(*args, **kwargs)  # also raises its own TypeError
        if unknown:
            tell(name, ", ".join(unknown), "which the package's own function also ignores")
        return ours(**{key: value for key, value in given.items() if key in served})
    stand_in = named_like(call, original, signature=theirs)
    stand_in.__wrapped__ = original  # fla.backends.register unwraps functions to find their registries
    return stand_in


def positional(signature: inspect.Signature) -> list[str]:
    """Return the names of the parameters that can be given by position."""
    return [name for name, one in signature.parameters.items()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def unserved(given: Mapping[str, Any], served: frozenset[str], defaults: Mapping[str, Any]) -> str:
    """Return the names of arguments that only the original supports, without those with its default value.

    The names are separated by commas.

    given: the arguments of the call.
    served: the names that flashlin's function supports.
    defaults: the default values of the original.
    """
    return ", ".join(key for key, value in given.items()
                     if key not in served and key in defaults and value is not defaults[key]
                     and not (isinstance(value, (bool, int, float, str)) and value == defaults[key]))


def tell(function: str, arguments: str, what: str) -> None:
    """Warn about these arguments of a function, once for each pair of function and arguments.

    what: the rest of the sentence, after the arguments.
    """
    if (function, arguments) not in _told:
        _told.add((function, arguments))
        warnings.warn(f"{function}: got {arguments}, {what}", stacklevel=4)
