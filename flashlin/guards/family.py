"""Records that describe a family of ops: its launches, its public ops, its sizes and its typical calls.

Each ``kernels/<family>/recipe.py`` ends with such records, named ``SPECS``. ``kernels/families.py`` collects
them. Everything that needs all ops reads them there: planning, the checks, doctor, explain, warmup, the
public names and the matrix. This module contains plain Python only.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.plan_types import Launch, Problem


class Sizes(NamedTuple):
    """Sizes of a call.

    B: the batch size.
    T: the number of tokens.
    H: the number of heads.
    K: the head dimension of q and k.
    V: the head dimension of v, or 0 if it follows from K.
    N: the number of packed sequences, or 0 if the batch contains B sequences.
    packed: the sequences are packed along T.
    """
    B: int = 1
    T: int = 1
    H: int = 1
    K: int = 1
    V: int = 0
    N: int = 0
    packed: bool = False


Typical = Mapping[str, Sizes]  # the sizes of typical calls of an op, by use
USES = ("training", "packed", "heads of 256", "decoding")  # the keys of a Typical, in doctor's order


class Limit(NamedTuple):
    """Largest size that the kernels of a family support on one axis.

    axis: the field of ``Problem``, such as ``K``.
    most: the largest size.
    got: the text of the error for a larger size; that size replaces ``{}``.
    """
    axis: str
    most: int
    got: str


class Unsupported(NamedTuple):
    """An optional argument or flag that the kernels of a family do not support.

    option: its name in ``Problem.options``.
    got, need: the texts of the resulting ``Reason``.
    """
    option: str
    got: str
    need: str


class Op(NamedTuple):
    """A public op in the record of a family. Empty fields have the value of the family.

    name: the public name.
    module: the module in ``flashlin.ops`` that defines it.
    mode: the mode it requests, or ``""`` if the op has no modes.
    options: names of the optional tensors and flags of a typical call, sorted. Some select the kernels.
    family: the family whose kernels run it, if that is another family than the one that lists it.
    typical: sizes of typical calls, by use.
    counted: a function that converts the sizes of a call into the sizes of its ``Problem``.
    in_place: for an op that updates a state in place, the words of the error for a call with gradients.
    planned_as: the op whose plan this op uses. It is set if this op is an alias, or a norm fused with a
        linear layer.
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
        """Return True if several ranks may share its sequences (argument ``process_group``)."""
        return self.mode == "chunk" and self.name.startswith(("chunk_", "mamba_chunk_"))


Recipe = Callable[[Problem, Target], tuple[Launch, ...]]


class Family(NamedTuple):
    """A group of ops that share kernels and planning.

    name: the name of the family.
    launches: its recipe, which returns the launches of a problem on a target.
    ops: its public ops.
    axes: the meaning of T, H, K and V in its problems, where they are not tokens and heads.
    typical: sizes of typical calls, by use; ``USES`` lists the uses.
    counted: a function that converts the sizes of a call into the sizes of its ``Problem``.
    head_dim: True if K and V are head dimensions. Then a check limits them, and each trial runs one of them.
    limits, unsupported: further sizes and options without kernels; such calls run on the torch path.
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
    """Return a family for ops on sequences with heads, whose state per head is a K x V matrix."""
    return Family(name, launches, ops, axes=HEADS, typical=SEQUENCES, head_dim=True)


def problem_of(family: Family, op: Op, sizes: Sizes, dtype: str, needs_grad: bool, mode: str = "") -> Problem:
    """Return the problem of a typical call with these sizes; ``mode`` overrides the mode of the op."""
    counted = op.counted or family.counted
    B, T, H, K, V, N, packed = counted(sizes) if counted else sizes
    return Problem(op=op.name, family=family.name, mode=mode or op.mode, B=B, T=T, H=H, K=K, V=V, N=N or B,
                   dtype=dtype, varlen=packed, needs_grad=needs_grad and not op.in_place, options=op.options)
