"""Simple GLA (one decay per token and head) and the plumbing its family shares; mirrors
``fla.ops.simple_gla``.

    S_t = e^{g_t} S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t
Source: Qin et al. 2023 (Lightning/TransNormer), Dao and Gu 2024 (Mamba2); Yang et al. 2024 for the chunked
form.
"""
from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import check_chunk_size, check_floats, check_qkv, need_tensor
from flashlin.kernels.configs import FORGOTTEN
from flashlin.kernels.sequences import widest
from flashlin.kernels.simple_gla import inputs, torch_path
from flashlin.ops._common.chunked import QKV, Argument, Chunked, Request, run_chunked
from flashlin.ops._common.context_parallel import run_over_ranks
from flashlin.ops._common.entry import entry, outside


def _decays(x: inputs.Inputs) -> Tensor:
    B, T, HV = x.v.shape[:3]
    decays = torch.zeros(B, HV, dtype=widest(x.q, x.k, x.v), device=x.v.device)
    for log in (None if x.g is None else x.g.sum(1), None if x.gamma is None else T * x.gamma):
        decays = decays if log is None else decays + log
    return decays


FAMILY = Chunked("simple_gla", inputs.Inputs, {
    **QKV, "g": Argument(("B", "T", "HV"), wide=True, optional=True),
    "g_gamma": Argument(("HV",), wide=True, optional=True, constant=True)},
    torch_path.compute, one_graph=True, decays=_decays, over_ranks=run_over_ranks)


