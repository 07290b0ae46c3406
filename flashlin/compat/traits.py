"""Traits: properties of a kernel's source, operands or tile that known issues test. TRAITS defines each one.

``trait_set("dot", "bf16")`` makes a set of traits, and raises ValueError for a name that TRAITS lacks. Known
issues, recipes and the code that reads kernels' sources make their sets with it.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from flashlin.compat.suggestions import need_one_of

HALVES = frozenset({"float16", "bfloat16"})

# The sources of a trait.
# SOURCE: kernels/shield/source.py reads it from a kernel's source; recipes declare it for flashlin's kernels.
SOURCE = "source"
# CALL: the kernel calls the function of triton.language with the trait's name. Some Triton releases lack it.
CALL = "call"
# OPERANDS: a rule derives the trait from the other traits, the dtypes of the operands and the tile.
OPERANDS = "operands"
# TILE: a rule derives the trait from BT, BK and BV. Recipes also offer tiles that do not have the trait.
TILE = "tile"
# DECLARED: the code that makes the launch declares the trait.
DECLARED = "declared"


class Kernel(NamedTuple):
    """The properties of a kernel that the rules of the source OPERANDS read.

    traits: all other traits of the kernel.
    dtypes: torch names of the tensors' dtypes, such as ``bfloat16``.
    half: True if its matrix products have 16-bit operands.
    tallest: the largest size of its tile.
    """
    traits: frozenset[str]
    dtypes: frozenset[str]
    half: bool
    tallest: int


class Trait(NamedTuple):
    """The definition of one trait.

    name: name of the trait.
    found: its source: SOURCE, CALL, OPERANDS, TILE or DECLARED.
    meaning: completes the sentence "the launch ...".
    rule: returns True if a kernel has the trait. It is called with a Kernel for OPERANDS, and with BT, BK and
        BV for TILE. None for the other sources.
    """
    name: str
    found: str
    meaning: str
    rule: Callable[..., bool] | None = None


TRAITS = {trait.name: trait for trait in (
    Trait("dot", SOURCE, "multiplies matrices"),
    Trait("any_precision", SOURCE, "has a product that may use tf32"),
    Trait("rmw_acc", SOURCE, "scales a value in a loop and multiplies by it, as a recurrence does"),
    Trait("fresh_acc", SOURCE, "adds a product in a loop to a value that the same iteration has made"),
    Trait("chained_acc", SOURCE, "adds two products in a loop to one accumulator"),
    Trait("row_sums", SOURCE, "accumulates sums or maxima of a loaded tile's rows in a loop"),
    Trait("read_row_sums", SOURCE, "has row_sums and also reads them in the loop"),
    Trait("atomic_add", CALL, "adds to memory atomically"),
    Trait("gather", CALL, "picks elements of a tile by index"),
    Trait("make_block_ptr", CALL, "has block pointers"),
    Trait("make_tensor_descriptor", CALL, "has tensor descriptors"),
    Trait("bf16", OPERANDS, "has a bf16 tensor", lambda kernel: "bfloat16" in kernel.dtypes),
    Trait("both_halves", OPERANDS, "has fp16 and bf16 tensors", lambda kernel: kernel.dtypes >= HALVES),
    Trait("half_dot", OPERANDS, "multiplies 16-bit operands",
          lambda kernel: "dot" in kernel.traits and kernel.half),
    Trait("fp32_dot", OPERANDS, "multiplies fp32 operands",
          lambda kernel: "dot" in kernel.traits and not kernel.half),
    Trait("tf32_dot", OPERANDS, "multiplies fp32 operands and may use tf32",
          lambda kernel: "any_precision" in kernel.traits and not kernel.half),
    Trait("tall_state", OPERANDS, "has a state taller than its chunks (recipes: of 64 rows or more)",
          lambda kernel: "rmw_acc" in kernel.traits and kernel.tallest >= 256),
    Trait("narrow_state", TILE, "has chunks of 64 tokens and fewer than 64 rows or columns of a state",
          lambda BT, BK, BV: BT >= 64 > min(BK, BV)),
    Trait("narrow_scores", TILE, "has chunks of 64 tokens and multiplies fewer than 64 channels at a time",
          lambda BT, BK, BV: BT >= 64 > BK),
    Trait("narrow_grads", TILE, "has chunks of 64 tokens and few channels at a time for gradients",
          lambda BT, BK, BV: BT >= 64 and (BK < 32 or (BK < 64 and BV > 32))),
    Trait("mixed_sum", DECLARED, "adds up products, one of them of transposed operands"),
    Trait("v_first", DECLARED, "has a state that is stored [V, K]"),
    Trait("before", DECLARED, "reads the state before a token updates it"),
    Trait("overlapped", DECLARED, "runs loads, products and stores at the same time, in Gluon"),
    Trait("foreign", DECLARED, "is of a kernel outside flashlin, whose configurations we have not run"),
    Trait("autotuned", DECLARED, "is tuned; no launch has it, because tuning comes before the launch"),
)}


def _found(way: str) -> frozenset[str]:
    return frozenset(trait.name for trait in TRAITS.values() if trait.found == way)


LACKING, TILE_FACTS = _found(CALL), _found(TILE)
OVERLAPPED = "overlapped"


@lru_cache(maxsize=256)
def trait_set(*names: str) -> frozenset[str]:
    """Return a set of traits. Raises ValueError for a name that TRAITS does not define."""
    if unknown := sorted({*names} - {*TRAITS}):
        raise ValueError(f"trait: got {', '.join(unknown)}, {need_one_of(unknown[0], sorted(TRAITS))}")
    return frozenset(names)


@lru_cache(maxsize=1024)
def with_operands(traits: frozenset[str], dtypes: frozenset[str], half: bool = False,
                  tile: tuple[tuple[str, int], ...] = ()) -> frozenset[str]:
    """Return ``traits`` with all traits of the source OPERANDS replaced by those that these operands have.

    dtypes: torch names of the tensors' dtypes.
    half: True if matrix products have 16-bit operands although no tensor has such a dtype.
    tile: (name, size) of each size of the tile.
    """
    others = traits - _found(OPERANDS)
    kernel = Kernel(others, dtypes, half or bool(dtypes & HALVES), max((size for _, size in tile), default=0))
    return others | {trait.name for trait in TRAITS.values()
                     if trait.found == OPERANDS and trait.rule is not None and trait.rule(kernel)}


def of_tile(name: str, BT: int, BK: int, BV: int = 0) -> frozenset[str]:
    """Return a set with the named trait of the source TILE if a tile has it, or else an empty set.

    BT: tokens of a chunk. BK, BV: rows and columns of the state in the tile.
    """
    traits, rule = trait_set(name), TRAITS[name].rule
    return traits if rule is not None and rule(BT, BK, BV) else frozenset()
