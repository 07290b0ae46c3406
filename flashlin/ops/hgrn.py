"""The gated recurrence of HGRN, which computes each channel separately; mirrors ``fla.ops.hgrn``.

    h_t = e^{g_t} h_{t-1} + x_t        o_t = h_t

Source: Qin et al. 2023 (arXiv 2311.04823).
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import check_floats, need_tensor, shown
from flashlin.kernels.hgrn import torch_path
from flashlin.ops._common.arguments import check_packed
from flashlin.ops._common.casting import as_planned, contiguous, count_of, dense, name_of, wants_grad
from flashlin.ops._common.entry import entry
from flashlin.ops._common.gradients import pulled_back
from flashlin.ops._common.operator import Gradients, Operator, kernels
from flashlin.ops._common.pipeline import TracedCall, call_of, exporting

Found = tuple[Tensor, "Tensor | None"]


@entry
def chunk_hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
               cu_seqlens: Tensor | None = None) -> Found:
    """Compute the gated recurrence of HGRN.

    Drop-in for ``fla.ops.hgrn.chunk_hgrn``. It runs the kernels of ``fused_recurrent_hgrn``. The recurrence
    is

        h_t = e^{g_t} h_{t-1} + x_t        o_t = h_t

    Args:
        x: [B, T, D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. With cu_seqlens
            B is 1 and sequences are packed along T.
        g: [B, T, D], natural-log decays, normally <= 0, of any strength (-inf forgets everything). Its dtype
            may differ from the dtype of x.
        initial_state: [N, D] for N sequences, any float dtype and strides.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on the device of x. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.

    Returns:
        o [B, T, D] in the dtype of x, and the final state [N, D] in float32 (float64 for float64 tensors), or
        None. x, g and initial_state get gradients, through o and through the final state. Repeated runs give
        bitwise identical gradients. For 16-bit tensors, the gradient of g is computed from the rounded o.
        cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked only in debug mode,
        and in compiled code never. Without the check, rows outside all sequences and their gradients are
        zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from fla: initial_state gets a gradient, and the gradient of the final state is used. fla
    silently drops both. Packed sequences work, and shapes and cu_seqlens are checked.
    """
    return _scan("chunk_hgrn", x, g, initial_state, output_final_state, cu_seqlens)


@entry
def fused_recurrent_hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None,
                         output_final_state: bool = False, cu_seqlens: Tensor | None = None) -> Found:
    """Compute the gated recurrence of HGRN with the same kernels as ``chunk_hgrn``.

    Drop-in for ``fla.ops.hgrn.fused_recurrent_hgrn``. The arguments, results and errors are the same as in
    ``chunk_hgrn``. A call with one token is one launch in both.
    """
    return _scan("fused_recurrent_hgrn", x, g, initial_state, output_final_state, cu_seqlens)


def _scan(op: str, x: Tensor, g: Tensor, h0: Tensor | None, has_ht: bool, cu_seqlens: Tensor | None) -> Found:
    has_ht = scalars.flag("output_final_state", has_ht)
    check_floats("x", x, "[B, T, D]", 3)
    if x.shape[2] == 0:
        raise ValueError(f"x: got shape {shown(x.shape)}, need [B, T, D] with D of at least 1")
    need_tensor("g", g, x.shape, "[B, T, D]", x.device, "x")
    bounds, N = check_packed(x, cu_seqlens)
    if h0 is not None:
        need_tensor("initial_state", h0, (N, x.shape[2]), "[N, D]", x.device, "x")
    o, ht = OPERATOR.run_planned(Tensors(x, g, h0, bounds), Scalars(has_ht, wants_grad(x, g, h0), op))
    return o.to(x.dtype), ht if has_ht else None


class Tensors(NamedTuple):
    """The tensor arguments of one HGRN call.

    x: [B, T, D].
    g: [B, T, D], natural-log decays.
    h0: the initial state, [N, D].
    bounds: the checked cu_seqlens, [N + 1].
    """
    x: Tensor
    g: Tensor
    h0: Tensor | None
    bounds: Tensor | None


class Scalars(NamedTuple):
    """The other arguments of one HGRN call.

    has_ht: return the final state.
    needs_grad: some tensor needs a gradient.
    call: the name of the op.
    """
    has_ht: bool
    needs_grad: bool
    call: str


class Outputs(NamedTuple):
    """The results of one HGRN call: o [B, T, D], and the final state ht [N, D] or None."""
    o: Tensor
    ht: Tensor | None


def problem_of(x: Tensors, how: Scalars) -> Problem:
    """Return the problem of one HGRN call for planning; K and V are both the number of channels."""
    B, T, D = x.x.shape
    return Problem(how.call, "hgrn", "", B=B, T=T, H=1, K=D, V=D, N=count_of(x.x, x.bounds),
                   dtype=name_of(x.x.dtype), varlen=x.bounds is not None, needs_grad=how.needs_grad)


def _cast(given: Tensors, how: Scalars, dot: str) -> tuple[Tensors, Scalars]:
    x, g, h0, bounds = as_planned(given, dot)
    g = g if g.dtype in (x.dtype, torch.float32) else g.float()
    h0 = None if h0 is None else h0.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    return Tensors(x.contiguous(), g.contiguous(), h0, bounds), how


def _empty(x: Tensors, how: Scalars) -> tuple[Tensor, Tensor | None]:
    N = count_of(x.x, x.bounds)
    wide = torch.promote_types(x.x.dtype, torch.float32)
    return x.x.new_empty(x.x.shape), x.x.new_empty((N, x.x.shape[2]), dtype=wide) if how.has_ht else None


def _backward(plan: Plan, x: Tensors, y: Outputs, grads: Outputs, how: Scalars,
              wanted: frozenset[str]) -> Gradients:
    o, g, h0, bounds = x
    gradients = kernels("hgrn", "backward").launch_backward(plan, g, o, h0, bounds, dense(grads.o, o),
                                                *contiguous(grads.ht), "h0" in wanted)
    return dict(zip(("x", "g", "h0"), gradients, strict=True))


OPERATOR = Operator(
    "hgrn", Tensors, Scalars, Outputs, 2, family="hgrn", problem=problem_of,
    on_torch=lambda x, how: torch_path.compute(*x), cast=_cast,
    while_tracing=lambda x, how: TracedCall(call_of(how.call, {x.x.dtype}), K=64, V=64),
    inside=lambda x: exporting(),
    forward=lambda plan, x, how: kernels("hgrn", "forward").launch_forward(plan, *x, how.has_ht),
    # The stored tensors have o in place of x, because backward reads o.
    kept=lambda x, y, how: ((y.o, *x[1:]), (None, None)), backward=_backward, empty=_empty,
    backward_on_torch=lambda x, y, grads, how, wanted: pulled_back(
        lambda x: torch_path.compute(*x), x._replace(x=torch_path.inputs_of(*x)), wanted, grads))
