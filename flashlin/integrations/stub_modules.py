"""Modules that are not there, or do not load, for as long as a patch lasts: found by ``import``,
``importlib.import_module`` and ``importlib.util.find_spec`` alike."""
from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flashlin.compat.import_hooks import remove

Contents = Mapping[str, Any]  # a module's attributes by name


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find and load the modules of a table, by full name, before any other finder. A module with others inside
    it is a package."""

    def __init__(self, modules: Mapping[str, Contents]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        inside = any(other.startswith(f"{name}.") for other in self.modules)
        return ModuleSpec(name, self, origin="flashlin", is_package=inside)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.modules[module.__name__])

    def begin(self) -> None:
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Nothing finds them any more; what programs have taken of them stays with those programs."""
        remove(self)
        for name in self.modules:
            if getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None) is self:
                del sys.modules[name]
