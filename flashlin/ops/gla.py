"""Gated linear attention, a decay for each key channel; mirrors ``fla.ops.gla``.

    S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t
Source: Yang et al. 2023 (arXiv 2312.06635).
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin import policy
from flashlin.guards.limits import FEW_TOKENS
from flashlin.guards.problem import Problem
from flashlin.guards.tensors import check_cu_seqlens, check_qkv, check_state, need_tensor, no_unknown
from flashlin.kernels.gla import torch_path
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops import recurrent
from flashlin.ops.planned import name_of, planned, wants_grad
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
    if not torch.compiler.is_compiling():
        planned(problem_of(op, "chunk", q, V, N, bounds is not None, wants_grad(q, k, v, g, h0)), q.device)
    o, ht = torch_path.run(q, k, v, g, h0.transpose(-1, -2) if state_v_first and h0 is not None else h0, bounds, scale)
    return o.to(out_dtype), (ht.transpose(-1, -2) if state_v_first else ht) if output_final_state else None


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
