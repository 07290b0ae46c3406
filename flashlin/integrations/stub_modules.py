"""Stub modules for modules that are missing or do not load, for as long as a patch is in force.

``import``, ``importlib.import_module`` and ``importlib.util.find_spec`` all find them.
"""
from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flashlin.compat.import_hooks import remove
from flashlin.compat.lazy_imports import asked_by_import

Contents = Mapping[str, Any]  # a module's attributes by name


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder and loader of stub modules, which comes before all other finders.

    modules: the contents of the stub modules, by full name, beginning with the outermost one.
    advice: returns the error message for an import of any other name from the first of these modules. It is
        given for a whole package. All its modules are packages then, so that imports from them find this.
    """

    def __init__(self, modules: Mapping[str, Contents], advice: Callable[[str], str] | None = None) -> None:
        self.modules, self.advice, self.package = modules, advice, next(iter(modules))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a stub module, or None for any other module.

        Raises ModuleNotFoundError if an import statement needs another module of the package.
        """
        if name in self.modules:
            return ModuleSpec(name, self, origin="flashlin", is_package=self.advice is not None)
        if self.advice is not None and name.startswith(f"{self.package}.") and asked_by_import():
            raise ModuleNotFoundError(self.advice(name), name=self.package)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a stub module with its contents."""
        vars(module).update(self.modules[module.__name__])

    def begin(self) -> None:
        """Make the stub modules importable."""
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Remove the stub modules. Functions that programs have imported from them continue to work."""
        remove(self)
        for name in self.modules:
            if getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None) is self:
                del sys.modules[name]
