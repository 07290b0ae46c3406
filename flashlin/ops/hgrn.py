"""HGRN's gated recurrence, each channel on its own; mirrors ``fla.ops.hgrn``.

    h_t = e^{g_t} h_{t-1} + x_t        o_t = h_t
Source: Qin et al. 2023 (arXiv 2311.04823).
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_cu_seqlens, check_floats, need_tensor, shown
from flashlin.kernels.hgrn import torch_path
from flashlin.ops._common.gradients import once, once_traced, pulled_back
from flashlin.ops._common.planned import constant_while_tracing, exporting, name_of, planned, wants_grad

Found = tuple[Tensor, "Tensor | None"]


def chunk_hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
               cu_seqlens: Tensor | None = None) -> Found:
    """HGRN's recurrence. Drop-in for ``fla.ops.hgrn.chunk_hgrn``; the kernels are those of ``fused_recurrent_hgrn``.

    Args:
        x, g: [B, T, D], bfloat16, float16 or float32, not necessarily of one dtype (float64 runs in plain torch). Any strides. g are
            natural-log decays, normally <= 0, as strong as you like (-inf forgets everything). With cu_seqlens B is 1 and the sequences
            are packed along T.
        initial_state: [N, D] (N sequences) of any float dtype and strides.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on x's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n + 1]. Empty ones are fine.

    Returns:
        o [B, T, D] in x's dtype, and the final state [N, D] in float32 (float64 for float64 tensors), or None. Rows that cu_seqlens does not
        cover are zero, as are their gradients. x, g and initial_state get gradients, through o and through the final state; they repeat to
        the bit. In 16 bits g's gradient is computed from o as it was returned.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot run the call.

    Differs from fla where fla fails: there initial_state gets no gradient and that of the final state is dropped, without a word; here both are
    right, packed sequences are taken, and shapes and cu_seqlens are checked.
    """
    return _run("chunk_hgrn", x, g, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
                         cu_seqlens: Tensor | None = None) -> Found:
    """HGRN's recurrence. Drop-in for ``fla.ops.hgrn.fused_recurrent_hgrn``. All as ``chunk_hgrn``: one token is one launch there, too."""
    return _run("fused_recurrent_hgrn", x, g, initial_state, output_final_state, cu_seqlens)


def _run(op: str, x: Tensor, g: Tensor, h0: Tensor | None, has_ht: bool, cu_seqlens: Tensor | None) -> Found:
    has_ht = scalars.flag("output_final_state", has_ht)
    check_floats("x", x, "[B, T, D]", 3)
    if x.shape[2] == 0:
        raise ValueError(f"x: got shape {shown(x.shape)}, need [B, T, D] with D of at least 1")
    need_tensor("g", g, tuple(x.shape), "[B, T, D]", x.device, "x")
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, None, x.shape, x.device, policy.current().debug, "x")
    if h0 is not None:
        need_tensor("initial_state", h0, (x.shape[0] if bounds is None else bounds.shape[0] - 1, x.shape[2]), "[N, D]", x.device, "x")
    if torch.compiler.is_compiling():
        path, dot = _route(op, name_of(x.dtype), x.device)
    else:
        plan = planned(problem_of(op, x, bounds, wants_grad(x, g, h0)), x.device)
        path, dot = plan.problem.path, plan.problem.dot
    if path == "torch" and not exporting():
        o, ht = torch_path.run(x, g, h0, bounds)
        return o.to(x.dtype), ht if has_ht else None
    out_dtype = x.dtype
    if dot == "fp32":  # nothing of 16 bits may reach a kernel, not even to be loaded or stored
        x, g = x.float(), g.float()
    g = g if g.dtype in (x.dtype, torch.float32) else g.float()
    x, g, h0 = x.contiguous(), g.contiguous(), None if h0 is None else h0.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    if torch.compiler.is_compiling():
        o, ht = _library_op(x, g, h0, bounds, has_ht, wants_grad(x, g, h0), op)
    else:
        o, ht = _Recurrence.apply(plan, x, g, h0, bounds, has_ht)
    return o.to(out_dtype), ht if has_ht else None


def problem_of(op: str, x: Tensor, bounds: Tensor | None, needs_grad: bool) -> Problem:
    """K and V are both the number of channels."""
    B, T, D = x.shape
    N = B if bounds is None else bounds.shape[0] - 1
    return Problem(op, "hgrn", "", B, T, 1, D, D, N, name_of(x.dtype), bounds is not None, needs_grad)


