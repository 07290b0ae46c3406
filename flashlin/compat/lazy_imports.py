"""Load public names on first use (PEP 562), so that importing a package is fast.

A package lists the module of each of its public names in a table. Type checkers read a stub next to the
package instead, which ``python -m tools.stubs`` generates from the same table. The names are also available
under the module paths that fla uses for them.
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
# Module paths that a program uses after its author has replaced ``fla.`` by ``flashlin.``.
OF_FLA = re.compile(rf"flashlin\.((ops|modules)\.[^_]|({'|'.join(ABSENT)})\b)")


def lacking(name: str) -> str:
    """Return the advice for a name of fla that flashlin does not have."""
    name = name.removeprefix("flashlin.")
    return (f"flashlin has no {name}: if fla has it, keep fla.{name} (docs/migration.md lists the names "
            "that flashlin has)")


def asked_by_import() -> bool:
    """Return True if an import calls the finder that calls this function, and False for a search."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name != "_find_spec":  # a finder may call another one
        frame = frame.f_back
    # An import reaches _find_spec through the function _find_and_load_unlocked, and a search does not. If a
    # Python release has other names for them, the user gets Python's usual error.
    return frame.f_back is not None and frame.f_back.f_code.co_name == "_find_and_load_unlocked"


class Lacking:
    """The last finder of ``sys.meta_path``, which adds advice to failed imports of fla's module paths.

    It raises only for an import statement. For a search such as ``importlib.util.find_spec`` it returns None,
    as for any missing module.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError with advice if an import statement needs a missing module of fla."""
        if OF_FLA.match(name) and asked_by_import():
            # without name=, because `from flashlin import x` ignores a ModuleNotFoundError with that name
            raise ModuleNotFoundError(lacking(name))


sys.meta_path.append(Lacking)


def attach(
    package: str, where: Callable[[], Mapping[str, str]], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: name of the package.
        where: returns the module of each public name, as ``module:name`` if the name differs there. It is
            called when a name is first used.
        submodules: modules of the package that are also attributes of it. ``__all__`` does not list them.
    """
    def names() -> list[str]:
        return sorted([*where(), *(["__version__"] if "__version__" in vars(sys.modules[package]) else [])])

    def get(name: str) -> Any:
        if name == "__all__":
            return names()
        if name in submodules:
            return import_module(f"{package}.{name}")  # the import also sets the attribute
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
    if not name.startswith("_") and name not in ABSENT:  # no advice for _names: tools look up many of them
        from flashlin.compat.suggestions import did_you_mean  # here, so that importing flashlin stays fast
        said += did_you_mean(name, known)
    return AttributeError(said, name=name)  # with a name but no object, Python adds no suggestion of its own


def public_of(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` that gives a module all public names of flashlin.

    module: name of the module, for its errors.
    """
    def get(name: str) -> Any:
        flashlin = import_module("flashlin")
        if name.startswith("_") or name not in flashlin.__all__:
            raise _no_attribute(module, name, flashlin.__all__)
        return getattr(flashlin, name)
    return get


def stand_in(package: str, paths: Iterable[str]) -> None:
    """Create modules without files below a package, at the module paths that fla uses.

    Programs that were written for fla then find the public names there. An example:
    ``from flashlin.modules.l2norm import l2norm``.

    paths: the module paths, relative to ``package``.
    """
    for path in paths:
        name = f"{package}.{path}"
        module = ModuleType(name, "Public names of flashlin, under a module path of fla.")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__, module.__file__ = [], sys.modules[package].__file__  # tools need an existing path
        module.__getattr__ = public_of(name)  # type: ignore[method-assign]
        sys.modules[name] = module
        if "." not in path:
            setattr(sys.modules[package], path, module)
