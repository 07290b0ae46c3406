"""RWKV-6, with a decay for each key channel and a bonus for the current token; mirrors ``fla.ops.rwkv6``.

    o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T r_t        S_t = Diag(e^{w_t}) S_{t-1} + k_t v_t^T

Source: Peng et al. 2024 (arXiv 2404.05892). The chunked op runs the kernels of gated linear attention
(kernels/gla).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards.tensors import check_chunk_size, check_qkv, need_tensor
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import Request, by_chunks, run_chunked
from flashlin.ops._common.entry import entry
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.gla import FAMILY


@entry
def chunk_rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
                initial_state: Tensor | None = None, output_final_state: bool = False,
                cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_size: int = 64,
                *, cp_context: Any = None, process_group: Any = None,
                **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute RWKV-6 chunk by chunk.

    Drop-in for ``fla.ops.rwkv6.chunk_rwkv6``. The recurrence is

        o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T r_t        S_t = Diag(e^{w_t}) S_{t-1} + k_t v_t^T

    Args:
        r: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of r, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like r.
        v: [B, T, H, V], like r.
        w: [B, T, H, K], natural-log decays, normally <= 0, of any strength (-inf forgets everything); gets a
            gradient.
        u: [H, K], the bonus: a factor for each channel of the current token's k in the output, which is
            Diag(u) in the formula; gets a gradient.
        scale: factor on the output; None means K ** -0.5. (RWKV-6 layers pass 1.)
        initial_state: [N, H, K, V] for N sequences, any float dtype; gets a gradient.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on the device of r. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        chunk_size: a power of two of at least 16, accepted for compatibility. The launch table chooses the
            chunk size, which changes the result only by rounding.
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [N, H, K, V] in float32 (float64 for float64
        tensors), or None. cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked
        only in debug mode, and in compiled code never. Without the check, rows outside all sequences and
        their gradients are zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: any B * H, and CPU tensors. cu_seqlens that do not cover all rows
    are an error instead of an illegal memory access. If k has fewer heads than r, the call raises the error,
    and not the backward pass. An unknown keyword is an error.
    """
    check_chunk_size(chunk_size)
    request = Request("chunk_rwkv6", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      cp_context=cp_context, process_group=process_group)
    return run_chunked(FAMILY, request, (r, k, v, w, u), called={"q": "r", "g": "w", "u": "u"})


@entry
def fused_recurrent_rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
                          initial_state: Tensor | None = None, output_final_state: bool = False,
                          reverse: bool = False, cu_seqlens: Tensor | None = None,
                          **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute RWKV-6 token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.rwkv6.fused_recurrent_rwkv6``. ``chunk_rwkv6`` documents the recurrence.

    Args:
        r: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of r, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like r.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of r and k.
        w: [B, T, HV, K], natural-log decays, normally <= 0, of any strength (-inf forgets everything).
        u: [HV, K], the bonus: a factor for each channel of the current token's k in the output, which is
            Diag(u) in the formula.
        scale: factor on the output; None means K ** -0.5. (RWKV-6 layers pass 1.)
        initial_state: [N, HV, K, V] for N sequences, any float dtype and strides.
        output_final_state: also return the state after each sequence.
        reverse: run each sequence from its last token to its first.
        cu_seqlens: [N + 1] int32 or int64 on the device of r. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 (float64 for float64
        tensors), or None. Every float tensor gets a gradient, through o and through the final state.
        cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked only in debug mode,
        and in compiled code never. Without the check, rows outside all sequences and their gradients are
        zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from fla: gradients through the final state are correct. fla silently drops them, so k, v, w
    and initial_state get wrong gradients if the loss depends on the final state. Shapes and cu_seqlens are
    checked, and CPU tensors work.
    """
    inputs = Inputs(r, k, v, gk=w, bonus=u, h0=initial_state, bounds=cu_seqlens)
    return run_recurrent("fused_recurrent_rwkv6", inputs, flags_of("before", reverse=reverse), scale,
                         output_final_state, called={"q": "r", "gk": "w", "bonus": "u"})


@entry
def rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
          initial_state: Tensor | None = None, output_final_state: bool = False,
          cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
          mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute RWKV-6 in the mode that suits the call.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. ``auto`` chooses from T, the need for gradients and the
    GPU; ``flashlin.explain`` prints the reason. All other arguments are the same as in ``chunk_rwkv6``.
    """
    check_qkv(r, k, v, first="r")
    need_tensor("u", u, tuple(r.shape[2:]), "[H, K]", r.device, "r")
    need_tensor("w", w, tuple(r.shape), "[B, T, H, K]", r.device, "r")
    shared: dict[str, Any] = dict(scale=scale, initial_state=initial_state,
                                  output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    if by_chunks(FAMILY, "rwkv6", mode, (r, k, v, w, u), initial_state):
        return chunk_rwkv6(r, k, v, w, u, cu_seqlens_cpu=cu_seqlens_cpu, **shared)
    return fused_recurrent_rwkv6(r, k, v, w, u, **shared)
