"""Public names that are loaded when first used, so that importing a package loads next to nothing (PEP 562).

A package says where its names are, and the types that a checker needs of them stand in a stub beside it,
which is generated from the same table: ``python -m tools.stubs``.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(
    package: str, where: Callable[[], Mapping[str, str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a package. where: the module of each public name, as
    ``module:name`` if it has another name there; asked when a name is first used."""
    def names() -> list[str]:
        return sorted([*where(), *(["__version__"] if "__version__" in vars(sys.modules[package]) else [])])

    def get(name: str) -> Any:
        if name == "__all__":
            return names()
        place = where().get(name)
        if place is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, called = place.partition(":")
        value = getattr(import_module(module), called or name)
        setattr(sys.modules[package], name, value)
        return value
    return get, names
