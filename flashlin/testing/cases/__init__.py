"""The cases of every op, by family: the one table behind the tests, doctor --run and the GPU records. A
family is in it if it has a file beside this one with ``CASES``."""
from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from flashlin.testing.compare import Case

# Cases are run in this order; of files not named here last.
ORDER = ("simple_gla", "delta", "gla", "rwkv6", "dplr", "recurrent", "hgrn", "norm", "conv", "pointwise",
         "norm_linear", "rotary", "cross_entropy", "mamba")


def _families() -> list[ModuleType]:
    files = [file.name for file in iter_modules(__path__)]
    files.sort(key=lambda name: (*ORDER, name).index(name))
    found = [import_module(f"{__name__}.{file}") for file in files]
    return [module for module in found if hasattr(module, "CASES")]


FAMILIES = tuple(_families())
CASES: tuple[Case, ...] = tuple(case for family in FAMILIES for case in family.CASES)
