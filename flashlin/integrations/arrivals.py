"""Says when a module has been imported, so that a patch also reaches what is imported after it."""
from __future__ import annotations

import importlib.abc
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Watcher(importlib.abc.MetaPathFinder):
    """In ``sys.meta_path``: finds nothing by itself, and calls ``then`` when a module of these packages (or
    below one of them) has run. A name that ends in * is that of all packages that begin so."""

    def __init__(self, packages: Sequence[str], then: Callable[[ModuleType], None]) -> None:
        self.packages, self.then = tuple(packages), then
        self._beginnings = tuple(one[:-1] for one in packages if one.endswith("*"))
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self._of_interest(name.partition(".")[0]) or name in vars(self._asking):
            return None
        setattr(self._asking, name, True)
        try:
            spec = next((found for finder in list(sys.meta_path) if finder is not self
                         for found in [finder.find_spec(name, path, target)] if found is not None), None)
        finally:
            delattr(self._asking, name)
        if spec is not None and hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, type):
            self._tell(spec.loader)
        return spec

    def _of_interest(self, package: str) -> bool:
        return package in self.packages or package.startswith(self._beginnings)

    def _tell(self, loader: Any) -> None:
        run = loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            arrived = sys.modules.get(module.__name__, module)  # lazy packages replace themselves
            try:
                self.then(arrived)
            except Exception as error:  # a program's import must not fail by what was to help it
                warnings.warn(f"flashlin could not patch {module.__name__}: {type(error).__name__}: {error}; "
                              "it runs as it is", RuntimeWarning, stacklevel=2)
        loader.exec_module = run_and_tell


def watch(packages: Sequence[str], then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Begin to watch; what is returned ends it."""
    watcher = Watcher(packages, then)
    sys.meta_path.insert(0, watcher)

    def end() -> None:
        if watcher in sys.meta_path:
            sys.meta_path.remove(watcher)
    return end
