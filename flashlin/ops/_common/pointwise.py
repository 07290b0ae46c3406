"""The plumbing of the elementwise ops: check, plan, run, gradients.

Under torch.compile they are plain torch: the compiler makes one kernel of that and of what is around it,
which is more than ours could do.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashlin.dispatch import OPS
from flashlin.guards.plan_types import Plan, Problem
from flashlin.kernels.pointwise import torch_path
from flashlin.kernels.pointwise.recipe import APART, MIX, READ, SCALE, SKIP
from flashlin.ops._common.casting import (
    as_planned,
    contiguous,
    dtype_as_planned,
    dtypes_of,
    strictest,
    wants_grad,
)
from flashlin.ops._common.entry import own_nodes
from flashlin.ops._common.gradients import INSTEAD, once
from flashlin.ops._common.operator import kernels
from flashlin.ops._common.pipeline import Planned


class Scalars(NamedTuple):
    """H, K: a row has H * K columns. dtype: of the outputs."""
    family: str
    H: int
    K: int
    dtype: torch.dtype
    bound: float | None
    call: str


def run_pointwise(op: str, H: int, K: int, dtype: torch.dtype, *tensors: Tensor | None,
                  bound: float | None = None, family: str | None = None) -> tuple[Tensor, ...]:
    """Return the outputs of an op over rows of H * K columns, of that dtype. tensors: what its kernels take,
    in shapes that broadcast; the first has a row's shape at the end. family: if it is not the op's own, but a
    part of it."""
    outputs = PLANNED.run_planned(tensors, Scalars(family or OPS[op][0], H, K, dtype, bound, op))
    return tuple([y if y.dtype is dtype else y.to(dtype) for y in outputs])


def scaled(op: str, x: Tensor, step: Tensor, dtype: torch.dtype,
           marked: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """x step in that dtype: x [..., H, K], step [..., H]. With marks [...]: contained, and they come back
    with more (nonfinite.py)."""
    H, P = x.shape[-2:]
    y, *beside = run_pointwise(op, H, P, dtype, x, *contiguous(step, marked), family=SCALE)
    return y, beside[0] if beside else None


def skipped(op: str, o: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, dtype: torch.dtype,
            marked: Tensor | None = None) -> Tensor:
    """(o + D x) silu(z) in that dtype: o [..., H, K] of float32, D [H] or [H, K] or None, z or None; o with
    marks [...] is released (nonfinite.py)."""
    H, P = x.shape[-2:]
    D, marked = contiguous(D, marked)
    y, = run_pointwise(op, H, P, dtype, o.contiguous(), None if D is None else x, D, z, marked, family=SKIP)
    return y


def read(op: str, o: Tensor, x: Tensor, c: Tensor, z: Tensor | None, d: Tensor, dtype: torch.dtype) -> Tensor:
    """(d o + c x) silu(z) in that dtype, where o is that of the row above: o, x [..., H, K], c and d
    [..., H], z or None. Where d is 0, as for the first of all, nothing above is read."""
    H, P = x.shape[-2:]
    y, = run_pointwise(op, H, P, dtype, o.contiguous(), x, c.contiguous(), z, d.contiguous(), family=READ)
    return y


def problem_of(tensors: tuple[Any, ...], how: Scalars) -> Problem:
    """The dtype is the strictest of any tensor, output included."""
    _, H, K, dtype, _, op = how
    return Problem(op, how.family, "", B=1, T=tensors[0].numel() // max(H * K, 1), H=H, K=K, V=K, N=1,
                   dtype=strictest({*dtypes_of(tensors), dtype}), varlen=False,
                   needs_grad=wants_grad(*tensors))


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, bound: float | None, dtype: torch.dtype,
                *tensors: Tensor | None) -> Any:
        ctx.plan, ctx.bound = plan, bound
        family = plan.problem.family
        # the first one: no gradient depends on it
        only_added = family == MIX or (family == SKIP and tensors[3] is None)
        ctx.save_for_backward(*((None, *tensors[1:]) if only_added else tensors))
        return kernels("pointwise", "forward").launch_forward(plan, tensors, bound, dtype)

    @staticmethod
    @once(lambda ctx: (ctx.plan.asked.op, INSTEAD))
    def backward(ctx: Any, saved: tuple[Any, ...], *dys: Tensor) -> Any:
        parameters = kernels("pointwise", "backward").PARAMETERS[ctx.plan.problem.family]
        sums = any(ctx.needs_input_grad[3 + at] for at in parameters)
        gradients = kernels("pointwise", "backward").launch_backward(ctx.plan, saved, contiguous(*dys),
                                                                     ctx.bound, sums)
        return None, None, None, *gradients


own_nodes.add(_Pointwise._backward_cls)


class _Planned(Planned[Any, Scalars]):
    def __call__(self, plan: Plan | None, x: Any, how: Scalars, *call: Any) -> Any:
        return _Pointwise.apply(plan, how.bound, how.dtype, *x)


def _cast(tensors: tuple[Any, ...], how: Scalars, dot: str) -> tuple[Any, Scalars]:
    if dot != "native":
        tensors, how = as_planned(tensors, dot), how._replace(dtype=dtype_as_planned(how.dtype, dot))
    return tensors if how.family in APART else contiguous(*tensors), how


PLANNED = _Planned(problem=problem_of, cast=_cast, while_tracing=None,
                   on_torch=lambda x, how: torch_path.compute(how.family, x, how.bound, how.dtype))
