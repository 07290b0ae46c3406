"""Simple GLA (one decay per token and head), and the functions that run all ops of its family.

It mirrors ``fla.ops.simple_gla``. The recurrence is

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
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64, transpose_state_layout: bool | None = None, *, cp_context: Any = None,
    process_group: Any = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute simple GLA chunk by chunk.

    Drop-in for ``fla.ops.simple_gla.chunk_simple_gla``. The recurrence is

        S_t = e^{g_t} S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like q.
        v: [B, T, H, V], like q.
        g: [B, T, H], natural-log decays, normally <= 0, of any strength (-inf forgets everything); gets a
            gradient.
        g_gamma: [H], constant natural-log decays, which get no gradient. They are added to g if both are
            given.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, H, K, V] for N sequences, any float dtype; gets a gradient. With state_v_first it
            is [N, H, V, K].
        output_final_state: also return the state after each sequence.
        state_v_first: store the initial and final states as [N, H, V, K].
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        chunk_size: a power of two of at least 16, accepted for compatibility. The launch table chooses the
            chunk size, which changes the result only by rounding.
        transpose_state_layout: the old name of state_v_first.
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [N, H, K, V] in float32 (float64 for float64
        tensors), in the layout of initial_state, or None. cu_seqlens must cover all rows, else ValueError.
        On a GPU the values are checked only in debug mode, and in compiled code never. Without the check,
        rows outside all sequences and their gradients are zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: training on Hopper with any Triton release
    (fla-org/flash-linear-attention#640), checked cu_seqlens and any B * H. An unknown keyword is an error.
    """
    op = "chunk_simple_gla"
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      v_first(op, state_v_first, transpose_state_layout), cp_context=cp_context,
                      process_group=process_group)
    return run_simple_gla(request, q, k, v, g, g_gamma, chunk_size=chunk_size)


@entry
def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute simple GLA token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.simple_gla.fused_recurrent_simple_gla``. Arguments, results and errors are the same
    as in ``chunk_simple_gla``. reverse: run each sequence from its last token to its first. The backward uses
    the chunked form, which computes the same function.
    """
    op = "fused_recurrent_simple_gla"
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, mode="fused_recurrent",
                      state_v_first=v_first(op, state_v_first, transpose_state_layout), reverse=reverse)
    return run_simple_gla(request, q, k, v, g, g_gamma)


@entry
def fused_chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None,
                           g_gamma: Tensor | None = None, scale: float | None = None,
                           initial_state: Tensor | None = None, output_final_state: bool = False,
                           cu_seqlens: Tensor | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute simple GLA with the kernels of ``chunk_simple_gla``, which are already fused.

    Drop-in for ``fla.ops.simple_gla.fused_chunk_simple_gla``. Arguments, results and errors are the same as
    in ``chunk_simple_gla``, except that g and g_gamma together raise ValueError, as in fla.
    """
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma: got both g and g_gamma, need one of them (chunk_simple_gla adds them up)")
    request = Request("fused_chunk_simple_gla", scale, initial_state, output_final_state, cu_seqlens)
    return run_simple_gla(request, q, k, v, g, g_gamma)


