"""Gated linear attention (GLA), with one decay per key channel; mirrors ``fla.ops.gla``.

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

# u is the bonus of RWKV-6, whose outputs read the state before the token is added to it (ops/rwkv6.py).
FAMILY = Chunked("gla", inputs.Inputs, {
    **QKV, "g": Argument(("B", "T", "H", "K"), wide=True),
    "u": Argument(("H", "K"), wide=True, optional=True)}, torch_path.compute, decays=lambda x: x.g.sum(1),
    over_ranks=run_over_ranks)


@entry
def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None,
              initial_state: Tensor | None = None, output_final_state: bool = False,
              state_v_first: bool = False, cu_seqlens: Tensor | None = None,
              cu_seqlens_cpu: Tensor | None = None, transpose_state_layout: bool | None = None, *,
              cp_context: Any = None, process_group: Any = None,
              **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute gated linear attention chunk by chunk.

    Drop-in for ``fla.ops.gla.chunk_gla``. The recurrence is

        S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like q.
        v: [B, T, H, V], like q.
        g: [B, T, H, K], natural-log decays, normally <= 0, of any strength (-inf forgets everything); gets a
            gradient.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, H, K, V] for N sequences, any float dtype; gets a gradient. With state_v_first it
            is [N, H, V, K].
        output_final_state: also return the state after each sequence.
        state_v_first: store the initial and final states as [N, H, V, K].
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        transpose_state_layout: the old name of state_v_first.
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [N, H, K, V] or None. The state is in float32
        (float64 for float64 tensors), in the layout of initial_state. cu_seqlens must cover all rows, else
        ValueError. On a GPU the values are checked only in debug mode, and in compiled code never. Without
        the check, rows outside all sequences and their gradients are zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: any B * H, states of any float dtype, checked shapes and
    cu_seqlens, and CPU tensors.
    """
    op = "chunk_gla"
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      v_first(op, state_v_first, transpose_state_layout), cp_context=cp_context,
                      process_group=process_group)
    return run_chunked(FAMILY, request, (q, k, v, g, None))


@entry
def fused_recurrent_gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None,
                        scale: float | None = None, initial_state: Tensor | None = None,
                        output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
                        cu_seqlens: Tensor | None = None, transpose_state_layout: bool | None = None,
                        **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute gated linear attention token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.gla.fused_recurrent_gla``.
    gk: [B, T, H, K], natural-log decays of the rows of the state, or None.
    gv: [B, T, H, V], natural-log decays of the columns of the state, or None.
    reverse: run each sequence from its last token to its first.

    All other arguments, the results and the errors are the same as in ``chunk_gla``. Every float tensor gets
    a gradient, through o and through the final state.

    An unknown keyword is an error here; fla accepts ``g=`` and computes without a gate. Shapes and cu_seqlens
    are checked here and not in fla.
    """
    op = "fused_recurrent_gla"
    check_qkv(q, k, v)
    flags = flags_of(reverse=reverse, state_v_first=v_first(op, state_v_first, transpose_state_layout))
    return run_recurrent(op, Inputs(q, k, v, gk=gk, gv=gv, h0=initial_state, bounds=cu_seqlens), flags, scale,
                         output_final_state)


@entry
def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
        cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
        mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute gated linear attention in the mode that suits the call.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. ``auto`` chooses from T, the need for gradients and the
    GPU; ``flashlin.explain`` prints the reason. All other arguments are the same as in ``chunk_gla``.
    """
    check_qkv(q, k, v)
    need_tensor("g", g, tuple(q.shape), "[B, T, H, K]", q.device)
    shared: dict[str, Any] = dict(
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens)
    if by_chunks(FAMILY, "gla", mode, (q, k, v, g, None), initial_state):
        return chunk_gla(q, k, v, g, cu_seqlens_cpu=cu_seqlens_cpu, **shared)
    return fused_recurrent_gla(q, k, v, g, **shared)
