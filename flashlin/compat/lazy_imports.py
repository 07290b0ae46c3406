"""Public names that are loaded when first used, so that importing a package loads next to nothing (PEP 562);
also under the module paths that fla has for them.

A package says where its names are, and the types that a checker needs of them stand in a stub beside it,
which is generated from the same table: ``python -m tools.stubs``.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ABSENT = ("layers", "models", "utils")  # packages of fla that flashlin does not have
# Where a replacement of ``fla.`` leads to.
OF_FLA = re.compile(rf"flashlin\.((ops|modules)\.[^_]|({'|'.join(ABSENT)})\b)")


def lacking(name: str) -> str:
    """What to do about a name that a program written for fla looks for."""
    name = name.removeprefix("flashlin.")
    return (f"flashlin has no {name}: if fla has it, keep fla.{name} (docs/MIGRATION.md lists what flashlin "
            "has)")


class Lacking:
    """Last in ``sys.meta_path``: tells an import that fails what to do. Who only asks whether a module is
    there, as ``importlib.util.find_spec`` does, has the usual answer: None."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        # told by who called the caller; where Python has another name for that, its usual error comes
        asks = sys._getframe(1).f_back if OF_FLA.match(name) else None
        if asks is not None and asks.f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(lacking(name))  # without the name, by which `from` passes it over


sys.meta_path.append(Lacking)


def attach(
    package: str, where: Callable[[], Mapping[str, str]], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        where: returns the module of each public name, as ``module:name`` if the name differs there. It is
            called when a name is first used.
        submodules: modules of the package that are attributes, too. ``__all__`` does not have them.
    """
    def names() -> list[str]:
        return sorted([*where(), *(["__version__"] if "__version__" in vars(sys.modules[package]) else [])])

    def get(name: str) -> Any:
        if name == "__all__":
            return names()
        if name in submodules:
            return import_module(f"{package}.{name}")  # which also sets the attribute
        place = where().get(name)
        if place is None:
            raise _no_attribute(package, name, [*names(), *submodules])
        module, _, called = place.partition(":")
        value = getattr(import_module(module), called or name)
        setattr(sys.modules[package], name, value)
        return value
    return get, lambda: sorted([*names(), *submodules])


def _no_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    asked = f"{module}.{name}"
    said = lacking(asked) if OF_FLA.match(asked) else f"module {module!r} has no attribute {name!r}"
    if not name.startswith("_") and name not in ABSENT:  # tools ask for many names that begin with _
        from flashlin.compat.suggestions import did_you_mean  # not when flashlin is imported
        said += did_you_mean(name, known)
    return AttributeError(said, name=name)  # given a name, Python adds no suggestion of its own


def public_of(module: str) -> Callable[[str], Any]:
    """A ``__getattr__`` by which a module has all public names of flashlin."""
    def get(name: str) -> Any:
        flashlin = import_module("flashlin")
        if name.startswith("_") or name not in flashlin.__all__:
            raise _no_attribute(module, name, flashlin.__all__)
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
