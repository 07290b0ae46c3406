"""The plumbing of Mamba-3's rotation: plan, run, gradients. Under torch.compile it is plain torch."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashlin.guards.plan_types import Plan, Problem
from flashlin.kernels.rotation import torch_path
from flashlin.kernels.rotation.inputs import Inputs, Outputs
from flashlin.kernels.rotation.recipe import FAMILY
from flashlin.ops._common.casting import (
    as_planned,
    contiguous,
    dtype_as_planned,
    dtypes_of,
    strictest,
    wants_grad,
)
from flashlin.ops._common.operator import Gradients, Operator, kernels


class Scalars(NamedTuple):
    dtype: torch.dtype
    needs_grad: bool
    call: str


def turned(op: str, x: Inputs, dtype: torch.dtype) -> Outputs:
    """q, k, q_first and k_last of that dtype; the others in float32, or float64 if a tensor has that."""
    if not x.angles.shape[3]:
        return torch_path.compute(x, dtype)
    y = OPERATOR.run_planned(x, Scalars(dtype, wants_grad(*x), op))
    return Outputs(*(vectors.to(dtype) for vectors in y[:4]), *y[4:])


def problem_of(x: Inputs, how: Scalars) -> Problem:
    (B, T, _, K), (H, R) = x.q.shape, x.angles.shape[2:]
    return Problem(how.call, FAMILY, "", B=B, T=T, H=H, K=K, V=R, N=x.sequences,
                   dtype=strictest(dtypes_of(x[:-1])), varlen=x.bounds is not None,
                   needs_grad=how.needs_grad)


def _cast(x: Inputs, how: Scalars, dot: str) -> tuple[Inputs, Scalars]:
    if dot != "native":
        x, how = as_planned(x, dot), how._replace(dtype=dtype_as_planned(how.dtype, dot))
    return Inputs(*contiguous(*x)), how


def _forward(plan: Plan, x: Inputs, how: Scalars) -> Any:
    return kernels(FAMILY, "forward").launch_forward(plan, x, how.dtype)


def _backward(plan: Plan, x: Inputs, y: Outputs, grads: Outputs, how: Scalars,
              wanted: frozenset[str]) -> Gradients:
    (B, T, _, K), H = x.q.shape, x.angles.shape[2]
    q, k = (torch.zeros(B, T, H, K, dtype=how.dtype, device=x.q.device) if dy is None else dy
            for dy in (grads.q, grads.k))
    dy = Outputs(*contiguous(q, k, *grads[2:]))
    found = kernels(FAMILY, "backward").launch_backward(plan, x, y.angle, dy)
    return {name: None if dx is None else dx.to(getattr(x, name).dtype)
            for name, dx in found._asdict().items()}


OPERATOR = Operator("turning", Inputs, Scalars, Outputs, 6, family=FAMILY, problem=problem_of,
                    on_torch=lambda x, how: torch_path.compute(x, how.dtype), cast=_cast, forward=_forward,
                    kept=lambda x, y, how: (x, (*[None] * 5, y.angle)), backward=_backward)
