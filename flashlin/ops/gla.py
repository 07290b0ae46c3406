"""Gated linear attention, a decay for each key channel; mirrors ``fla.ops.gla``.

    S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t
Source: Yang et al. 2023 (arXiv 2312.06635).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards.tensors import check_qkv, need_tensor
from flashlin.kernels.gla import inputs, torch_path
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import QKV, Argument, Chunked, Request, by_chunks, run_chunked
from flashlin.ops._common.context_parallel import run_over_ranks
from flashlin.ops._common.entry import entry
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.simple_gla import v_first

# RWKV-6 has a bonus u, and with it reads before the update (ops/rwkv6.py).
FAMILY = Chunked("gla", inputs.Inputs, {
    **QKV, "g": Argument(("B", "T", "H", "K"), wide=True),
    "u": Argument(("H", "K"), wide=True, optional=True)}, torch_path.compute, decays=lambda x: x.g.sum(1),
    over_ranks=run_over_ranks)


@entry
def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    *,
    cp_context: Any = None, process_group: Any = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, chunk by chunk. Drop-in for ``fla.ops.gla.chunk_gla``.

    Args:
        q, k: [B, T, H, K]; v: [B, T, H, V]. bfloat16, float16, float32 (float64 runs in plain torch).
            Different dtypes are promoted as torch promotes them. Any strides. With cu_seqlens B is 1 and the
            sequences are packed along T.
        g: [B, T, H, K] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything);
            gets a gradient.
        scale: factor on the scores; None means K ** -0.5.
        initial_state: [N, H, K, V] (N sequences) of any float dtype, [N, H, V, K] with state_v_first; gets a
            gradient.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.
        cu_seqlens_cpu: the same on the host, so that its values can be checked without waiting for the GPU.
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

    Differs from fla where fla fails: any B * H, states of any float dtype, checked shapes and cu_seqlens, CPU
    tensors.
    """
    op = "chunk_gla"
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      v_first(op, state_v_first, transpose_state_layout), cp_context=cp_context,
                      process_group=process_group)
    return run_chunked(FAMILY, request, (q, k, v, g, None))


@entry
def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor,
    gk: Tensor | None = None, gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, token by token: for decoding and short inputs. Drop-in for
    ``fla.ops.gla.fused_recurrent_gla``.

    gk: [B, T, H, K] and gv: [B, T, H, V] natural-log decays of the state's rows and columns, or None.
    reverse: run each sequence from its last token to its first. The rest, returns and errors as
    ``chunk_gla``. Everything that is a tensor of floats gets a gradient, through o and through the final
    state.

    Differs from fla where fla fails: an unknown keyword is an error (there ``g=`` runs ungated), and shapes
    and cu_seqlens are checked.
    """
    op = "fused_recurrent_gla"
    check_qkv(q, k, v)
    flags = flags_of(reverse=reverse, state_v_first=v_first(op, state_v_first, transpose_state_layout))
    return run_recurrent(op, Inputs(q, k, v, gk=gk, gv=gv, h0=initial_state, bounds=cu_seqlens), flags, scale,
                         output_final_state)


@entry
def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    mode: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention in the mode that suits the call: ``auto`` decides from T, gradients and the GPU,
    and ``flashlin.explain`` says why.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. The rest as ``chunk_gla``.
    """
    check_qkv(q, k, v)
    need_tensor("g", g, tuple(q.shape), "[B, T, H, K]", q.device)
    shared: dict[str, Any] = dict(
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens)
    if by_chunks(FAMILY, "gla", mode, (q, k, v, g, None), initial_state):
        return chunk_gla(q, k, v, g, cu_seqlens_cpu=cu_seqlens_cpu, **shared)
    return fused_recurrent_gla(q, k, v, g, **shared)
