"""Gated linear attention, a decay for each key channel; mirrors ``fla.ops.gla``.

    S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t
Source: Yang et al. 2023 (arXiv 2312.06635).
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards.limits import FEW_TOKENS
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_cu_seqlens, check_qkv, check_state, need_tensor, no_unknown
from flashlin.kernels.gla import torch_path
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops import recurrent
from flashlin.ops.planned import constant_while_tracing, head_size_class, name_of, planned, wants_grad
from flashlin.ops.simple_gla import MODES, v_first


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
              output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
              cu_seqlens_cpu: Tensor | None = None, transpose_state_layout: bool | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, chunk by chunk. Drop-in for ``fla.ops.gla.chunk_gla``.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]. bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as
            torch promotes them. Any strides. With cu_seqlens B is 1 and the sequences are packed along T.
        g: [B, T, H, K] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything); gets a gradient.
        scale: factor on the scores; None means K ** -0.5.
        initial_state: [N, H, K, V] (N sequences) of any float dtype, [N, H, V, K] with state_v_first; gets a gradient.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n + 1]. Empty ones are fine.
        cu_seqlens_cpu: the same on the host, so that its values can be checked without waiting for the GPU.
        transpose_state_layout: old name of state_v_first.

    Returns:
        o [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in float32 (float64 for float64 tensors), laid out like
        initial_state, or None. Rows that cu_seqlens does not cover are zero, as are their gradients.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot run the call.

    Differs from fla where fla fails: any B * H, states of any float dtype, checked shapes and cu_seqlens, CPU tensors.
    """
    op = "chunk_gla"
    no_unknown(op, unknown)
    state_v_first = v_first(op, state_v_first, transpose_state_layout)
    check_qkv(q, k, v)
    B, T, H, K = q.shape
    V = v.shape[3]
    need_tensor("g", g, (B, T, H, K), "[B, T, H, K]", q.device)
    bounds = None
    if cu_seqlens is not None:
        bounds = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q.shape, q.device, policy.current().debug)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: got a tensor without cu_seqlens, need both")
    h0, N = initial_state, B if bounds is None else bounds.shape[0] - 1
    if h0 is not None:
        check_state("initial_state", h0, N, H, K, V, state_v_first, q.device, bounds is not None)
    scale = K ** -0.5 if scale is None else float(scale)
    out_dtype = v.dtype
    if not q.dtype == k.dtype == v.dtype:
        common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(common), k.to(common), v.to(common)
    if torch.compiler.is_compiling():
        path, dot = _route(name_of(q.dtype), head_size_class(K), head_size_class(V), q.device)
    else:
        plan = planned(problem_of(op, "chunk", q, V, N, bounds is not None, wants_grad(q, k, v, g, h0)), q.device)
        path, dot = plan.problem.path, plan.problem.dot
    if path == "torch":
        o, ht = torch_path.run(q, k, v, g, h0.transpose(-1, -2) if state_v_first and h0 is not None else h0, bounds, scale)
        return o.to(out_dtype), (ht.transpose(-1, -2) if state_v_first else ht) if output_final_state else None
    kernel_dtype = out_dtype
    if dot == "fp32":  # nothing of 16 bits may reach a kernel, not even to be loaded or stored
        q, k, v, kernel_dtype = q.float(), k.float(), v.float(), torch.float32
    g, h0 = g.float(), None if h0 is None else h0.float()
    # Odd head sizes would make every row of a tile misaligned (and crash some ptxas, fla #1262): they are padded with zeros.
    pad_k, pad_v = -K % 8, -V % 8
    if pad_k or pad_v:
        q, k, v, g = F.pad(q, (0, pad_k)), F.pad(k, (0, pad_k)), F.pad(v, (0, pad_v)), F.pad(g, (0, pad_k))
        h0 = None if h0 is None else F.pad(h0, (0, pad_k, 0, pad_v) if state_v_first else (0, pad_v, 0, pad_k))
    q, k, v, g, h0 = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), None if h0 is None else h0.contiguous()
    if torch.compiler.is_compiling():
        o, ht = _library_op(q, k, v, g, h0, bounds, scale, output_final_state, state_v_first, kernel_dtype, wants_grad(q, k, v, g, h0))
    else:
        o, ht = _Chunk.apply(plan, q, k, v, g, h0, bounds, scale, output_final_state, state_v_first, kernel_dtype)
    if pad_k or pad_v:
        o = o[..., :V]
        ht = ht if not output_final_state else ht[..., :V, :K] if state_v_first else ht[..., :K, :V]
    return o.to(out_dtype), ht if output_final_state else None


