"""Convert the keywords of ``explain`` (op, sizes, dtype, mode) to the Problem that planning takes.

Plain Python: no tensors, and no import of torch or Triton.
"""
from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

from flashlin.guards import family
from flashlin.guards.family import Sizes
from flashlin.guards.plan_types import Problem
from flashlin.kernels.families import PUBLIC, family_of, op_of, typical


def known(op: str) -> str:
    """Return the full name of the op that a name or a short name stands for.

    Raises ValueError if there is no such op. The message names similar ops.
    """
    if callable(op) and (name := getattr(op, "__name__", "")) in PUBLIC:
        raise ValueError(f"op: got the function {name}, need its name, {name!r}")
    name = op_of(op)
    return PUBLIC[name].planned_as or name


def is_count(given: object) -> bool:
    """Return True for an integer of 1 or more."""
    return isinstance(given, Integral) and not isinstance(given, bool) and int(given) >= 1


def problem_of(op: str, given: Mapping[str, int | None], dtype: str, mode: str, *, needs_grad: bool,
               varlen: bool = False) -> Problem:
    """Return the problem of a call that ``explain`` describes.

    given: the sizes B, T, H, K, V and N; a missing size or None means the size of the op's typical calls.
    mode: ``auto``, ``chunk`` or ``fused_recurrent``.

    Sizes that the op does not use are dropped, as the op itself drops them. Raises ValueError for a size
    below 1, and for packed sequences if the op does not support them.
    """
    for name, size in given.items():
        if (size is not None or name == "B") and not is_count(size):
            raise ValueError(f"{name}: got {size!r}, need 1 or more")
    B, N = given.get("B") or 1, given.get("N")
    if N is not None and not varlen:
        raise ValueError(f"N: got {N} without varlen, need it for packed sequences only")
    usual = typical(op)
    if varlen and not any(sizes.packed for sizes in usual.values()):
        raise ValueError(f"varlen: got True, need False: {op} takes no packed sequences")
    this, first = PUBLIC[op], next(iter(usual.values()))
    T = given.get("T") or (1 if this.in_place else 2048)
    H, K, V = given.get("H") or first.H, given.get("K") or first.K, given.get("V") or first.V
    sizes = Sizes(1, B * T, H, K, V, N or B, True) if varlen else Sizes(B, T, H, K, V)
    return family.problem_of(family_of(op), this, sizes, dtype, needs_grad, mode)
