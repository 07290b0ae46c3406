"""RWKV-7, which removes the old value of a key from the state before it writes; mirrors ``fla.ops.rwkv7``.

    S_t = Diag(e^{w_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T r_t

The layer passes a = -kk and b = kk * (in-context learning rate), with kk of unit length. The recurrence is
the DPLR delta rule with other names. Source: Peng et al. 2025 (arXiv 2503.14456).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards.tensors import check_qkv
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import CHUNK_SIZES, Request, by_chunks, check_options, run_chunked
from flashlin.ops._common.entry import entry
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.dplr_delta_rule import FAMILY, NOT_KDA


@entry
def chunk_rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = 1.0,
                initial_state: Tensor | None = None, output_final_state: bool = False,
                cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
                safe_gate: bool = False, chunk_size: int | None = None, disable_recompute: bool = False,
                cp_context: Any = None, lower_bound: float | None = None, *, process_group: Any = None,
                **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute RWKV-7 chunk by chunk.

    Drop-in for ``fla.ops.rwkv7.chunk_rwkv7``. The recurrence is

        S_t = Diag(e^{w_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T r_t

    r, k, a, b: [B, T, H, K].
    v: [B, T, H, V].
    w: [B, T, H, K], natural-log decays, normally <= 0, of any strength. Decays of RWKV-7 layers
        lie between -0.607 and 0.
    scale: factor on the output, 1 by default, unlike in ``fused_recurrent_rwkv7``; None means K ** -0.5.

    All other arguments, the results and the errors are the same as in ``chunk_dplr_delta_rule``.

    These cases work here and fail in fla: strong decays (exact, in chunks and token by token), K above 256,
    float32, any B * H, checked shapes and cu_seqlens, and CPU tensors. K above 256 runs in plain torch if the
    GPU has too little shared memory.
    """
    check_options(chunk_size, (None, *CHUNK_SIZES), lower_bound)
    request = Request("chunk_rwkv7", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      cp_context=cp_context, process_group=process_group)
    return run_chunked(FAMILY, request, (r, k, v, w, a, b, *NOT_KDA),
                       called={"q": "r", "g": "w", "a": "a", "b": "b"})


@entry
def fused_recurrent_rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
                          scale: float | None = None, initial_state: Tensor | None = None,
                          output_final_state: bool = True, cu_seqlens: Tensor | None = None,
                          **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute RWKV-7 token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.rwkv7.fused_recurrent_rwkv7``. ``chunk_rwkv7`` documents the recurrence.

    Args:
        r: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of r, k, v, a and b follow torch's promotion. With cu_seqlens B is 1 and sequences are packed
            along T.
        w: [B, T, HV, K], natural-log decays, normally <= 0. In RWKV-7 layers they lie between
            -0.607 and 0.
        k: [B, T, H, K], like r.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of r and k.
        a: [B, T, HV, K], the vectors that read the old state, before its decay.
        b: [B, T, HV, K], the vectors that write the values read with a.
        scale: factor on the output; None, the default, means K ** -0.5. (The default of ``chunk_rwkv7`` is 1,
            and RWKV-7 layers pass 1.)
        initial_state: [N, HV, K, V] for N sequences, any float dtype and strides.
        output_final_state: also return the state after each sequence; True by default, as in fla.
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

    These cases work here and fail in fla: the backward pass, any K, checked shapes and cu_seqlens, and CPU
    tensors.
    """
    op = "fused_recurrent_rwkv7"
    return run_recurrent(op, Inputs(r, k, v, gk=w, a=a, b=b, h0=initial_state, bounds=cu_seqlens), (), scale,
                         output_final_state, called={"q": "r", "gk": "w", "a": "a", "b": "b"})


@entry
def fused_mul_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, scale: float = 1.0,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute RWKV-7 token by token from kk and the in-context learning rate a, as its layer does.

    Drop-in for ``fla.ops.rwkv7.fused_mul_recurrent_rwkv7``. It is ``fused_recurrent_rwkv7`` with -kk as a and
    kk * a as b. The product kk * a is computed in float32. Without gradients, a single launch computes the
    product and the recurrence.
    kk: [B, T, HV, K], normally of unit length.
    a: [B, T, HV, K], the in-context learning rate, normally from 0 to 1.
    scale: factor on the output, 1 by default; None means K ** -0.5.
    reverse: run each sequence from its last token to its first.

    All other arguments, the results and the errors are the same as in ``fused_recurrent_rwkv7``.

    Difference from fla: every float tensor gets a gradient, including kk and a. In fla no tensor gets one,
    and no error says so.
    """
    inputs = Inputs(r, k, v, gk=w, a=kk, b=a, h0=initial_state, bounds=cu_seqlens)
    return run_recurrent("fused_mul_recurrent_rwkv7", inputs, flags_of("rate", reverse=reverse), scale,
                         output_final_state, called={"q": "r", "gk": "w", "a": "kk", "b": "a"})


@entry
def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = 1.0,
          initial_state: Tensor | None = None, output_final_state: bool = False,
          cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
          mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute RWKV-7 in the mode that suits the call.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. ``auto`` chooses from T, the need for gradients and the
    GPU; ``flashlin.explain`` prints the reason. All other arguments, and the default of scale, are the same
    as in ``chunk_rwkv7``.
    """
    check_qkv(r, k, v, first="r")
    shared: dict[str, Any] = dict(scale=scale, initial_state=initial_state,
                                  output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    if by_chunks(FAMILY, "rwkv7", mode, (r, k, v, w, a, b, *NOT_KDA), initial_state):
        return chunk_rwkv7(r, w, k, v, a, b, cu_seqlens_cpu=cu_seqlens_cpu, **shared)
    return fused_recurrent_rwkv7(r, w, k, v, a, b, **shared)
