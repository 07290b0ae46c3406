"""The selective scan of Mamba, in which each channel has its own states.

Mirrors ``mamba_ssm.ops.selective_scan_interface``. The recurrence of one channel is

    h_t = e^{dt_t A} h_{t-1} + dt_t u_t B_t        y_t = (h_t . C_t + D u_t) silu(z_t)

Source: Gu and Dao 2023 (arXiv 2312.00752).
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import need_tensor, shown
from flashlin.kernels.selective import torch_path
from flashlin.kernels.selective.recipe import FAMILY, columns_of, kept
from flashlin.ops._common.arguments import check_optional, check_rows
from flashlin.ops._common.casting import as_planned, contiguous, dtypes_of, wants_grad
from flashlin.ops._common.entry import entry
from flashlin.ops._common.operator import Gradients, Operator, kernels
from flashlin.ops._common.pipeline import TracedCall, call_of, head_size_class, parsed

OP = "selective_scan_fn"


@entry
def selective_scan_fn(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
                      z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
                      return_last_state: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the selective scan of Mamba.

    Drop-in for ``mamba_ssm.ops.selective_scan_interface.selective_scan_fn``. The recurrence of one channel is

        h_t = e^{dt_t A} h_{t-1} + dt_t u_t B_t        y_t = (h_t . C_t + D u_t) silu(z_t)

    Each tensor may have its own dtype. All arithmetic is in float32 (float64 for float64 tensors).

    Args:
        u: [b, D, T], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Two layouts are
            fast: contiguous channels, as after a projection; and contiguous tokens, if the strides of b and D
            are multiples of 16 elements. Other layouts are read token by token, which is slower.
        delta: [b, D, T], like u.
        A: [D, N], real, normally negative.
        B: [b, N, T]; or [b, G, N, T] with G a divisor of D, where channel d reads group d // (D / G); or [D,
            N], the same for all tokens (in plain torch).
        C: like B.
        D: [D] or None, a skip connection.
        z: [b, D, T] or None, a gate, like u: y is multiplied by silu(z).
        delta_bias: [D] or None, added to delta.
        delta_softplus: the step dt is softplus(delta + delta_bias).
        return_last_state: also return the state after the last token.

    Returns:
        y [b, D, T] in the dtype of u; the kernels also return it in the layout of u. With return_last_state
        it is (y, last state [b, D, N] in float32, or float64 for float64 tensors). Every argument gets
        gradients through both, and repeated runs give bitwise identical gradients. Backward stores partial
        sums of the gradients of B and C in float32, each over 32 channels (16 with more than 128 states).
        They need D / 4 bytes for each state and token.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from mamba_ssm: it needs no CUDA extension and works on CPUs. The last state has gradients,
    which are missing there. Kernels run for N up to 256; a larger N runs in plain torch. Complex A is an
    error.
    """
    scalars.flags(delta_softplus=delta_softplus, return_last_state=return_last_state)
    check_rows("u", u, "[b, D, T]", 3, columns=0)
    b, channels, T = u.shape
    if not channels:
        raise ValueError(f"u: got shape {shown(u.shape)}, need [b, D, T] with D of at least 1")
    need_tensor("delta", delta, (b, channels, T), "u's shape", u.device, "u")
    need_tensor("A", A, (channels, None), "[D, N]", u.device, "u")
    N = A.shape[1]
    if not N:
        raise ValueError(f"A: got shape {shown(A.shape)}, need [D, N] with N of at least 1")
    B, C = (with_groups(name, x, b, channels, N, T, u) for name, x in (("B", B), ("C", C)))
    if B.ndim == C.ndim == 4 and B.shape[1] != C.shape[1]:
        raise ValueError(f"C: got {C.shape[1]} groups, need {B.shape[1]}, as B")
    check_optional("u", u, (("D", D, (channels,), "[D]"), ("z", z, (b, channels, T), "u's shape"),
                            ("delta_bias", delta_bias, (channels,), "[D]")))
    given = Tensors(u, delta, A, B, C, D, z, delta_bias)
    # The option "fixed" marks a B or C of shape [D, N], which kernels do not support.
    call = call_of(OP, dtypes_of(given), ["fixed"] * (B.ndim == 2 or C.ndim == 2))
    y, last = OPERATOR.run_planned(given, Scalars(delta_softplus, wants_grad(*given), call))
    y = y.to(u.dtype)
    return (y, last) if return_last_state else y


