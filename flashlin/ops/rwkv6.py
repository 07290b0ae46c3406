"""RWKV-6: a decay for each key channel, and a bonus for the token that is being read; mirrors
``fla.ops.rwkv6``.

    o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T r_t        S_t = Diag(e^{w_t}) S_{t-1} + k_t v_t^T
Source: Peng et al. 2024 (arXiv 2404.05892). The chunked kernels are those of gated linear attention
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
def chunk_rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
    *,
    cp_context: Any = None, process_group: Any = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-6, chunk by chunk. Drop-in for ``fla.ops.rwkv6.chunk_rwkv6``.

    Args:
        r, k: [B, T, H, K]; v: [B, T, H, V]. bfloat16, float16, float32 (float64 runs in plain torch).
            Different dtypes are promoted as torch promotes them. Any strides. With cu_seqlens B is 1 and the
            sequences are packed along T.
        w: [B, T, H, K] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything);
            gets a gradient.
        u: [H, K], the bonus of the current token, which is read before it is in the state; gets a gradient.
        scale: factor on the output; None means K ** -0.5. (The layer passes 1.)
        initial_state: [N, H, K, V] (N sequences) of any float dtype; gets a gradient.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on r's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.
        cu_seqlens_cpu: the same on the host, so that its values can be checked without waiting for the GPU.
        chunk_size: accepted for compatibility (a power of two, 16 or more); the launch table chooses the
            chunk, which never changes the result beyond rounding.
        cp_context, process_group: ranks that share the sequences, as in ``chunk_gated_delta_rule``.

    Returns:
        o [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in float32 (float64 for float64
        tensors), or None. cu_seqlens has to cover all rows, else ValueError. Where its values are not read
        (on a GPU outside debug mode, or compiled), rows that it leaves out are zero, as are their gradients.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: any B * H, cu_seqlens that do not cover the tensor are an error instead
    of an illegal memory access, k of fewer heads than r is one at the call instead of in backward, CPU
    tensors work, and an unknown keyword is an error.
    """
    check_chunk_size(chunk_size)
    request = Request("chunk_rwkv6", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      cp_context=cp_context, process_group=process_group)
    return run_chunked(FAMILY, request, (r, k, v, w, u), called={"q": "r", "g": "w", "u": "u"})


@entry
def fused_recurrent_rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-6, token by token: for decoding and short inputs. Drop-in for
    ``fla.ops.rwkv6.fused_recurrent_rwkv6``.

    Args:
        r, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head j reads r and k of head j // (HV
            / H). bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as
            torch promotes them. Any strides. With cu_seqlens B is 1 and the sequences are packed along T.
        w: [B, T, HV, K] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything).
        u: [HV, K], the bonus of the current token, which is read before it is in the state.
        scale: factor on the output; None means K ** -0.5. (The layer passes 1.)
        initial_state: [N, HV, K, V] (N sequences) of any float dtype and strides.
        output_final_state: also return the state after each sequence.
        reverse: run each sequence from its last token to its first.
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

    Differs from fla where fla fails: there the gradient of the final state is dropped without a word, so k,
    v, w and initial_state get wrong ones wherever the loss depends on it; shapes and cu_seqlens are checked,
    CPU tensors work.
    """
    inputs = Inputs(r, k, v, gk=w, bonus=u, h0=initial_state, bounds=cu_seqlens)
    return run_recurrent("fused_recurrent_rwkv6", inputs, flags_of("before", reverse=reverse), scale,
                         output_final_state, called={"q": "r", "gk": "w", "bonus": "u"})


@entry
def rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    mode: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """RWKV-6 in the mode that suits the call: ``auto`` decides from T, gradients and the GPU, and
    ``flashlin.explain`` says why.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. The rest as ``chunk_rwkv6``.
    """
    check_qkv(r, k, v, first="r")
    need_tensor("u", u, tuple(r.shape[2:]), "[H, K]", r.device, "r")
    need_tensor("w", w, tuple(r.shape), "[B, T, H, K]", r.device, "r")
    shared: dict[str, Any] = dict(scale=scale, initial_state=initial_state,
                                  output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    if by_chunks(FAMILY, "rwkv6", mode, (r, k, v, w, u), initial_state):
        return chunk_rwkv6(r, k, v, w, u, cu_seqlens_cpu=cu_seqlens_cpu, **shared)
    return fused_recurrent_rwkv6(r, k, v, w, u, **shared)
