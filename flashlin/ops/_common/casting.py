"""Conversion of tensors to the dtype and layout that the kernels of a plan need."""
from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashlin.guards.plan_types import Plan

X = TypeVar("X", bound=tuple[Any, ...])
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# Strictest first: the dtypes that a machine is most likely not to support. A call with several dtypes is
# planned for the strictest one.
STRICTEST = (torch.float64, torch.bfloat16, torch.float16, torch.float32)
ALIGNED = 16  # bytes
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: str(dtype).removeprefix("torch.") for dtype in STRICTEST}


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``, as a Problem stores it."""
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def dtypes_of(tensors: Iterable[Tensor | None]) -> set[torch.dtype]:
    """Return the dtypes of the tensors that are not None."""
    return {x.dtype for x in tensors if x is not None}


def strictest(dtypes: Collection[torch.dtype]) -> str:
    """Return the name of the dtype that a machine is least likely to support: the first one in STRICTEST."""
    for dtype in STRICTEST:
        if dtype in dtypes:
            return name_of(dtype)
    raise ValueError(f"dtypes: got {sorted(map(str, dtypes))}, need one of {STRICTEST}")


def common_dtype(first: Tensor, *others: Tensor | None) -> torch.dtype:
    """Return the dtype to which torch promotes the dtypes of these tensors."""
    common = first.dtype
    for x in others:
        if x is not None and x.dtype != common:
            common = torch.promote_types(common, x.dtype)
    return common


def as_planned(x: X, dot: str) -> X:
    """Return a tuple with 16-bit tensors converted to float32 if ``dot`` is ``fp32``, otherwise unchanged.

    With ``fp32`` (``Problem.dot``), kernels must neither load nor store 16-bit values.
    """
    if dot != "fp32":
        return x
    make: Any = getattr(x, "_make", tuple)
    operands: X = make([t.float() if t is not None and t.dtype in SIXTEEN_BITS else t for t in x])
    return operands


def dtype_as_planned(dtype: torch.dtype, dot: str) -> torch.dtype:
    """Return the dtype that a plan's kernels write when the call requests ``dtype``."""
    return torch.float32 if dot == "fp32" and dtype in SIXTEEN_BITS else dtype


def cast_call(x: X, how: Any, dot: str) -> tuple[X, Any]:
    """Return the tensors of a call, and its scalars with their ``dtype``, in the dtypes that kernels need."""
    return as_planned(x, dot), how._replace(dtype=dtype_as_planned(how.dtype, dot))


def can_write(plan: Plan, pool: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the plan's kernels can update a pool of states in place.

    dtype: dtype of the tokens.
    """
    problem = plan.problem
    return problem.path != "torch" and pool.dtype in (dtype_as_planned(dtype, problem.dot), torch.float32)


def contiguous(*tensors: Tensor | None) -> Any:
    """Return the tensors in contiguous memory, with None for None."""
    return [None if t is None else t.contiguous() for t in tensors]


def dense(gradient: Tensor | None, x: Tensor) -> Tensor:
    """Return the gradient as a contiguous tensor; zeros of x's shape and dtype if it is None."""
    return x.new_zeros(x.shape) if gradient is None else gradient.contiguous()


def aligned(x: Iterable[Tensor | None]) -> Any:
    """Return the tensors, with a copy of each tensor whose address is not a multiple of 16 bytes.

    Tensor descriptors need that alignment. For an unaligned tensor, Triton compiles different code, which
    does not overlap loads with matrix products. With narrow states, that code makes illegal memory accesses
    or gives wrong results (known issue hopper-narrow-state). A copy keeps ``requires_grad``, from which
    compile_ahead.py derives the kernels of backward.
    """
    if all(y is None or not y.data_ptr() % ALIGNED for y in x):
        return x
    return getattr(x, "_make", tuple)([y if y is None or not y.data_ptr() % ALIGNED else
                                       y.clone().requires_grad_(y.requires_grad) for y in x])


def count_of(x: Tensor, bounds: Tensor | None) -> int:
    """Return the number of sequences in x [B, T, ...].

    bounds: edges [N + 1] of packed sequences; if None, each row of x is one sequence.
    """
    return x.shape[0] if bounds is None else bounds.shape[0] - 1


def empty_outputs(x: Any, how: Any, v_first: bool) -> tuple[Tensor, Tensor | None]:
    """Return empty tensors for o and the final state of a recurrence; the state is None if not requested.

    x: a NamedTuple with q [B, T, H, K], v [B, T, HV, V] and bounds.
    how: scalars with has_ht and out_dtype.
    v_first: the state is [N, HV, V, K] instead of [N, HV, K, V].
    """
    (HV, V), K, N = x.v.shape[2:], x.q.shape[3], count_of(x.v, x.bounds)
    state = (N, HV, V, K) if v_first else (N, HV, K, V)
    wide = torch.promote_types(x.q.dtype, torch.float32)
    return (x.v.new_empty(x.v.shape, dtype=how.out_dtype),
            x.q.new_empty(state, dtype=wide) if how.has_ht else None)


def wants_grad(*tensors: Tensor | None) -> bool:
    """Return True if autograd may later run the backward of this call.

    Inside autograd.Function.forward gradients are already off, so callers check before they enter it.
    """
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def under_autocast(x: Tensor) -> bool:
    """Return True if autocast is on for the device of x."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def linear_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a linear layer computes in: the autocast dtype under autocast, else x's own.

    Autocast does not affect float64.
    """
    if x.dtype == torch.float64 or not under_autocast(x):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)
