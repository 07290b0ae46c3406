"""The cases of every op, by family: the one table behind the tests, doctor --run and the GPU records. A
family is in it if it has a file beside this one with ``CASES``."""
from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from flashlin.testing.compare import Case

_modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
CASES: tuple[Case, ...] = tuple(case for module in _modules for case in getattr(module, "CASES", ()))
