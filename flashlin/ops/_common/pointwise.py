"""Shared code of the elementwise ops: check, plan, run and differentiate.

Under torch.compile these ops are plain torch. The compiler then fuses them with the surrounding code, which
our separate kernels could not do.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashlin.dispatch import OPS
from flashlin.guards.plan_types import Plan, Problem
from flashlin.kernels.pointwise import torch_path
from flashlin.kernels.pointwise.recipe import APART, MIX, READ, SCALE, SKIP
from flashlin.ops._common.casting import cast_call, contiguous, dtypes_of, strictest, wants_grad
from flashlin.ops._common.entry import own_nodes
from flashlin.ops._common.gradients import INSTEAD, once
from flashlin.ops._common.operator import kernels
from flashlin.ops._common.pipeline import Planned, planned


class Scalars(NamedTuple):
    """The scalars of an elementwise call.

    H, K: a row has H * K columns.
    dtype: dtype of the outputs.
    bound: lower bound of a gate, or None.
    """
    family: str
    H: int
    K: int
    dtype: torch.dtype
    bound: float | None
    call: str


def run_pointwise(op: str, H: int, K: int, dtype: torch.dtype, *tensors: Tensor | None,
                  bound: float | None = None, family: str | None = None) -> tuple[Tensor, ...]:
    """Return the outputs, in ``dtype``, of an elementwise op over rows of H * K columns.

    tensors: the inputs of the op's kernels, in shapes that broadcast. The first one ends with the shape of a
        row.
    family: the family to plan as, if this call is only one step of the op.
    """
    outputs = PLANNED.run_planned(tensors, Scalars(family or OPS[op][0], H, K, dtype, bound, op))
    return tuple([y if y.dtype is dtype else y.to(dtype) for y in outputs])


def gradients_of_inputs(op: str, H: int, K: int, dy: Tensor, *tensors: Tensor | None,
                        bound: float | None = None) -> list[Tensor | None]:
    """Return the gradients of all inputs of ``run_pointwise`` from dy, the gradient of its only output.

    The output is not computed, unless plain torch computes the gradients.
    """
    how = Scalars(OPS[op][0], H, K, dy.dtype, bound, op)
    plan = planned(problem_of(tensors, how)._replace(needs_grad=True), dy.device)
    if plan.problem.path == "torch" or plan.problem.dot != "native":
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
        with torch.enable_grad():
            y, = torch_path.compute(how.family, tuple(leaves), bound, how.dtype)
        torch.autograd.backward(y, dy)
        return [None if x is None else x.grad for x in leaves]
    launch = kernels("pointwise", "backward").launch_backward
    return [*launch(plan, contiguous(*tensors), contiguous(dy), bound, True)]


def scaled(op: str, x: Tensor, step: Tensor, dtype: torch.dtype,
           marked: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the product of x [..., H, K] and step [..., H] in ``dtype``, and the updated marks or None.

    marked: marks [...], 0 or NaN for each token, or None. With marks, non-finite elements of x count as 0,
        and the returned marks are NaN for their tokens (nonfinite.py).
    """
    H, P = x.shape[-2:]
    y, *beside = run_pointwise(op, H, P, dtype, x, *contiguous(step, marked), family=SCALE)
    return y, beside[0] if beside else None


def skipped(op: str, o: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, dtype: torch.dtype,
            marked: Tensor | None = None) -> Tensor:
    """Return (o + D x) silu(z) in ``dtype``, without the factor silu(z) if z is None.

    o: [..., H, K] in float32. D: [H], [H, K] or None.
    marked: marks [...], 0 or NaN for each token, which are added to o (nonfinite.py); or None.
    """
    H, P = x.shape[-2:]
    D, marked = contiguous(D, marked)
    y, = run_pointwise(op, H, P, dtype, o.contiguous(), None if D is None else x, D, z, marked, family=SKIP)
    return y


def read(op: str, o: Tensor, x: Tensor, c: Tensor, z: Tensor | None, d: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (d_t o_{t-1} + c_t x_t) silu(z_t) in ``dtype``. A row t is one token; o is shifted by one row.

    o, x: [..., H, K]. c, d: [..., H]. z: the gate or None.
    If d is 0, as in the first row, the previous row is not read.
    """
    H, P = x.shape[-2:]
    y, = run_pointwise(op, H, P, dtype, o.contiguous(), x, c.contiguous(), z, d.contiguous(), family=READ)
    return y


def problem_of(tensors: tuple[Any, ...], how: Scalars) -> Problem:
    """Return the Problem of an elementwise call; its dtype is the strictest of all inputs and the output."""
    _, H, K, dtype, _, op = how
    return Problem(op, how.family, "", B=1, T=tensors[0].numel() // max(H * K, 1), H=H, K=K, V=K, N=1,
                   dtype=strictest({*dtypes_of(tensors), dtype}), needs_grad=wants_grad(*tensors))


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, bound: float | None, dtype: torch.dtype,
                *tensors: Tensor | None) -> Any:
        ctx.plan, ctx.bound = plan, bound
        family = plan.problem.family
        # The first tensor is only added, so no gradient depends on it and it is not saved.
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
    """The elementwise kernels as one ``Planned``, for all families of elementwise ops."""
    def __call__(self, plan: Plan | None, x: Any, how: Scalars, *call: Any) -> Any:
        return _Pointwise.apply(plan, how.bound, how.dtype, *x)


def _cast(tensors: tuple[Any, ...], how: Scalars, dot: str) -> tuple[Any, Scalars]:
    if dot != "native":
        tensors, how = cast_call(tensors, how, dot)
    return tensors if how.family in APART else contiguous(*tensors), how


PLANNED = _Planned(problem=problem_of, cast=_cast, while_tracing=None,
                   on_torch=lambda x, how: torch_path.compute(how.family, x, how.bound, how.dtype))
