"""The records of all families, read from ``recipe.py`` of every subfolder of kernels/, and look-ups by op."""
from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from flashlin import kernels
from flashlin.compat.suggestions import need_one_of
from flashlin.guards.family import Family, Op, Typical

# The order of the folders in doctor's output. Folders that are not listed here come last.
ORDER = ("simple_gla", "delta", "gla", "dplr", "hgrn", "norm", "conv", "mamba", "selective", "pointwise",
         "rotary", "cross_entropy")


def _records() -> Iterator[Family]:
    folders = [module.name for module in iter_modules(kernels.__path__) if module.ispkg]
    for folder in sorted(folders, key=lambda name: (*ORDER, name).index(name)):
        yield from import_module(f"{kernels.__name__}.{folder}.recipe").SPECS


FAMILIES: dict[str, Family] = {family.name: family for family in _records()}
# All public ops by name, each with the name of its family.
PUBLIC: dict[str, Op] = {op.name: op._replace(family=op.family or family.name)
                         for family in FAMILIES.values() for op in family.ops}

# The op that a layer of this name calls in training. SHORT_NAMES adds the names that follow from op names.
MODELS = {"deltanet": "chunk_delta_rule", "gated_deltanet": "chunk_gated_delta_rule",
          "deltaproduct": "chunk_gated_delta_product",
          "dplr": "chunk_dplr_delta_rule", "iplr": "chunk_iplr_delta_rule", "hgrn2": "chunk_gla",
          "retnet": "chunk_retention", "lightning": "chunk_lightning_attn",
          "linear_attention": "chunk_linear_attn", "mamba": "selective_scan_fn",
          "mamba1": "selective_scan_fn", "mamba2": "mamba_chunk_scan_combined",
          "ssd": "mamba_chunk_scan_combined", "mamba3": "mamba3_siso_combined"}


def _squeezed(name: str) -> str:
    return re.sub("[ _-]", "", name).lower()


# Short names of ops, in lower case without spaces, hyphens and underscores: the names in MODELS, the names of
# chunk_ ops without the prefix, and the names of ops that choose the mode themselves.
SHORT_NAMES = {**{_squeezed(op.removeprefix("chunk_")): op for op in PUBLIC if op.startswith("chunk_")},
               **{_squeezed(op): op for op in PUBLIC if PUBLIC[op].mode == "auto"},
               **{_squeezed(name): op for name, op in MODELS.items()}}


def op_of(name: str) -> str:
    """Return the public op that has this name or short name (``gdn``, ``Mamba2``).

    Raise ValueError if none has it; the message names similar ops.
    """
    known = isinstance(name, str) and (name if name in PUBLIC else SHORT_NAMES.get(_squeezed(name)))
    if not known:
        ops = sorted(PUBLIC, key=lambda name: bool(PUBLIC[name].planned_as))  # aliases come last
        raise ValueError(f"op: got {name!r}, {need_one_of(name, ops)}")
    return known


def family_of(op: str) -> Family:
    """Return the family whose kernels run a public op."""
    return FAMILIES[PUBLIC[op].family]


def typical(op: str) -> Typical:
    """Return the sizes of typical calls of an op, by use (such as training or decoding)."""
    return PUBLIC[op].typical or family_of(op).typical