@entry
def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor,
    g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    *,
    cp_context: Any = None, process_group: Any = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA, chunk by chunk. Drop-in for ``fla.ops.simple_gla.chunk_simple_gla``.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]. bfloat16, float16, float32 (float64 runs in plain torch).
            Different dtypes are promoted as torch promotes them. Any strides. With cu_seqlens B is 1 and the
            sequences are packed along T.
        g: [B, T, H] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything); gets
            a gradient. g_gamma: [H], constant decays without one. Both: they add up.
        scale: factor on the scores; None means K ** -0.5.
        initial_state: [N, H, K, V] (N sequences) of any float dtype, [N, H, V, K] with state_v_first; gets a
            gradient.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.
        cu_seqlens_cpu: the same on the host, so that its values can be checked without waiting for the GPU.
        chunk_size: accepted for compatibility (a power of two, 16 or more); the launch table chooses the
            chunk, which never changes the result beyond rounding.
        transpose_state_layout: old name of state_v_first.
        cp_context, process_group: ranks that share the sequences, as in ``chunk_gated_delta_rule``.

    Returns:
        o [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in float32 (float64 for float64
        tensors), laid out like initial_state, or None. cu_seqlens has to cover all rows, else ValueError;
        where its values are not read (on a GPU outside debug mode, or compiled), rows that it leaves out are
        zero, as are their gradients.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: trains on Hopper with any Triton (fla-org/flash-linear-attention#640),
    checks cu_seqlens, has no limit on B * H, and an unknown keyword is an error.
    """
    op = "chunk_simple_gla"
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      v_first(op, state_v_first, transpose_state_layout), cp_context=cp_context,
                      process_group=process_group)
    return run_simple_gla(request, q, k, v, g, g_gamma, chunk_size=chunk_size)


@entry
def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor,
    g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA, token by token: for decoding and short inputs. Drop-in for
    ``fla.ops.simple_gla.fused_recurrent_simple_gla``.

    Arguments, returns and errors as ``chunk_simple_gla``. reverse: run each sequence from its last token to
    its first. Gradients are those of the chunked form, which is the same function.
    """
    op = "fused_recurrent_simple_gla"
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, mode="fused_recurrent",
                      state_v_first=v_first(op, state_v_first, transpose_state_layout), reverse=reverse)
    return run_simple_gla(request, q, k, v, g, g_gamma)


@entry
def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA by the kernels of ``chunk_simple_gla``, which are fused already. Drop-in for
    ``fla.ops.simple_gla.fused_chunk_simple_gla``.

    Arguments, returns and errors as ``chunk_simple_gla``; but, as in fla, g and g_gamma together are a
    ValueError.
    """
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma: got both g and g_gamma, need one of them (chunk_simple_gla adds them up)")
    request = Request("fused_chunk_simple_gla", scale, initial_state, output_final_state, cu_seqlens)
    return run_simple_gla(request, q, k, v, g, g_gamma)


@entry
def parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA without states. Drop-in for ``fla.ops.simple_gla.parallel_simple_gla``; o comes from the
    kernels of ``chunk_simple_gla``.

    q, k, v, g, scale, cu_seqlens, cu_seqlens_cpu, o and errors as there. output_attentions: also return the
    scores; not with cu_seqlens.

    Returns:
        o [B, T, H, V] in v's dtype, and the scores scale q_i . k_j e^{g_{j+1} + ... + g_i} (0 for j > i) as
        [B, H, T, T] in q's dtype, or None. Both pass gradients on to q, k, v and g, where fla drops those of
        the scores.

    The scores take B * H * T * T elements of memory, and several times that while they are computed in
    float32 by plain torch and kept for backward: 16 heads of 8,192 tokens are 4 GiB a tensor. Without
    output_attentions memory grows with T, not with its square.
    """
    request = Request("parallel_simple_gla", scale, None, False, cu_seqlens, cu_seqlens_cpu)
    return run_parallel(request, output_attentions, q, k, v, g)


@entry
def simple_gla(
    q: Tensor, k: Tensor, v: Tensor,
    g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    mode: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA in the mode that suits the call: ``auto`` decides from T, gradients and the GPU, and
    ``flashlin.explain`` says why.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. The rest as ``chunk_simple_gla``.
    """
    request = Request("simple_gla", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      state_v_first, mode)
    return run_simple_gla(request, q, k, v, g, g_gamma)


def v_first(op: str, state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """state_v_first under its old name too."""
    if transpose_state_layout is None:
        return state_v_first
    scalars.flags(state_v_first=state_v_first, transpose_state_layout=transpose_state_layout)
    if state_v_first:
        raise ValueError(f"{op}: got both state_v_first and transpose_state_layout, need one of them "
                         "(state_v_first)")
    warnings.warn(f"{op}: transpose_state_layout is now called state_v_first", DeprecationWarning,
                  stacklevel=4)  # skip the frames of the op and of its entry
    return transpose_state_layout


def run_simple_gla(
    request: Request,
    q: Tensor, k: Tensor, v: Tensor,
    g: Tensor | None = None, g_gamma: Tensor | None = None,
    *,
    chunk_size: int = 64,
    out_dtype: torch.dtype | None = None,
    finite: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Every op of the family. out_dtype: of o, where the caller goes on computing with it. finite: g_gamma
    cannot be -inf."""
    check_chunk_size(chunk_size)
    if g_gamma is not None and not finite:
        check_floats("g_gamma", g_gamma, "[H]", 1)
        g_gamma = g_gamma.clamp(min=FORGOTTEN)  # the kernels take differences of its multiples
    if g is not None and g_gamma is not None:  # what is added here has to fit first
        check_qkv(q, k, v)
        need_tensor("g", g, tuple(q.shape[:3]), "[B, T, H]", q.device)
        need_tensor("g_gamma", g_gamma, tuple(q.shape[2:3]), "[H]", q.device)
        wide = widest(q, k, v)
        g, g_gamma = g.to(wide) + g_gamma.detach().to(wide), None
    return run_chunked(FAMILY, request, (q, k, v, g, g_gamma), out_dtype=out_dtype)


def run_parallel(request: Request, output_attentions: bool, q: Tensor, k: Tensor, v: Tensor,
                 g: Tensor | None = None,
                 g_gamma: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """o of ``run_simple_gla``, and the scores behind it where they are asked for."""
    scalars.flags(output_attentions=output_attentions)
    if output_attentions and request.cu_seqlens is not None:
        raise ValueError("output_attentions: got True with cu_seqlens, need one of them: packed sequences "
                         "have no one matrix of scores")
    o, _ = run_simple_gla(request, q, k, v, g, g_gamma, finite=True)
    if not output_attentions:
        return o, None
    scale = q.shape[3] ** -0.5 if request.scale is None else float(request.scale)
    # traced under autocast, the backward of a matrix product would be rounded
    return o, torch_path.scores(q, k, g, g_gamma, scale, summed=outside.autocast).to(q.dtype)