def fused_recurrent_gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, scale: float | None = None,
                        initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
                        state_v_first: bool = False, cu_seqlens: Tensor | None = None, transpose_state_layout: bool | None = None,
                        **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, token by token: for decoding and short inputs. Drop-in for ``fla.ops.gla.fused_recurrent_gla``.

    gk: [B, T, H, K] and gv: [B, T, H, V] natural-log decays of the state's rows and columns, or None. reverse: run each sequence from its last
    token to its first. The rest, returns and errors as ``chunk_gla``. Everything that is a tensor of floats gets a gradient, through o
    and through the final state.

    Differs from fla where fla fails: an unknown keyword is an error (there ``g=`` runs ungated), and shapes and cu_seqlens are checked.
    """
    op = "fused_recurrent_gla"
    no_unknown(op, unknown)
    check_qkv(q, k, v)
    asked = {"reverse": reverse, "v_first": v_first(op, state_v_first, transpose_state_layout)}
    return recurrent.run(op, Inputs(q, k, v, gk=gk, gv=gv, h0=initial_state, bounds=cu_seqlens), tuple(flag for flag, on in asked.items() if on),
                         scale, output_final_state)


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
        output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
        mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Gated linear attention in the mode that suits the call: ``auto`` decides from T, gradients and the GPU, and ``flashlin.explain`` says why.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. The rest as ``chunk_gla``.
    """
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, need one of {', '.join(MODES)}")
    check_qkv(q, k, v)
    need_tensor("g", g, tuple(q.shape), "[B, T, H, K]", q.device)
    if mode == "auto":
        mode = _chosen_mode(q, v, wants_grad(q, k, v, g, initial_state))
    if mode == "chunk":
        return chunk_gla(q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    return fused_recurrent_gla(q, k, v, g, None, scale, initial_state, output_final_state, False, state_v_first, cu_seqlens)


def _chosen_mode(q: Tensor, v: Tensor, needs_grad: bool) -> str:
    """What the plan decides; a traced call, of which T may not be known, goes chunk by chunk."""
    if torch.compiler.is_compiling():
        return "chunk"
    chosen = planned(problem_of("gla", "auto", q, v.shape[3], q.shape[0], False, needs_grad), q.device).problem
    return chosen.mode if chosen.mode != "auto" else "fused_recurrent" if q.shape[1] <= FEW_TOKENS and not needs_grad else "chunk"


def problem_of(op: str, mode: str, q: Tensor, V: int, N: int, varlen: bool, needs_grad: bool) -> Problem:
    B, T, H, K = q.shape
    return Problem(op, "gla", mode, B, T, H, K, V, N, name_of(q.dtype), varlen, needs_grad)


@constant_while_tracing
def _route(dtype: str, K: int, V: int, device: torch.device) -> tuple[str, str]:
    """What torch.compile may know while tracing: no B, T or H, so that none is ever specialised."""
    problem = planned(Problem("chunk_gla", "gla", "chunk", 1, 1, 1, K, V, 1, dtype, False, True), device).problem
    return problem.path, problem.dot


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None, scale: float,
                has_ht: bool, state_v_first: bool, out_dtype: torch.dtype) -> Any:
        from flashlin.kernels.gla import forward
        ctx.plan, ctx.scale, ctx.v_first = plan, scale, state_v_first
        ctx.save_for_backward(q, k, v, g, h0, bounds)
        ctx.set_materialize_grads(False)
        return forward.run(plan, q, k, v, g, h0, bounds, scale, has_ht, state_v_first, out_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> Any:
        q, k, v, g, h0, bounds = ctx.saved_tensors
        dq, dk, dv, dg, dh0 = _gradients(ctx.plan, q, k, v, g, h0, bounds, ctx.scale, ctx.v_first, do, dht, ctx.needs_input_grad[5])
        return None, dq, dk, dv, dg, dh0, *[None] * 5


def _gradients(plan: Plan, q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None, scale: float,
               state_v_first: bool, do: Tensor | None, dht: Tensor | None, needs_dh0: bool) -> Any:
    """Gradients in the dtypes of their tensors: those of g and h0, like the tensors themselves by now, are float32."""
    from flashlin.kernels.gla import backward
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dht = None if dht is None else dht.contiguous()
    return backward.run(plan, q, k, v, g, h0, bounds, scale, state_v_first, do, dht, needs_dh0)[:5]


# Under torch.compile the same functions run inside one library operator per direction, planned at run time; see ops/simple_gla.py.
@torch.library.custom_op(
    "flashlin::gla", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? h0, Tensor? bounds, float scale, bool has_ht, bool state_v_first, "
           "ScalarType out_dtype, bool needs_grad) -> (Tensor, Tensor)")
def _library_op(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None, scale: float, has_ht: bool,
                state_v_first: bool, out_dtype: torch.dtype, needs_grad: bool) -> tuple[Tensor, Tensor]:
    from flashlin.kernels.gla import forward
    plan = planned(_problem(q, v, bounds, needs_grad), q.device)
    o, ht = forward.run(plan, q, k, v, g, h0, bounds, scale, has_ht, state_v_first, out_dtype)
    return o, q.new_empty(0, dtype=torch.float32) if ht is None else ht


@_library_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None, scale: float, has_ht: bool, state_v_first: bool,
      out_dtype: torch.dtype, needs_grad: bool) -> tuple[Tensor, Tensor]:
    N, H, K, V = q.shape[0] if bounds is None else bounds.shape[0] - 1, q.shape[2], q.shape[3], v.shape[3]
    shape = ((N, H, V, K) if state_v_first else (N, H, K, V)) if has_ht else (0,)
    return v.new_empty(v.shape, dtype=out_dtype), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(
    "flashlin::gla_backward", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? h0, Tensor? bounds, float scale, bool state_v_first, Tensor do, Tensor? dht) "
           "-> Tensor[]")
