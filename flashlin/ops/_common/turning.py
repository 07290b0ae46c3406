"""The plumbing of Mamba-3's rotation: plan, run, gradients. Under torch.compile it is plain torch."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashlin.guards.problem import Plan, Problem
from flashlin.kernels.turning import torch_path
from flashlin.kernels.turning.inputs import Inputs, Outputs
from flashlin.kernels.turning.recipe import FAMILY
from flashlin.ops._common.calls import contiguous, strictest
from flashlin.ops._common.operator import Gradients, Operator, kernels
from flashlin.ops._common.planned import as_planned, dtype_as_planned, planned, wants_grad


class Scalars(NamedTuple):
    dtype: torch.dtype
    needs_grad: bool
    call: str


def turned(op: str, x: Inputs, dtype: torch.dtype) -> Outputs:
    """q, k and k_last of that dtype; angles in float32, or float64 if a tensor has that."""
    pairs = x.angles.shape[3]
    if pairs and not torch.compiler.is_compiling():
        plan = planned(problem_of(op, x), x.q.device)
        if plan.problem.path != "torch":
            how = Scalars(dtype_as_planned(dtype, plan.problem.dot), wants_grad(*x), op)
            q, k, k_last, angle = OPERATOR(plan, contiguous(*as_planned(x, plan.problem.dot)), how)
            return Outputs(q.to(dtype), k.to(dtype), k_last.to(dtype), angle)
    return torch_path.run(x, dtype)


def problem_of(op: str, x: Inputs) -> Problem:
    (B, T, _, K), (H, R) = x.q.shape, x.angles.shape[2:]
    return Problem(op, FAMILY, "", B=B, T=T, H=H, K=K, V=R, N=x.sequences,
                   dtype=strictest({y.dtype for y in x[:-1] if y is not None}), varlen=x.bounds is not None,
                   needs_grad=wants_grad(*x))


def _forward(plan: Plan, x: Inputs, how: Scalars) -> Any:
    return kernels(FAMILY, "forward").run(plan, x, how.dtype)


def _backward(plan: Plan, x: Inputs, y: Outputs, grads: Outputs, how: Scalars,
              wanted: frozenset[str]) -> Gradients:
    (B, T, _, K), H = x.q.shape, x.angles.shape[2]
    dq, dk = (torch.zeros(B, T, H, K, dtype=how.dtype, device=x.q.device) if dy is None else dy.contiguous()
              for dy in (grads.q, grads.k))
    found = kernels(FAMILY, "backward").run(plan, x, y.angle, dq, dk, *contiguous(grads.k_last, grads.angle))
    return {name: None if dy is None else dy.to(getattr(x, name).dtype)
            for name, dy in found._asdict().items()}


OPERATOR = Operator("turning", Inputs, Scalars, Outputs, 4, forward=_forward,
                    kept=lambda x, y, how: (x, (None, None, None, y.angle)), backward=_backward)
