"""Conversion of a user's launch to a Problem, from its arguments and the declarations of ``shield``.

This is the only module of the package that reads the tensors.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashlin.compat.traits import trait_set, with_operands
from flashlin.guards.checks import AXIS_LIMITS, OFFSET_LIMIT
from flashlin.guards.plan_types import Given, Launch, Problem
from flashlin.kernels.shield.source import Source


class Declared(NamedTuple):
    """The declarations that a user passed to ``shield``.

    batch: for each tensor, by name, the dimension that is the batch, or None if it has none.
    axis: axis of the grid that counts the batch, or -1 if it is not declared.
    size: name of the argument that contains the size of the batch, or None.
    outputs: names of the tensors that the kernel writes.
    """
    batch: dict[str, int | None]
    axis: int
    size: str | None
    outputs: tuple[str, ...]


def problem_of(kernel: str, read: Source, declared: Declared, named: dict[str, Any], constants: Sequence[str],
               grid: tuple[int, ...]) -> Problem:
    """Return the Problem of a launch of a user's kernel.

    kernel: name of the kernel.
    read: facts about the source of the kernel.
    named: all arguments and options of the launch, by name.
    constants: names of the arguments that are constexpr.
    """
    tensors = tensors_of(named)
    dtypes = frozenset(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())
    half = read.half or any(str(named.get(name)) in ("bf16", "fp16") for name in constants)
    tile = tuple((name, named[name]) for name in constants if type(named.get(name)) is int)
    traits = with_operands(read.traits | trait_set("foreign"), dtypes, half, tile)
    size = batch_of(declared, named)
    # If the source names int64, we assume that the kernel computes the offsets of long tensors in 64 bits.
    reach = () if read.wide else tuple(
        _reach(tensor, declared.batch.get(name), size)
        for name, tensor in tensors.items() if _last_offset(tensor) > OFFSET_LIMIT)
    launch = Launch(kernel, grid, named.get("num_warps") or 4, named.get("num_stages") or 3, tile, 0, 0,
                    traits)
    given = Given(launch, declared.axis, _whole(declared, tensors, grid, size), bool(declared.outputs), reach,
                  half)
    dtype = next((name for name in ("bfloat16", "float16") if name in dtypes), "float32")
    return Problem(op=kernel, family="shield", mode="", B=size, T=1, H=1, K=0, V=0, N=max(size, 1),
                   dtype=dtype, max_warps=launch.num_warps, given=given)


def tensors_of(named: dict[str, Any]) -> dict[str, Tensor]:
    """Return the arguments of a launch that are tensors, by name."""
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def batch_of(declared: Declared, named: dict[str, Any]) -> int:
    """Return the size of the batch in a launch, or 1 if no batch is declared."""
    if declared.size is not None:
        return int(named[declared.size])
    return min(lengths(declared.batch, named).values(), default=1)


def lengths(batch: dict[str, int | None], named: dict[str, Any]) -> dict[str, int]:
    """Return, by tensor name, the length of the dimension that is declared as the batch.

    Names that are missing or None in the launch are skipped, and so are tensors without a batch.

    batch: the declared dimensions, by name. named: the arguments of the launch, by name.

    Raises TypeError if an argument is not a tensor, and ValueError if a tensor lacks the dimension.
    """
    by_name: dict[str, int] = {}
    for name, dimension in batch.items():
        value = named.get(name)
        if dimension is None or value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"batch: got dimension {dimension} of {name}, which is of type "
                            f"{type(value).__name__}, need a tensor")
        if not -value.dim() <= dimension < value.dim():
            raise ValueError(f"batch: got dimension {dimension} of {name}, need one of the {value.dim()} of "
                             f"its shape {tuple(value.shape)}")
        by_name[name] = value.shape[dimension]
    return by_name


def _whole(declared: Declared, tensors: dict[str, Tensor], grid: tuple[int, ...], size: int) -> str:
    """Return the reason why the batch of a launch cannot be split, or ``""`` if it can.

    size: the size of the batch.
    """
    if not declared.batch:
        axis = next((str(axis) for axis, (programs, limit) in enumerate(zip(grid, AXIS_LIMITS, strict=False))
                     if programs > limit), "AXIS")
        return (f'declare the batch with shield(..., batch={{"tensor": dimension, ...}}, batch_axis={axis}, '
                f'batch_size="argument"): then it can run in parts')
    if all(declared.batch.get(name) is None for name in tensors):  # every slice would run on the same data
        return (f"none of {', '.join(declared.batch)} is a tensor with the batch in this call: name one in "
                f"batch={{...}}")
    programs = grid[declared.axis] if declared.axis < len(grid) else 1
    if size < 1 or programs % size:
        return (f"batch_axis={declared.axis} has {programs} programs, which is not a multiple of the batch "
                f"size {size}: name the axis that counts the batch")
    for name, tensor in tensors.items():
        dimension = declared.batch.get(name)
        at = next((at for at, length in enumerate(tensor.shape) if size > 1 and length
                   and _may_hold(length, size)), None)
        if name not in declared.batch and at is not None:
            what = ("the batch size" if tensor.shape[at] == size
                    else f"which may contain the batch of {size}")
            return (f"{name} has a dimension of {tensor.shape[at]}, {what}, and is not declared: "
                    f'add batch={{"{name}": {at}}} if it is the batch, batch={{"{name}": None}} if it is '
                    f'not')
        if dimension is not None and not _may_hold(tensor.shape[dimension], size):
            return (f"{name}: dimension {dimension} has {tensor.shape[dimension]} elements, need a multiple "
                    f"of the batch of {size}")
    return ""


def _may_hold(length: int, size: int) -> bool:
    """Return True if a dimension of the given length may contain a batch of ``size`` sequences.

    Its length is a multiple of the size, or size + 1 if it contains boundaries of sequences.
    """
    return length % size == 0 or length == size + 1


def _last_offset(tensor: Tensor) -> int:
    """Return the offset of a tensor's last element from its first, in elements.

    It is computed from the strides, because a view of few elements may span a long range.
    """
    ends = [(length - 1) * abs(stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return sum(ends) if tensor.numel() else 0


def _reach(tensor: Tensor, dimension: int | None, size: int) -> tuple[int, int]:
    """Return two numbers (base, step) for a long tensor, from which the planner computes its last offset.

    For n sequences of the batch, the offset of the last element is base + n * step. size: size of the batch.
    """
    step = 0 if dimension is None else tensor.shape[dimension] // max(size, 1) * tensor.stride(dimension)
    return _last_offset(tensor) - size * step, step
