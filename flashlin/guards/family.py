"""What a family of ops says about itself: its launches, its public ops, what sizes mean, typical calls.

Each ``kernels/<family>/recipe.py`` ends with such records, ``SPECS``. ``kernels/families.py`` collects them,
and all that speaks of all ops reads them there: planning, the checks, doctor and explain, warmup, the public
names, the matrix. Plain Python.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.plan_types import Launch, Problem


class Sizes(NamedTuple):
    """The sizes of a call. V: 0 where it follows from K. N: packed sequences, 0 where there are B."""
    B: int = 1
    T: int = 1
    H: int = 1
    K: int = 1
    V: int = 0
    N: int = 0
    packed: bool = False


Typical = Mapping[str, Sizes]  # what people call an op with, by what for
USES = ("training", "packed", "heads of 256", "decoding")  # the keys of a Typical, as doctor orders them


class Limit(NamedTuple):
    """A family's kernels take at most ``most`` on an axis. got: what a call has then, ``{}`` its size."""
    axis: str
    most: int
    got: str


class Unsupported(NamedTuple):
    """A family's kernels take no calls with this one of ``Problem.options``. got, need: as in a Reason."""
    option: str
    got: str
    need: str


class Op(NamedTuple):
    """A public op. What is left empty is as in its family.

    module: where it is defined, in ``flashlin.ops``. mode: what it asks for, ``""`` where there is no choice.
    options: the optional tensors and flags of a typical call, sorted; some decide which kernels are started.
    family: whose kernels run it, where it is not the family in whose record it stands.
    in_place: of an op that updates a state in place, what a call of it is where gradients are wanted.
    planned_as: the op it is planned as: the same function by another name, or a norm before a linear layer.
    """
    name: str
    module: str
    mode: str = ""
    options: tuple[str, ...] = ()
    family: str = ""
    typical: Typical | None = None
    counted: Callable[[Sizes], Sizes] | None = None
    in_place: str = ""
    planned_as: str = ""

    @property
    def takes_ranks(self) -> bool:
        """Whether ranks may share its sequences (process_group)."""
        return self.mode == "chunk" and self.name.startswith(("chunk_", "mamba_chunk_"))


Recipe = Callable[[Problem, Target], tuple[Launch, ...]]


class Family(NamedTuple):
    """launches: which launches a problem makes on a target.
    axes: what T, H, K and V mean in its problems, where that is not tokens and heads.
    typical: calls as people make them, see USES.
    counted: a Problem's sizes, out of those that explain is asked about.
    head_dim: whether K and V are head dimensions, which a check bounds and trials choose.
    limits, unsupported: what else the kernels cannot take; such calls take the torch path.
    """
    name: str
    launches: Recipe
    ops: tuple[Op, ...] = ()
    axes: Mapping[str, str] = {}
    typical: Typical = {}  # noqa: RUF012
    counted: Callable[[Sizes], Sizes] | None = None
    head_dim: bool = False
    limits: tuple[Limit, ...] = ()
    unsupported: tuple[Unsupported, ...] = ()


SEQUENCES: Typical = {
    "training": Sizes(4, 2048, 16, 128, 128), "packed": Sizes(1, 32768, 16, 128, 128, N=16, packed=True),
    "heads of 256": Sizes(4, 2048, 8, 256, 256), "decoding": Sizes(64, 1, 16, 128, 128)}
HEADS = {"K": "head dimension of q and k", "V": "head dimension of v"}


def over_heads(name: str, launches: Recipe, ops: tuple[Op, ...] = ()) -> Family:
    """A family over sequences of heads, with a state of K by V."""
    return Family(name, launches, ops, axes=HEADS, typical=SEQUENCES, head_dim=True)


def problem_of(family: Family, op: Op, sizes: Sizes, dtype: str, needs_grad: bool, mode: str = "") -> Problem:
    """The problem that a typical call of these sizes makes; mode: in place of the op's own."""
    counted = op.counted or family.counted
    B, T, H, K, V, N, packed = counted(sizes) if counted else sizes
    return Problem(
        op=op.name, family=family.name, mode=mode or op.mode, B=B, T=T, H=H, K=K, V=V, N=N or B, dtype=dtype,
        varlen=packed, needs_grad=needs_grad and not op.in_place, options=op.options)
