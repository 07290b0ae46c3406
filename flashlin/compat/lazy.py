"""Public names that are loaded when first used, so that importing a package loads next to nothing (PEP 562);
also under the module paths that fla has for them.

A package says where its names are, and the types that a checker needs of them stand in a stub beside it,
which is generated from the same table: ``python -m tools.stubs``.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
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


def public_of(module: str) -> Callable[[str], Any]:
    """A ``__getattr__`` by which a module has all public names of flashlin."""
    def get(name: str) -> Any:
        flashlin = import_module("flashlin")
        if name.startswith("_") or name not in flashlin.__all__:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(flashlin, name)
    return get


def stand_in(package: str, paths: Iterable[str]) -> None:
    """Modules below ``package`` without files, at which programs that were written for fla look for public
    names: ``from flashlin.modules.l2norm import l2norm``."""
    for path in paths:
        name = f"{package}.{path}"
        module = ModuleType(name, "Public names of flashlin, where fla has them.")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__, module.__file__ = [], sys.modules[package].__file__  # who looks for it finds this
        module.__getattr__ = public_of(name)  # type: ignore[method-assign]
        sys.modules[name] = module
        if "." not in path:
            setattr(sys.modules[package], path, module)
