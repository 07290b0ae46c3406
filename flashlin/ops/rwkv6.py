"""RWKV-6: a decay for each key channel, and a bonus for the token that is being read; mirrors ``fla.ops.rwkv6``.

    o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T r_t        S_t = Diag(e^{w_t}) S_{t-1} + k_t v_t^T
Source: Peng et al. 2024 (arXiv 2404.05892).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards.tensors import no_unknown
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops import recurrent

CALLED = {"q": "r", "gk": "w", "bonus": "u"}


def fused_recurrent_rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
                          initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
                          cu_seqlens: Tensor | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """RWKV-6, token by token: for decoding and short inputs. Drop-in for ``fla.ops.rwkv6.fused_recurrent_rwkv6``.

    Args:
        r, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head j reads r and k of head j // (HV / H). bfloat16, float16,
            float32 (float64 runs in plain torch). Different dtypes are promoted as torch promotes them. Any strides. With cu_seqlens B is 1
            and the sequences are packed along T.
        w: [B, T, HV, K] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything).
        u: [HV, K], the bonus of the current token, which is read before it is in the state.
        scale: factor on the output; None means K ** -0.5. (The layer passes 1.)
        initial_state: [N, HV, K, V] (N sequences) of any float dtype and strides.
        output_final_state: also return the state after each sequence.
        reverse: run each sequence from its last token to its first.
        cu_seqlens: [N + 1] int32 or int64 on r's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n + 1]. Empty ones are fine.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64 tensors), or None. Rows that
        cu_seqlens does not cover are zero, as are their gradients. Everything that is a tensor of floats gets a gradient, through o and
        through the final state.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot run the call.

    Differs from fla where fla fails: there the gradient of the final state is dropped without a word, so k, v, w and initial_state get
    wrong ones wherever the loss depends on it; shapes and cu_seqlens are checked, CPU tensors work.
    """
    no_unknown("fused_recurrent_rwkv6", unknown)
    flags = ("before", "reverse") if reverse else ("before",)
    return recurrent.run("fused_recurrent_rwkv6", Inputs(r, k, v, gk=w, bonus=u, h0=initial_state, bounds=cu_seqlens), flags, scale,
                         output_final_state, called=CALLED)
