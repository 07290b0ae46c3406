"""Call a function when a module has been imported.

With it, a patch also reaches modules that are imported later. It also lets torch find flashlin's operators
when torch loads an exported program.
"""
from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Watcher:
    """An entry of ``sys.meta_path`` that calls a function after a module of some packages has run.

    It finds no modules itself. It wraps the loader that another finder returns.

    packages: names of packages. A name that ends in * means all packages with that prefix. A name with dots
        means one module.
    then: the function, called with the module.
    """

    def __init__(self, packages: Sequence[str], then: Callable[[ModuleType], None]) -> None:
        self.packages, self.then = tuple(packages), then
        self._beginnings = tuple(one[:-1] for one in packages if one.endswith("*"))
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec that the other finders return, with its loader wrapped; None for other packages."""
        package = name.partition(".")[0]
        wanted = package in self.packages or name in self.packages or package.startswith(self._beginnings)
        if not wanted or name in vars(self._asking):
            return None
        setattr(self._asking, name, True)
        try:
            spec = next((found for finder in list(sys.meta_path)
                         if finder is not self and hasattr(finder, "find_spec")
                         for found in [finder.find_spec(name, path, target)] if found is not None), None)
        finally:
            delattr(self._asking, name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            loader: Any = Telling(spec.loader, self.then)  # has the members of a loader, but not its type
            spec.loader = loader
        return spec


class Telling:
    """A wrapper around a loader that calls ``then`` with the module after the module has run.

    ``__loader__`` and ``__spec__`` of the module refer to the wrapped loader, so the module never sees this
    wrapper.
    """

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self.loader, self.then = loader, then

    def __getattr__(self, name: str) -> Any:
        # in an unfinished copy of this object, "loader" is missing, and this raises AttributeError
        return getattr(super().__getattribute__("loader"), name)

    def exec_module(self, module: Any) -> None:
        """Run the module with the wrapped loader, then call ``then`` with it."""
        module.__loader__ = self.loader
        if getattr(module, "__spec__", None) is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        try:
            # a lazy package may have replaced its module in sys.modules while it ran
            self.then(sys.modules.get(module.__name__, module))
        except Exception as error:
            not_prepared(module.__name__, error)


# Python removes the frames of its import machinery from tracebacks, and recognizes them by their file name.
# We give ``exec_module`` that file name, so that Python also removes its frame. Errors of a watched module
# then look as they do without flashlin.
Telling.exec_module.__code__ = Telling.exec_module.__code__.replace(
    co_filename=importlib.__import__.__code__.co_filename)


def not_prepared(name: str, error: Exception) -> None:
    """Warn that the callback for a module failed.

    It does not raise, because the program's import must not fail because of flashlin.
    """
    warnings.warn(f"flashlin could not prepare {name}: {type(error).__name__}: {error}; it runs unchanged",
                  RuntimeWarning, stacklevel=3)


def watch(packages: Sequence[str], then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``then`` with each newly imported module of these packages; return a function that stops this.

    packages, then: as of ``Watcher``.
    """
    watcher = Watcher(packages, then)
    sys.meta_path.insert(0, watcher)
    return lambda: remove(watcher)


def remove(finder: Any) -> None:
    """Remove a finder from ``sys.meta_path``, if the list contains it.

    The list is replaced, not changed. An import in another thread may still iterate over the old list, and a
    removal from that list would make the import skip a finder.
    """
    sys.meta_path = [one for one in sys.meta_path if one is not finder]