def _library_backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None, scale: float, state_v_first: bool,
                      do: Tensor, dht: Tensor | None) -> list[Tensor]:
    plan = planned(_problem(q, v, bounds, True), q.device)
    found = _gradients(plan, q, k, v, g, h0, bounds, scale, state_v_first, do, dht, h0 is not None)
    return [q.new_empty(0) if x is None else x for x in found]


@_library_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None, scale: float, state_v_first: bool, do: Tensor,
      dht: Tensor | None) -> list[Tensor]:
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, g, h0)]


def _problem(q: Tensor, v: Tensor, bounds: Tensor | None, needs_grad: bool) -> Problem:
    return problem_of("chunk_gla", "chunk", q, v.shape[3], q.shape[0] if bounds is None else bounds.shape[0] - 1, bounds is not None, needs_grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.scale, ctx.has_ht, ctx.v_first = inputs[6:9]


def _differentiate(ctx: Any, do: Tensor, dht: Tensor | None) -> Any:
    q, k, v, g, h0, bounds = ctx.saved_tensors
    dq, dk, dv, dg, dh0 = _library_backward(q, k, v, g, h0, bounds, ctx.scale, ctx.v_first, do, dht if ctx.has_ht else None)
    return dq, dk, dv, dg, None if h0 is None else dh0, *[None] * 6


_library_op.register_autograd(_differentiate, setup_context=_save)
