"""Simple GLA (one decay per token and head) and the plumbing its family shares; mirrors ``fla.ops.simple_gla``.

    S_t = e^{g_t} S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t
Source: Qin et al. 2023 (Lightning/TransNormer), Dao and Gu 2024 (Mamba2); Yang et al. 2024 for the chunked form.
"""
from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_cu_seqlens, check_qkv, check_state, need_tensor, no_unknown
from flashlin.kernels.simple_gla import torch_path
from flashlin.ops.planned import constant_while_tracing, head_size_class, name_of, planned, wants_grad

GATED = ("g",)
MODES = ("auto", "chunk", "fused_recurrent")


def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
                     initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
                     cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_size: int = 64,
                     transpose_state_layout: bool | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Simple GLA, chunk by chunk. Drop-in for ``fla.ops.simple_gla.chunk_simple_gla``.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]. bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as
            torch promotes them. Any strides. With cu_seqlens B is 1 and the sequences are packed along T.
        g: [B, T, H] natural-log decays, normally <= 0; gets a gradient. g_gamma: [H], constant decays without one. Both: they add up.
        scale: factor on the scores; None means K ** -0.5.
        initial_state: [N, H, K, V] (N sequences) of any float dtype, [N, H, V, K] with state_v_first; gets a gradient.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n + 1]. Empty ones are fine.
        cu_seqlens_cpu: the same on the host, so that its values can be checked without waiting for the GPU.
        chunk_size: accepted for compatibility (a power of two, 16 or more); the launch table chooses the chunk, which never changes
            the result beyond rounding.
        transpose_state_layout: old name of state_v_first.

    Returns:
        o [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in float32 (float64 for float64 tensors), laid out like
        initial_state, or None.
        Rows that cu_seqlens does not cover are zero, as are their gradients.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot run the call.

    Differs from fla where fla fails: trains on Hopper with any Triton (fla-org/flash-linear-attention#640), checks cu_seqlens, has no
    limit on B * H, and an unknown keyword is an error.
    """
    no_unknown("chunk_simple_gla", unknown)
    return run("chunk_simple_gla", "chunk", q, k, v, g, g_gamma, scale, initial_state, output_final_state,
               v_first("chunk_simple_gla", state_v_first, transpose_state_layout), cu_seqlens, cu_seqlens_cpu, chunk_size=chunk_size)


def fused_recurrent_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                               scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
                               reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
                               transpose_state_layout: bool | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Simple GLA, token by token: for decoding and short inputs. Drop-in for ``fla.ops.simple_gla.fused_recurrent_simple_gla``.

    Arguments, returns and errors as ``chunk_simple_gla``. reverse: run each sequence from its last token to its first. Gradients are
    those of the chunked form, which is the same function.
    """
    no_unknown("fused_recurrent_simple_gla", unknown)
    return run("fused_recurrent_simple_gla", "fused_recurrent", q, k, v, g, g_gamma, scale, initial_state, output_final_state,
               v_first("fused_recurrent_simple_gla", state_v_first, transpose_state_layout), cu_seqlens, reverse=reverse)


def fused_chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
                           initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
                           **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Simple GLA by the kernels of ``chunk_simple_gla``, which are fused already. Drop-in for ``fla.ops.simple_gla.fused_chunk_simple_gla``.

    Arguments, returns and errors as ``chunk_simple_gla``; but, as in fla, g and g_gamma together are a ValueError.
    """
    no_unknown("fused_chunk_simple_gla", unknown)
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma: got both g and g_gamma, need one of them (chunk_simple_gla adds them up)")
    return run("fused_chunk_simple_gla", "chunk", q, k, v, g, g_gamma, scale, initial_state, output_final_state, False, cu_seqlens)


def parallel_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None, output_attentions: bool = False,
                        cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
                        **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Simple GLA without states. Drop-in for ``fla.ops.simple_gla.parallel_simple_gla``; o comes from the kernels of ``chunk_simple_gla``.

    q, k, v, g, scale, cu_seqlens, cu_seqlens_cpu, o and errors as there. output_attentions: also return the scores; not with cu_seqlens.

    Returns:
        o [B, T, H, V] in v's dtype, and the scores scale q_i . k_j e^{g_{j+1} + ... + g_i} (0 for j > i) as [B, H, T, T] in q's dtype, or
        None. Both pass gradients on to q, k, v and g, where fla drops those of the scores.

    The scores take B * H * T * T elements of memory, and several times that while they are computed in float32 by plain torch and kept for
    backward: 16 heads of 8,192 tokens are 4 GiB a tensor. Without output_attentions memory grows with T, not with its square.
    """
    no_unknown("parallel_simple_gla", unknown)
    return run_parallel("parallel_simple_gla", q, k, v, g, None, scale, output_attentions, cu_seqlens, cu_seqlens_cpu)


def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
               initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
               cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Simple GLA in the mode that suits the call: ``auto`` decides from T, gradients and the GPU, and ``flashlin.explain`` says why.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. The rest as ``chunk_simple_gla``.
    """
    return run("simple_gla", mode, q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu)


def v_first(op: str, state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """state_v_first under its old name too."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError(f"{op}: got both state_v_first and transpose_state_layout, need one of them (state_v_first)")
    warnings.warn(f"{op}: transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def run(op: str, mode: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, scale: float | None,
        h0: Tensor | None, has_ht: bool, state_v_first: bool, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None = None, *,
        chunk_size: int = 64, reverse: bool = False, out_dtype: torch.dtype | None = None, grouped: bool = False) -> tuple[Tensor, Tensor | None]:
    """Every op of the family: check, plan, run. out_dtype: of o, where the caller goes on computing with it. grouped: q and k may have H heads
    for the HV of v, g and states, where head j of v reads head j // (HV / H)."""
    check_qkv(q, k, v, grouped=grouped)
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    if g is not None:
        need_tensor("g", g, (B, T, HV), "[B, T, H]", q.device)
    if gamma is not None:
        need_tensor("g_gamma", gamma, (HV,), "[H]", q.device)
        gamma = gamma.detach()  # a constant, as documented, on every path
    if chunk_size != 64 and (chunk_size < 16 or chunk_size & (chunk_size - 1)):
        raise ValueError(f"chunk_size: got {chunk_size}, need a power of two of at least 16")
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, need one of {', '.join(MODES)}")
    bounds = None
    if cu_seqlens is not None:
        bounds = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q.shape, q.device, policy.current().debug)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: got a tensor without cu_seqlens, need both")
    N = B if bounds is None else bounds.shape[0] - 1
    if h0 is not None:
        check_state("initial_state", h0, N, HV, K, V, state_v_first, q.device, bounds is not None)
    if g is not None and gamma is not None:
        wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        g, gamma = g.to(wide) + gamma.to(wide), None
    scale = K ** -0.5 if scale is None else float(scale)
    if scale < 0:  # the kernels keep the scale in an exponent
        q, scale = -q, -scale
    out_dtype = out_dtype or v.dtype
    if not q.dtype == k.dtype == v.dtype:
        common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(common), k.to(common), v.to(common)
    if reverse:
        q, k, v = q.flip(1), k.flip(1), v.flip(1)
        g = None if g is None else g.flip(1)
        h0 = h0 if h0 is None or bounds is None else h0.flip(0)
        bounds = None if bounds is None else T - bounds.flip(0)
    o, ht = _planned_run(op, mode, q, k, v, g, gamma, h0, bounds, scale, has_ht, state_v_first, out_dtype, N)
    if reverse:
        o, ht = o.flip(1), ht if ht is None or bounds is None else ht.flip(0)
    return o, ht


def run_parallel(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, scale: float | None, output_attentions: bool,
                 cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """o of ``run``, and the scores behind it where they are asked for."""
    if output_attentions and cu_seqlens is not None:
        raise ValueError("output_attentions: got True with cu_seqlens, need one of them: packed sequences have no one matrix of scores")
    o, _ = run(op, "chunk", q, k, v, g, gamma, scale, None, False, False, cu_seqlens, cu_seqlens_cpu)
    if not output_attentions:
        return o, None
    return o, torch_path.scores(q, k, g, gamma, q.shape[3] ** -0.5 if scale is None else float(scale)).to(q.dtype)


def _planned_run(op: str, mode: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, h0: Tensor | None,
                 bounds: Tensor | None, scale: float, has_ht: bool, state_v_first: bool, out_dtype: torch.dtype,
                 N: int) -> tuple[Tensor, Tensor | None]:
    K, V = q.shape[3], v.shape[3]
    if torch.compiler.is_compiling():
        path, dot = _route(op, mode, name_of(q.dtype), head_size_class(K), head_size_class(V), q.device)
    else:
        needs_grad = wants_grad(q, k, v, g, h0)
        plan = planned(problem_of(op, mode, q, v, N, g is not None, bounds is not None, needs_grad), q.device)
        path, dot = plan.problem.path, plan.problem.dot
    if path == "torch":
        state = h0.transpose(-1, -2) if state_v_first and h0 is not None else h0
        o, ht = torch_path.run(q, k, v, g, gamma, state, bounds, scale)
        return o.to(out_dtype), (ht.transpose(-1, -2) if state_v_first else ht) if has_ht else None
    asked_dtype = out_dtype
    if dot == "fp32":  # nothing of 16 bits may reach a kernel, not even to be loaded or stored
        q, k, v = q.float(), k.float(), v.float()
        out_dtype = torch.float32
    g, gamma, h0 = (None if x is None else x.float() for x in (g, gamma, h0))
    # Odd head sizes would make every row of a tile misaligned (and crash some ptxas, fla #1262): they are padded with zeros.
    pad_k, pad_v = -K % 8, -V % 8
    if pad_k or pad_v:
        q, k, v = F.pad(q, (0, pad_k)), F.pad(k, (0, pad_k)), F.pad(v, (0, pad_v))
        h0 = None if h0 is None else F.pad(h0, (0, pad_k, 0, pad_v) if state_v_first else (0, pad_v, 0, pad_k))
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, gamma, h0 = (None if x is None else x.contiguous() for x in (g, gamma, h0))
    if torch.compiler.is_compiling():
        o, ht = _library_op(q, k, v, g, gamma, h0, bounds, scale, has_ht, state_v_first, out_dtype, op, mode, wants_grad(q, k, v, g, h0))
    else:
        o, ht = _Scan.apply(plan, q, k, v, g, gamma, h0, bounds, scale, has_ht, state_v_first, out_dtype)
    if pad_k or pad_v:
        o = o[..., :V]
        ht = ht if not has_ht else ht[..., :V, :K] if state_v_first else ht[..., :K, :V]
    return o.to(asked_dtype), ht if has_ht else None


def problem_of(op: str, mode: str, q: Tensor, v: Tensor, N: int, gated: bool, varlen: bool, needs_grad: bool) -> Problem:
    """H counts value heads: they own the states."""
    B, T, HV, V = v.shape
    options = (*(GATED if gated else ()), *(("gva",) if HV != q.shape[2] else ()))
    return Problem(op, "simple_gla", mode, B, T, HV, q.shape[3], V, N, name_of(q.dtype), varlen, needs_grad, options)


@constant_while_tracing
def _route(op: str, mode: str, dtype: str, K: int, V: int, device: torch.device) -> tuple[str, str]:
    """What torch.compile may know while tracing: no B, T or H, so that none is ever specialised."""
    problem = planned(Problem(op, "simple_gla", mode, 1, 1, 1, K, V, 1, dtype, False, True), device).problem
    return problem.path, problem.dot


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, h0: Tensor | None,
                bounds: Tensor | None, scale: float, has_ht: bool, state_v_first: bool, out_dtype: torch.dtype) -> Any:
        from flashlin.kernels.simple_gla import forward
        ctx.plan, ctx.scale, ctx.v_first = plan, scale, state_v_first
        ctx.save_for_backward(q, k, v, g, gamma, h0, bounds)
        ctx.set_materialize_grads(False)
        return forward.run(plan, q, k, v, g, gamma, h0, bounds, scale, has_ht, state_v_first, out_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> Any:
        q, k, v, g, gamma, h0, bounds = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dq, dk, dv, dg, dh0 = _gradients(ctx.plan, q, k, v, g, gamma, h0, bounds, ctx.scale, ctx.v_first, do, dht, needs[4], needs[6])
        return None, dq, dk, dv, dg, None, dh0, None, None, None, None, None


def _gradients(plan: Plan, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, h0: Tensor | None, bounds: Tensor | None,
               scale: float, state_v_first: bool, do: Tensor | None, dht: Tensor | None, needs_dg: bool, needs_dh0: bool) -> Any:
    """Gradients in the dtypes of their tensors: those of g and h0, like the tensors themselves by now, are float32."""
    from flashlin.kernels.simple_gla import backward
    do = torch.zeros_like(v) if do is None else do.to(v.dtype).contiguous()  # which is what the kernels multiply, also where o is float32
    dht = None if dht is None else dht.contiguous()
    return backward.run(plan, q, k, v, g, gamma, h0, bounds, scale, state_v_first, do, dht, needs_dg, needs_dh0)


# Under torch.compile the same two functions run inside one library operator per direction, planned at run time. The schemas are spelt out
# because torch 2.4 cannot read them from annotations that are strings.
@torch.library.custom_op(
    "flashlin::simple_gla", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gamma, Tensor? h0, Tensor? bounds, float scale, bool has_ht, "
           "bool state_v_first, ScalarType out_dtype, str op, str mode, bool needs_grad) -> (Tensor, Tensor)")
def _library_op(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, h0: Tensor | None, bounds: Tensor | None,
                scale: float, has_ht: bool, state_v_first: bool, out_dtype: torch.dtype, op: str, mode: str,
                needs_grad: bool) -> tuple[Tensor, Tensor]:
    from flashlin.kernels.simple_gla import forward
    N = q.shape[0] if bounds is None else bounds.shape[0] - 1
    plan = planned(problem_of(op, mode, q, v, N, g is not None, bounds is not None, needs_grad), q.device)
    o, ht = forward.run(plan, q, k, v, g, gamma, h0, bounds, scale, has_ht, state_v_first, out_dtype)
    return o, q.new_empty(0, dtype=torch.float32) if ht is None else ht


@_library_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, h0: Tensor | None, bounds: Tensor | None, scale: float,
      has_ht: bool, state_v_first: bool, out_dtype: torch.dtype, op: str, mode: str, needs_grad: bool) -> tuple[Tensor, Tensor]:
    N, K, (H, V) = q.shape[0] if bounds is None else bounds.shape[0] - 1, q.shape[3], v.shape[2:]
    shape = ((N, H, V, K) if state_v_first else (N, H, K, V)) if has_ht else (0,)
    return v.new_empty(v.shape, dtype=out_dtype), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(
    "flashlin::simple_gla_backward", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gamma, Tensor? h0, Tensor? bounds, float scale, bool state_v_first, "
           "Tensor do, Tensor? dht, str op, str mode) -> Tensor[]")
def _library_backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, h0: Tensor | None, bounds: Tensor | None,
                      scale: float, state_v_first: bool, do: Tensor, dht: Tensor | None, op: str, mode: str) -> list[Tensor]:
    N = q.shape[0] if bounds is None else bounds.shape[0] - 1
    plan = planned(problem_of(op, mode, q, v, N, g is not None, bounds is not None, True), q.device)
    found = _gradients(plan, q, k, v, g, gamma, h0, bounds, scale, state_v_first, do, dht, g is not None, h0 is not None)
    return [q.new_empty(0) if x is None else x for x in found]


@_library_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, h0: Tensor | None, bounds: Tensor | None, scale: float,
      state_v_first: bool, do: Tensor, dht: Tensor | None, op: str, mode: str) -> list[Tensor]:
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, g, h0)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.scale, ctx.has_ht, ctx.v_first, _, ctx.op, ctx.mode, _ = inputs[7:]


def _differentiate(ctx: Any, do: Tensor, dht: Tensor | None) -> Any:
    q, k, v, g, gamma, h0, bounds = ctx.saved_tensors
    dq, dk, dv, dg, dh0 = _library_backward(q, k, v, g, gamma, h0, bounds, ctx.scale, ctx.v_first, do, dht if ctx.has_ht else None,
                                            ctx.op, ctx.mode)
    return dq, dk, dv, None if g is None else dg, None, None if h0 is None else dh0, None, *[None] * 7


_library_op.register_autograd(_differentiate, setup_context=_save)
