"""Traits: facts of a launch that known issues look for. Each is defined in one row of TRAITS.

``trait_set("dot", "bf16")`` makes a set of traits and refuses a name that has no row. Known issues, recipes
and the reader of sources make their sets with it.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from flashlin.compat.suggestions import need_one_of

HALVES = frozenset({"float16", "bfloat16"})

# The ways in which a launch gets a trait.
SOURCE = "source"  # kernels/shield/source.py reads it from a kernel's text; recipes declare it for ours
CALL = "call"  # the kernel calls the function of triton.language of that name, which some release lacks
OPERANDS = "operands"  # a rule derives it from the other traits, the types of the operands and the tile
TILE = "tile"  # a rule derives it from BT, BK and BV; recipes have candidates of another tile without it
DECLARED = "declared"  # whoever makes the launch declares it


class Kernel(NamedTuple):
    """The facts from which traits of OPERANDS follow. traits: the others; dtypes: torch's names of the
    tensors' types; half: its products have 16-bit operands; tallest: the largest size in its tile."""
    traits: frozenset[str]
    dtypes: frozenset[str]
    half: bool
    tallest: int


class Trait(NamedTuple):
    """meaning: completes the sentence "the launch ...". rule: of OPERANDS a function of a Kernel, of TILE a
    function of BT, BK and BV."""
    name: str
    found: str
    meaning: str
    rule: Callable[..., bool] | None = None


TRAITS = {trait.name: trait for trait in (
    Trait("dot", SOURCE, "multiplies matrices"),
    Trait("any_precision", SOURCE, "has a product that may use tf32"),
    Trait("rmw_acc", SOURCE, "scales a value in a loop and multiplies by it, as a recurrence does"),
    Trait("fresh_acc", SOURCE, "adds a product in a loop to what the same turn has made"),
    Trait("chained_acc", SOURCE, "adds two products in a loop to one accumulator"),
    Trait("row_sums", SOURCE, "accumulates sums or maxima of a loaded tile's rows in a loop"),
    Trait("read_row_sums", SOURCE, "has row_sums and reads them in the loop, too"),
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
    Trait("tall_state", OPERANDS, "has a state taller than its chunks; recipes declare it from 64 rows on",
          lambda kernel: "rmw_acc" in kernel.traits and kernel.tallest >= 256),
    Trait("narrow_state", TILE, "has chunks of 64 tokens and fewer than 64 rows or columns of a state",
          lambda BT, BK, BV: BT >= 64 > min(BK, BV)),
    Trait("narrow_scores", TILE, "has chunks of 64 tokens and multiplies fewer than 64 channels at a time",
          lambda BT, BK, BV: BT >= 64 > BK),
    Trait("narrow_grads", TILE, "has chunks of 64 tokens and takes few channels at a time for gradients",
          lambda BT, BK, BV: BT >= 64 and (BK < 32 or (BK < 64 and BV > 32))),
    Trait("mixed_sum", DECLARED, "adds up products, one of them of transposed operands"),
    Trait("v_first", DECLARED, "has a state that is stored [V, K]"),
    Trait("before", DECLARED, "reads the state before a token updates it"),
    Trait("overlapped", DECLARED, "runs loads, products and stores beside each other, in Gluon"),
    Trait("foreign", DECLARED, "is of a kernel of other people, whose configurations we have not run"),
    Trait("autotuned", DECLARED, "is tuned; no launch has it, since tuning comes before the launch"),
)}


def _found(way: str) -> frozenset[str]:
    return frozenset(trait.name for trait in TRAITS.values() if trait.found == way)


LACKING, TILE_FACTS = _found(CALL), _found(TILE)
OVERLAPPED = "overlapped"


@lru_cache(maxsize=256)
def trait_set(*names: str) -> frozenset[str]:
    """The set of these traits. Raises ValueError for a name without a row."""
    if unknown := sorted({*names} - {*TRAITS}):
        raise ValueError(f"trait: got {', '.join(unknown)}, {need_one_of(unknown[0], sorted(TRAITS))}")
    return frozenset(names)


@lru_cache(maxsize=1024)
def with_operands(traits: frozenset[str], dtypes: frozenset[str], half: bool = False,
                  tile: tuple[tuple[str, int], ...] = ()) -> frozenset[str]:
    """``traits`` with those of OPERANDS that these operands and this tile have, and no others. half: products
    have 16-bit operands also where no tensor has."""
    others = traits - _found(OPERANDS)
    kernel = Kernel(others, dtypes, half or bool(dtypes & HALVES), max((size for _, size in tile), default=0))
    return others | {trait.name for trait in TRAITS.values()
                     if trait.found == OPERANDS and trait.rule is not None and trait.rule(kernel)}


def of_tile(name: str, BT: int, BK: int, BV: int = 0) -> frozenset[str]:
    """The trait of TILE with that name, if a tile of this size has it."""
    traits, rule = trait_set(name), TRAITS[name].rule
    return traits if rule is not None and rule(BT, BK, BV) else frozenset()
