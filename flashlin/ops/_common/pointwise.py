"""The plumbing of the elementwise ops: check, plan, run, gradients.

Under torch.compile they are plain torch: the compiler makes one kernel of that and of what is around it,
which is more than ours could do.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin.dispatch import OPS
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_dense, check_device, check_dtype, check_floats, shown
from flashlin.kernels.pointwise import torch_path
from flashlin.kernels.pointwise.recipe import APART, MIX, READ, SCALE, SKIP
from flashlin.ops._common.calls import contiguous, strictest
from flashlin.ops._common.entry import own_nodes
from flashlin.ops._common.gradients import INSTEAD, once
from flashlin.ops._common.operator import kernels
from flashlin.ops._common.planned import as_planned, dtype_as_planned, planned, wants_grad


def run(op: str, H: int, K: int, dtype: torch.dtype, *tensors: Tensor | None, bound: float | None = None,
        family: str | None = None) -> tuple[Tensor, ...]:
    """The outputs of an op over rows of H * K columns, of that dtype. tensors: what its kernels take, in
    shapes that broadcast; the first has a row's shape at the end. family: where it is not the op's own, but a
    part of it."""
    first = tensors[0]
    assert first is not None
    family = family or OPS[op][0]
    if torch.compiler.is_compiling():
        return torch_path.run(family, tensors, bound, dtype)
    plan = planned(problem_of(op, family, first.numel() // max(H * K, 1), H, K, dtype, tensors,
                              wants_grad(*tensors)), first.device)
    if plan.problem.path == "torch":
        return torch_path.run(family, tensors, bound, dtype)
    dot = plan.problem.dot
    loaded = as_planned(tensors, dot)
    outputs: tuple[Tensor, ...] = _Pointwise.apply(plan, bound, dtype_as_planned(dtype, dot), *(
        loaded if family in APART else contiguous(*loaded)))
    return tuple(y.to(dtype) for y in outputs)


def scaled(op: str, x: Tensor, step: Tensor, dtype: torch.dtype,
           marked: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """x step in that dtype: x [..., H, K], step [..., H]. With marks [...]: contained, and they come back
    with more (marks.py)."""
    H, P = x.shape[-2:]
    y, *beside = run(op, H, P, dtype, x, step.contiguous(), None if marked is None else marked.contiguous(),
                     family=SCALE)
    return y, beside[0] if beside else None


def skipped(op: str, o: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, dtype: torch.dtype,
            marked: Tensor | None = None) -> Tensor:
    """(o + D x) silu(z) in that dtype: o [..., H, K] of float32, D [H] or [H, K] or None, z or None; o with
    marks [...] is released (marks.py)."""
    H, P = x.shape[-2:]
    y, = run(op, H, P, dtype, o.contiguous(), None if D is None else x, None if D is None else D.contiguous(),
             z, None if marked is None else marked.contiguous(), family=SKIP)
    return y


def read(op: str, o: Tensor, x: Tensor, c: Tensor, z: Tensor | None, d: Tensor, dtype: torch.dtype) -> Tensor:
    """(d o + c x) silu(z) in that dtype, where o is that of the row above: o, x [..., H, K], c and d
    [..., H], z or None. Where d is 0, as for the first of all, nothing above is read."""
    H, P = x.shape[-2:]
    y, = run(op, H, P, dtype, o.contiguous(), x, c.contiguous(), z, d.contiguous(), family=READ)
    return y


def problem_of(op: str, family: str, rows: int, H: int, K: int, dtype: torch.dtype,
               tensors: tuple[Tensor | None, ...], needs_grad: bool) -> Problem:
    """The dtype is the strictest of any tensor, output included."""
    return Problem(op, family, "", B=1, T=rows, H=H, K=K, V=K, N=1,
                   dtype=strictest({dtype, *[x.dtype for x in tensors if x is not None]}), varlen=False,
                   needs_grad=needs_grad)


def check_rows(name: str, x: Any, meaning: str, dims: int | None = None, columns: int = 1) -> None:
    """x is a floating-point tensor of so many dimensions (None: any), of which the last ``columns`` make a
    row that is not empty."""
    check_floats(name, x, meaning)
    if x.ndim < columns or x.ndim != (dims or x.ndim) or 0 in x.shape[x.ndim - columns:]:
        raise ValueError(f"{name}: got shape {shown(x.shape)}, need {meaning}" + " with at least 1 column"
                         * bool(columns))


def check_parameter(name: str, x: Any, count: int, meaning: str, beside: str, first: Tensor) -> None:
    """x has so many elements, in any shape: parameters are kept as [D] here and as [1, 1, D] there."""
    check_dense(name, x, f"a tensor of {meaning} elements")
    check_dtype(name, x.dtype, "dtype ")
    if x.numel() != count:
        raise ValueError(f"{name}: got shape {shown(x.shape)}, need {meaning} = {count} elements")
    check_device(name, x, first.device, beside)


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, bound: float | None, dtype: torch.dtype,
                *tensors: Tensor | None) -> Any:
        ctx.plan, ctx.bound = plan, bound
        family = plan.problem.family
        # the first one: no gradient depends on it
        only_added = family == MIX or (family == SKIP and tensors[3] is None)
        ctx.save_for_backward(*((None, *tensors[1:]) if only_added else tensors))
        return kernels("pointwise", "forward").run(plan, tensors, bound, dtype)

    @staticmethod
    @once(lambda ctx: (ctx.plan.asked.op, INSTEAD))
    def backward(ctx: Any, saved: tuple[Any, ...], *dys: Tensor) -> Any:
        parameters = kernels("pointwise", "backward").PARAMETERS[ctx.plan.problem.family]
        sums = any(ctx.needs_input_grad[3 + at] for at in parameters)
        gradients = kernels("pointwise", "backward").run(ctx.plan, saved, contiguous(*dys), ctx.bound, sums)
        return None, None, None, *gradients


own_nodes.add(_Pointwise._backward_cls)