@constant_while_tracing
def _route(op: str, dtype: str, device: torch.device) -> tuple[str, str]:
    """What torch.compile may know while tracing: no size, which may be symbolic."""
    problem = planned(Problem(op, "hgrn", "", 1, 1, 1, 64, 64, 1, dtype, False, True), device).problem
    return problem.path, problem.dot


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None, has_ht: bool) -> Any:
        from flashlin.kernels.hgrn import forward
        o, ht = forward.run(plan, x, g, h0, bounds, has_ht)
        ctx.plan = plan
        ctx.save_for_backward(g, o, h0, bounds)
        ctx.set_materialize_grads(False)
        return o, ht

    @staticmethod
    @once()
    def backward(ctx: Any, saved: tuple[Any, ...], do: Tensor | None, dht: Tensor | None) -> Any:
        g, o, h0, bounds = saved
        dx, dg, dh0 = _gradients(ctx.plan, g, o, h0, bounds, do, dht, ctx.needs_input_grad[3])
        return None, dx, dg, dh0, None, None


def _gradients(plan: Plan, g: Tensor, o: Tensor, h0: Tensor | None, bounds: Tensor | None, do: Tensor | None, dht: Tensor | None,
               needs_dh0: bool) -> Any:
    from flashlin.kernels.hgrn import backward
    do = torch.zeros_like(o) if do is None else do.contiguous()
    return backward.run(plan, g, o, h0, bounds, do, None if dht is None else dht.contiguous(), needs_dh0)


# Under torch.compile the same functions run inside library operators, planned at run time; see ops/simple_gla.py.
@torch.library.custom_op(
    "flashlin::hgrn", mutates_args=(),
    schema="(Tensor x, Tensor g, Tensor? h0, Tensor? bounds, bool has_ht, bool needs_grad, str op) -> (Tensor, Tensor)")
def _library_op(x: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None, has_ht: bool, needs_grad: bool, op: str) -> tuple[Tensor, Tensor]:
    plan = planned(problem_of(op, x, bounds, needs_grad), x.device)
    if plan.problem.path == "torch":
        o, last = torch_path.run(x, g, h0, bounds)
        return o.to(x.dtype), last if has_ht else last.new_empty(0)
    from flashlin.kernels.hgrn import forward
    o, ht = forward.run(plan, x, g, h0, bounds, has_ht)
    return o, x.new_empty(0, dtype=torch.float32) if ht is None else ht


@_library_op.register_fake
def _(x: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None, has_ht: bool, needs_grad: bool, op: str) -> tuple[Tensor, Tensor]:
    N = x.shape[0] if bounds is None else bounds.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty((N, x.shape[2]) if has_ht else (0,), dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.custom_op(
    "flashlin::hgrn_backward", mutates_args=(),
    schema="(Tensor g, Tensor o, Tensor? h0, Tensor? bounds, Tensor do, Tensor? dht, str op) -> Tensor[]")
def _library_backward(g: Tensor, o: Tensor, h0: Tensor | None, bounds: Tensor | None, do: Tensor, dht: Tensor | None, op: str) -> list[Tensor]:
    plan = planned(problem_of(op, o, bounds, True), o.device)
    if plan.problem.path == "torch":
        x = torch_path.inputs_of(o, g, h0, bounds)
        found = pulled_back(lambda x, g, h0: torch_path.run(x, g, h0, bounds), (x, g, h0), (True, True, True), (do, dht))
    else:
        found = _gradients(plan, g, o, h0, bounds, do, dht, h0 is not None)
    return [o.new_empty(0) if x is None else x for x in found]


@_library_backward.register_fake
def _(g: Tensor, o: Tensor, h0: Tensor | None, bounds: Tensor | None, do: Tensor, dht: Tensor | None, op: str) -> list[Tensor]:
    return [o.new_empty(0) if x is None else x.new_empty(x.shape) for x in (o, g, h0)]


once_traced(_library_backward, lambda inputs: inputs[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, g, h0, bounds, ctx.has_ht, _, ctx.op = inputs
    ctx.save_for_backward(g, output[0], h0, bounds)


def _differentiate(ctx: Any, do: Tensor, dht: Tensor | None) -> Any:
    g, o, h0, bounds = ctx.saved_tensors
    dx, dg, dh0 = _library_backward(g, o, h0, bounds, do, dht if ctx.has_ht else None, ctx.op)
    return dx, dg, None if h0 is None else dh0, None, None, None, None


_library_op.register_autograd(_differentiate, setup_context=_save)
