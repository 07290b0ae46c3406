"""RWKV-7, whose state takes back what a key has stored before it stores anew; mirrors ``fla.ops.rwkv7``.

    S_t = Diag(e^{w_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T r_t
The layer passes a = -kk and b = kk * (in-context learning rate), with kk of unit length. It is the DPLR delta
rule in other words. Source: Peng et al. 2025 (arXiv 2503.14456).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards.tensors import check_qkv
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import CHUNK_SIZES, Request, by_chunks, check_options, run_chunked
from flashlin.ops._common.entry import entry
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.dplr_delta_rule import FAMILY


@entry
def chunk_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
    *,
    process_group: Any = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7, chunk by chunk. Drop-in for ``fla.ops.rwkv7.chunk_rwkv7``.

    r, k, a, b: [B, T, H, K]; v: [B, T, H, V]. w: [B, T, H, K] natural-log decays, normally <= 0 (the layer's
    lie in -0.607 .. 0), as strong as you like. scale: 1 by default, unlike ``fused_recurrent_rwkv7``; None
    means K ** -0.5. The rest, returns and errors as ``chunk_dplr_delta_rule``.

    Differs from fla where fla fails: strong decays are exact in every mode, K above 256 (in plain torch where
    the card has too little shared memory), float32, any B * H, checked shapes and cu_seqlens, CPU tensors.
    """
    check_options(chunk_size, (None, *CHUNK_SIZES), lower_bound)
    request = Request("chunk_rwkv7", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      cp_context=cp_context, process_group=process_group)
    return run_chunked(FAMILY, request, (r, k, v, w, a, b, None),
                       called={"q": "r", "g": "w", "a": "a", "b": "b"})


@entry
def fused_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7, token by token: for decoding and short inputs. Drop-in for
    ``fla.ops.rwkv7.fused_recurrent_rwkv7``.

    Args:
        r, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head j reads r and k of head j // (HV
            / H). bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as
            torch promotes them. Any strides. With cu_seqlens B is 1 and the sequences are packed along T.
        w: [B, T, HV, K] natural-log decays, normally <= 0 (the layer's lie in -0.607 .. 0).
        a, b: [B, T, HV, K]: what the old state is read with, before it decays, and where that is written.
        scale: factor on the output; None means K ** -0.5, unlike ``chunk_rwkv7``, whose default is 1. (The
            layer passes 1.)
        initial_state: [N, HV, K, V] (N sequences) of any float dtype and strides.
        output_final_state: also return the state after each sequence; the default is True, as in fla.
        cu_seqlens: [N + 1] int32 or int64 on r's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64
        tensors), or None. cu_seqlens has to cover all rows, else ValueError. Where its values are not read
        (on a GPU outside debug mode, or compiled), rows that it leaves out are zero, as are their gradients.
        Everything that is a tensor of floats gets a gradient, through o and through the final state.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: has a backward, any K, checked shapes and cu_seqlens, CPU tensors.
    """
    op = "fused_recurrent_rwkv7"
    return run_recurrent(op, Inputs(r, k, v, gk=w, a=a, b=b, h0=initial_state, bounds=cu_seqlens), (), scale,
                         output_final_state, called={"q": "r", "gk": "w", "a": "a", "b": "b"})


@entry
def fused_mul_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7 as its layer has it, token by token: ``fused_recurrent_rwkv7`` with -kk for a and kk * a for b,
    multiplied in float32 and, without gradients, inside the one launch. Drop-in for
    ``fla.ops.rwkv7.fused_mul_recurrent_rwkv7``.

    kk: [B, T, HV, K], normally of unit length. a: [B, T, HV, K], the in-context learning rate, normally in 0
    .. 1. scale: 1 by default, None means K ** -0.5. reverse: run each sequence from its last token to its
    first. The rest, returns and errors as ``fused_recurrent_rwkv7``.

    Differs from fla where fla fails: there nothing gets a gradient, without a word; here everything does, kk
    and a included.
    """
    inputs = Inputs(r, k, v, gk=w, a=kk, b=a, h0=initial_state, bounds=cu_seqlens)
    return run_recurrent("fused_mul_recurrent_rwkv7", inputs, flags_of("rate", reverse=reverse), scale,
                         output_final_state, called={"q": "r", "gk": "w", "a": "kk", "b": "a"})


@entry
def rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    mode: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7 in the mode that suits the call: ``auto`` decides from T, gradients and the GPU, and
    ``flashlin.explain`` says why.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. The rest, and the scale's default, as ``chunk_rwkv7``.
    """
    check_qkv(r, k, v, first="r")
    shared: dict[str, Any] = dict(scale=scale, initial_state=initial_state,
                                  output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    if by_chunks(FAMILY, "rwkv7", mode, (r, k, v, w, a, b, None), initial_state):
        return chunk_rwkv7(r, w, k, v, a, b, cu_seqlens_cpu=cu_seqlens_cpu, **shared)
    return fused_recurrent_rwkv7(r, w, k, v, a, b, **shared)
