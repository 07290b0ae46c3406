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


class StandIns(importlib.abc.MetaPathFinder):
    """Finds the modules of a table, by full name, before anybody else; those that others are inside of are
    packages."""

    def __init__(self, modules: Mapping[str, Contents]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        inside = any(other.startswith(f"{name}.") for other in self.modules)
        return ModuleSpec(name, Loader(self.modules[name]), origin="flashlin", is_package=inside)

    def begin(self) -> None:
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Nothing finds them any more; what programs have taken of them stays with those programs."""
        remove(self)
        for name, contents in self.modules.items():
            loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
            if isinstance(loader, Loader) and loader.contents is contents:
                del sys.modules[name]


class Loader(importlib.abc.Loader):
    def __init__(self, contents: Contents) -> None:
        self.contents = contents

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.contents)
