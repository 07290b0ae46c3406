"""The records of all families: those of every folder beside this file that has a ``recipe.py``."""
from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from flashlin import kernels
from flashlin.guards.family import Family, Op, Typical

# Doctor tells of the folders in this order; of those not named here last.
ORDER = ("simple_gla", "delta", "gla", "dplr", "hgrn", "norm", "conv", "mamba", "selective", "pointwise",
         "rotary", "cross_entropy")


def _records() -> Iterator[Family]:
    folders = [module.name for module in iter_modules(kernels.__path__) if module.ispkg]
    for folder in sorted(folders, key=lambda name: (*ORDER, name).index(name)):
        yield from import_module(f"{kernels.__name__}.{folder}.recipe").SPECS


FAMILIES: dict[str, Family] = {family.name: family for family in _records()}
# Every public op by its name, with its family.
PUBLIC: dict[str, Op] = {op.name: op._replace(family=op.family or family.name)
                         for family in FAMILIES.values() for op in family.ops}


def family_of(op: str) -> Family:
    """The family whose kernels run a public op."""
    return FAMILIES[PUBLIC[op].family]


def typical(op: str) -> Typical:
    """The sizes that people call an op with, by what for."""
    return PUBLIC[op].typical or family_of(op).typical