def with_groups(name: str, x: Any, b: int, channels: int, N: int, T: int, u: Tensor,
                beside: str = "u") -> Tensor:
    """Return B or C as [b, G, N, T], or unchanged if it is [D, N]; raise an error for other shapes.

    name: the name of the tensor x in error messages.
    channels: D.
    u: the tensor that has the required device.
    beside: the name of u in error messages.
    """
    shapes: dict[int, tuple[int | None, ...]] = {2: (channels, N), 3: (b, N, T)}
    shape = shapes.get(x.ndim, (b, None, N, T)) if isinstance(x, Tensor) else (b, N, T)
    need_tensor(name, x, shape, "[D, N], [b, N, T] or [b, G, N, T]", u.device, beside)
    grouped: Tensor = x.unsqueeze(1) if x.ndim == 3 else x
    if grouped.ndim == 4 and (not grouped.shape[1] or channels % grouped.shape[1]):
        raise ValueError(
            f"{name}: got {grouped.shape[1]} groups, need a divisor of the {channels} channels of {beside}")
    return grouped


class Tensors(NamedTuple):
    """The tensor arguments of one selective scan.

    u, delta, z: [b, D, T].
    A: [D, N].
    B, C: [b, G, N, T] or [D, N].
    D, bias: [D].
    """
    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    bias: Tensor | None


class Scalars(NamedTuple):
    """The other arguments of one selective scan.

    softplus: the step is the softplus of delta + bias.
    needs_grad: some tensor needs a gradient.
    call: the call string (op, dtype and options).
    """
    softplus: bool
    needs_grad: bool
    call: str


class Outputs(NamedTuple):
    """The results of one selective scan.

    y: [b, D, T].
    last: the last state, [b, D, N].
    states: states that forward stores for backward, or None without gradients.
    """
    y: Tensor
    last: Tensor
    states: Tensor


def problem_of(x: Tensors, how: Scalars) -> Problem:
    """Return the problem of one selective scan for planning, with G as H, N as K and D as V."""
    (_, dtype, options), (b, channels, T) = parsed(how.call), x.u.shape
    groups = x.B.shape[1] if x.B.ndim == 4 else 1
    return Problem(OP, FAMILY, "", B=b, T=T, H=groups, K=x.A.shape[1], V=channels, N=b, dtype=dtype,
                   varlen=False, needs_grad=how.needs_grad, options=options)


def _cast(given: Tensors, how: Scalars, dot: str) -> tuple[Tensors, Scalars]:
    u, delta, A, B, C, D, z, bias = as_planned(given, dot)
    A, D, bias = contiguous(*(None if x is None else x.float() for x in (A, D, bias)))
    return Tensors(u, delta, A, B, C, D, z, bias), how


def _empty(x: Tensors, how: Scalars) -> tuple[Tensor, Tensor, Tensor | None]:
    (b, channels, T), N = x.u.shape, x.A.shape[1]
    return (torch.empty_like(x.u), x.A.new_empty(b, channels, N),
            x.A.new_empty(b, kept(T), channels, columns_of(N)) if how.needs_grad else None)


def _backward(plan: Plan, x: Tensors, y: Outputs, grads: Outputs, how: Scalars,
              wanted: frozenset[str]) -> Gradients:
    gradients = kernels("selective", "backward").launch_backward(
        plan, **x._asdict(), states=y.states, softplus=how.softplus,
        dy=torch.zeros_like(x.u) if grads.y is None else grads.y, dlast=contiguous(grads.last)[0])
    return dict(zip(Tensors._fields, gradients, strict=True))


OPERATOR = Operator(
    "selective_scan", Tensors, Scalars, Outputs, 2, family=FAMILY, problem=problem_of,
    on_torch=lambda x, how: torch_path.compute(*x, how.softplus), cast=_cast,
    while_tracing=lambda x, how: TracedCall(how.call, K=head_size_class(x.A.shape[1]), V=64),
    forward=lambda plan, x, how: kernels("selective", "forward").launch_forward(plan, *x, how.softplus),
    kept=lambda x, y, how: (x, (None, None, y.states)), backward=_backward,
    empty=_empty)