@entry
def parallel_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None,
                        output_attentions: bool = False, cu_seqlens: Tensor | None = None,
                        cu_seqlens_cpu: Tensor | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute simple GLA without initial or final states, and return the scores on request.

    Drop-in for ``fla.ops.simple_gla.parallel_simple_gla``. The kernels of ``chunk_simple_gla`` compute o, and
    all arguments that both functions have mean the same. output_attentions: also return the scores; not
    allowed with cu_seqlens.

    Returns:
        o [B, T, H, V] in the dtype of v, and the scores [B, H, T, T] in the dtype of q, or None. The score of
        tokens i and j is scale q_i . k_j e^{g_{j+1} + ... + g_i}, and 0 for j > i. Both results have
        gradients for q, k, v and g; fla drops the gradients of the scores.

    The scores need B * H * T * T elements. Plain torch computes them in float32 and keeps intermediates for
    backward, which needs several times that memory: for 16 heads of 8,192 tokens, each tensor has 4 GiB.
    Without output_attentions memory grows linearly with T.
    """
    request = Request("parallel_simple_gla", scale, None, False, cu_seqlens, cu_seqlens_cpu)
    return run_parallel(request, output_attentions, q, k, v, g)


@entry
def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
               scale: float | None = None, initial_state: Tensor | None = None,
               output_final_state: bool = False, state_v_first: bool = False,
               cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
               mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute simple GLA in the mode that suits the call.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. ``auto`` chooses from T, the need for gradients and the
    GPU; ``flashlin.explain`` prints the reason. All other arguments are the same as in ``chunk_simple_gla``.
    """
    request = Request("simple_gla", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      state_v_first, mode)
    return run_simple_gla(request, q, k, v, g, g_gamma)


def v_first(op: str, state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """Return state_v_first, or the value of its old name transpose_state_layout with a warning.

    Raises TypeError if one of them is not a valid flag, and ValueError if state_v_first is true and the old
    name is also given.
    """
    state_v_first = scalars.flag("state_v_first", state_v_first)
    if transpose_state_layout is None:
        return state_v_first
    old = scalars.flag("transpose_state_layout", transpose_state_layout)
    if state_v_first:
        raise ValueError(f"{op}: got both state_v_first and transpose_state_layout, need one of them "
                         "(state_v_first)")
    warnings.warn(f"{op}: transpose_state_layout is now called state_v_first", DeprecationWarning,
                  stacklevel=4)  # skip the frames of the op and of its entry
    return old


def run_simple_gla(request: Request, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None,
                   g_gamma: Tensor | None = None, *, chunk_size: int = 64,
                   out_dtype: torch.dtype | None = None,
                   finite: bool = False) -> tuple[Tensor, Tensor | None]:
    """Run any op of the simple GLA family.

    out_dtype: the dtype of o, for a caller that continues to compute with o; None means the dtype of v.
    finite: the caller guarantees that g_gamma is not -inf.
    """
    check_chunk_size(chunk_size)
    if g_gamma is not None and not finite:
        check_floats("g_gamma", g_gamma, "[H]", 1)
        g_gamma = g_gamma.clamp(min=FORGOTTEN)  # kernels subtract multiples; -inf would give NaN
    if g is not None and g_gamma is not None:  # check both before the sum broadcasts them
        check_qkv(q, k, v)
        need_tensor("g", g, tuple(q.shape[:3]), "[B, T, H]", q.device)
        need_tensor("g_gamma", g_gamma, tuple(q.shape[2:3]), "[H]", q.device)
        wide = widest(q, k, v)
        g, g_gamma = g.to(wide) + g_gamma.detach().to(wide), None
    return run_chunked(FAMILY, request, (q, k, v, g, g_gamma), out_dtype=out_dtype)


def run_parallel(request: Request, output_attentions: bool, q: Tensor, k: Tensor, v: Tensor,
                 g: Tensor | None = None, g_gamma: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return o of ``run_simple_gla`` and, with output_attentions, the scores (else None)."""
    scalars.flags(output_attentions=output_attentions)
    if output_attentions and request.cu_seqlens is not None:
        raise ValueError("output_attentions: got True with cu_seqlens, need one of them: packed sequences "
                         "have no one matrix of scores")
    o, _ = run_simple_gla(request, q, k, v, g, g_gamma, finite=True)
    if not output_attentions:
        return o, None
    scale = q.shape[3] ** -0.5 if request.scale is None else float(request.scale)
    # Traced under autocast, the backward of this function's matrix products would be rounded.
    return o, torch_path.scores(q, k, g, g_gamma, scale, summed=outside.autocast).to(q.dtype)
