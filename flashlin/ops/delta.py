"""The plumbing of the chunked delta families: check, plan, run. The public functions are in delta_rule.py and gated_delta_rule.py."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards.limits import FEW_TOKENS
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_cu_seqlens, check_qkv, check_state, need_tensor
from flashlin.kernels.configs import BLOCK
from flashlin.kernels.delta import torch_path
from flashlin.ops.norm import l2norm
from flashlin.ops.planned import constant_while_tracing, head_size_class, name_of, planned, wants_grad

CHUNK_SIZES = (16, 32, 64)
MODES = ("auto", "chunk", "fused_recurrent")


def chosen_mode(op: str, mode: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, needs_grad: bool) -> str:
    """``chunk`` or ``fused_recurrent``; auto is decided by the plan. A beta per value channel runs token by token; a traced call, of which T
    may not be known, chunk by chunk."""
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, need one of {', '.join(MODES)}")
    if mode != "auto":
        return mode
    check_qkv(q, k, v, grouped=True)
    if isinstance(beta, Tensor) and beta.ndim == 4:
        return "fused_recurrent"
    if torch.compiler.is_compiling():
        return "chunk"
    chosen = planned(problem_of(op, q, v, q.shape[0], "gated" in op, False, needs_grad, "auto"), q.device).problem
    return chosen.mode if chosen.mode != "auto" else "fused_recurrent" if q.shape[1] <= FEW_TOKENS and not needs_grad else "chunk"


def run(op: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, scale: float | None, h0: Tensor | None, has_ht: bool,
        l2: bool, state_v_first: bool, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None,
        chunk_size: int) -> tuple[Tensor, Tensor | None]:
    """Both chunked ops: check, plan, run. beta and g are what the recurrence uses, after any sigmoid or gate."""
    check_qkv(q, k, v, grouped=True)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    need_tensor("beta", beta, (B, T, HV), "[B, T, HV] (a beta per value channel needs fused_recurrent)", q.device)
    if g is not None:
        need_tensor("g", g, (B, T, HV), "[B, T, HV]", q.device)
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: got {chunk_size}, need one of {', '.join(map(str, CHUNK_SIZES))}")
    bounds = None
    if cu_seqlens is not None:
        bounds = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q.shape, q.device, policy.current().debug)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: got a tensor without cu_seqlens, need both")
    N = B if bounds is None else bounds.shape[0] - 1
    if h0 is not None:
        check_state("initial_state", h0, N, HV, K, V, state_v_first, q.device, bounds is not None)
    scale = K ** -0.5 if scale is None else float(scale)
    if scale < 0:  # the kernels keep the scale in an exponent
        q, scale = -q, -scale
    out_dtype = v.dtype
    if not q.dtype == k.dtype == v.dtype:
        common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(common), k.to(common), v.to(common)
    if l2:
        q, k = l2norm(q), l2norm(k)
    if torch.compiler.is_compiling():
        path, dot = _route(op, name_of(q.dtype), head_size_class(K), head_size_class(V), q.device)
    else:
        plan = planned(problem_of(op, q, v, N, g is not None, bounds is not None, wants_grad(q, k, v, beta, g, h0)), q.device)
        path, dot = plan.problem.path, plan.problem.dot
    if path == "torch":
        o, ht = torch_path.run(q, k, v, beta, g, h0.transpose(-1, -2) if state_v_first and h0 is not None else h0, bounds, scale)
        return o.to(out_dtype), (ht.transpose(-1, -2) if state_v_first else ht) if has_ht else None
    kernel_dtype = out_dtype
    if dot == "fp32":  # nothing of 16 bits may reach a kernel, not even to be loaded or stored
        q, k, v, kernel_dtype = q.float(), k.float(), v.float(), torch.float32
    beta, g, h0 = beta.float(), None if g is None else g.float(), None if h0 is None else h0.float()
    # Odd head sizes would make every row of a tile misaligned (and crash some ptxas, fla #1262): they are padded with zeros.
    pad_k, pad_v = -K % 8, -V % 8
    if pad_k or pad_v:
        q, k, v = F.pad(q, (0, pad_k)), F.pad(k, (0, pad_k)), F.pad(v, (0, pad_v))
        h0 = None if h0 is None else F.pad(h0, (0, pad_k, 0, pad_v) if state_v_first else (0, pad_v, 0, pad_k))
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    g, h0 = (None if x is None else x.contiguous() for x in (g, h0))
    if torch.compiler.is_compiling():
        o, ht, _, _, _ = _library_op(q, k, v, beta, g, h0, bounds, scale, has_ht, state_v_first, kernel_dtype, op, wants_grad(q, k, v, beta, g, h0))
    else:
        o, ht = _Chunk.apply(plan, q, k, v, beta, g, h0, bounds, scale, has_ht, state_v_first, kernel_dtype)
    if pad_k or pad_v:
        o = o[..., :V]
        ht = ht if not has_ht else ht[..., :V, :K] if state_v_first else ht[..., :K, :V]
    return o.to(out_dtype), ht if has_ht else None


def problem_of(op: str, q: Tensor, v: Tensor, N: int, gated: bool, varlen: bool, needs_grad: bool, mode: str = "chunk") -> Problem:
    """H counts value heads: they own the states."""
    B, T, HV, V = v.shape
    options = (*(("g",) if gated else ()), *(("gva",) if HV != q.shape[2] else ()))
    return Problem(op, "delta", mode, B, T, HV, q.shape[3], V, N, name_of(q.dtype), varlen, needs_grad, options)


@constant_while_tracing
def _route(op: str, dtype: str, K: int, V: int, device: torch.device) -> tuple[str, str]:
    """What torch.compile may know while tracing: no B, T or H, so that none is ever specialised."""
    problem = planned(Problem(op, "delta", "chunk", 1, 1, 1, K, V, 1, dtype, False, True), device).problem
    return problem.path, problem.dot


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, h0: Tensor | None, bounds: Tensor | None,
                scale: float, has_ht: bool, state_v_first: bool, out_dtype: torch.dtype) -> Any:
        from flashlin.kernels.delta import forward
        o, ht, A, low, lines = forward.run(plan, q, k, v, beta, g, h0, bounds, scale, has_ht, state_v_first, out_dtype)
        ctx.plan, ctx.scale, ctx.v_first = plan, scale, state_v_first
        ctx.save_for_backward(q, k, v, beta, g, h0, bounds, A, low, lines)
        ctx.set_materialize_grads(False)
        return o, ht

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> Any:
        q, k, v, beta, g, h0, bounds, A, low, lines = ctx.saved_tensors
        found = _gradients(ctx.plan, q, k, v, beta, g, h0, bounds, A, low, lines, ctx.scale, ctx.v_first, do, dht, ctx.needs_input_grad[6])
        return None, *found, *[None] * 5


def _gradients(plan: Plan, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, h0: Tensor | None, bounds: Tensor | None, A: Tensor,
               low: Tensor | None, lines: Tensor, scale: float, state_v_first: bool, do: Tensor | None, dht: Tensor | None, needs_dh0: bool) -> Any:
    """Gradients in the dtypes of their tensors: beta, g and h0 are float32 by now."""
    from flashlin.kernels.delta import backward
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dht = None if dht is None else dht.contiguous()
    return backward.run(plan, q, k, v, beta, g, h0, bounds, A, low, lines, scale, state_v_first, do, dht, needs_dh0)


# Under torch.compile the same functions run inside one library operator per direction, planned at run time.
@torch.library.custom_op(
    "flashlin::delta", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? h0, Tensor? bounds, float scale, bool has_ht, bool state_v_first, "
           "ScalarType out_dtype, str op, bool needs_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def _library_op(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, h0: Tensor | None, bounds: Tensor | None, scale: float,
                has_ht: bool, state_v_first: bool, out_dtype: torch.dtype, op: str,
                needs_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from flashlin.kernels.delta import forward
    N = q.shape[0] if bounds is None else bounds.shape[0] - 1
    plan = planned(problem_of(op, q, v, N, g is not None, bounds is not None, needs_grad), q.device)
    o, ht, A, low, lines = forward.run(plan, q, k, v, beta, g, h0, bounds, scale, has_ht, state_v_first, out_dtype)
    return o, q.new_empty(0, dtype=torch.float32) if ht is None else ht, A, q.new_empty(0) if low is None else low, lines


@_library_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, h0: Tensor | None, bounds: Tensor | None, scale: float, has_ht: bool,
      state_v_first: bool, out_dtype: torch.dtype, op: str, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, T, HV, V), K = v.shape, q.shape[3]
    N = B if bounds is None else bounds.shape[0] - 1
    shape = ((N, HV, V, K) if state_v_first else (N, HV, K, V)) if has_ht else (0,)
    return (v.new_empty(v.shape, dtype=out_dtype), q.new_empty(shape, dtype=torch.float32), q.new_empty(B, T, HV, BLOCK),
            q.new_empty((B, T, HV, BLOCK) if needs_grad and q.dtype != torch.float32 else (0,)), q.new_empty(2, HV, B * T, dtype=torch.float32))


@torch.library.custom_op(
    "flashlin::delta_backward", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? h0, Tensor? bounds, Tensor A, Tensor? low, Tensor lines, float scale, "
           "bool state_v_first, Tensor do, Tensor? dht, str op) -> Tensor[]")
def _library_backward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, h0: Tensor | None, bounds: Tensor | None, A: Tensor,
                      low: Tensor | None, lines: Tensor, scale: float, state_v_first: bool, do: Tensor, dht: Tensor | None, op: str) -> list[Tensor]:
    N = q.shape[0] if bounds is None else bounds.shape[0] - 1
    plan = planned(problem_of(op, q, v, N, g is not None, bounds is not None, True), q.device)
    found = _gradients(plan, q, k, v, beta, g, h0, bounds, A, low, lines, scale, state_v_first, do, dht, h0 is not None)
    return [q.new_empty(0) if x is None else x for x in found]


@_library_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, h0: Tensor | None, bounds: Tensor | None, A: Tensor,
      low: Tensor | None, lines: Tensor, scale: float, state_v_first: bool, do: Tensor, dht: Tensor | None, op: str) -> list[Tensor]:
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, beta, g, h0)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7], *output[2:])
    ctx.scale, ctx.has_ht, ctx.v_first, _, ctx.op, _ = inputs[7:]


def _differentiate(ctx: Any, do: Tensor, dht: Tensor | None, *unused: Tensor | None) -> Any:
    q, k, v, beta, g, h0, bounds, A, low, lines = ctx.saved_tensors
    dq, dk, dv, dbeta, dg, dh0 = _library_backward(q, k, v, beta, g, h0, bounds, A, low if q.dtype != torch.float32 else None, lines, ctx.scale,
                                                   ctx.v_first, do, dht if ctx.has_ht else None, ctx.op)
    return dq, dk, dv, dbeta, None if g is None else dg, None if h0 is None else dh0, *[None] * 7


_library_op.register_autograd(_differentiate, setup_context=_save)
