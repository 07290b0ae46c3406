"""The gated delta rule; mirrors ``fla.ops.gated_delta_rule``.

    P_t = e^{g_t} S_{t-1}        u_t = beta_t (v_t - P_t^T k_t)        S_t = P_t + k_t u_t^T        o_t = scale S_t^T q_t
Source: Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards.tensors import no_unknown
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops import recurrent
from flashlin.ops.simple_gla import v_first


def fused_recurrent_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None,
                                     gv: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
                                     initial_state: Tensor | None = None, output_final_state: bool = False,
                                     use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
                                     dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
                                     state_v_first: bool = False, cu_seqlens: Tensor | None = None, *,
                                     transpose_state_layout: bool | None = None, state_indices: Tensor | None = None,
                                     inplace_state: bool = False, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, token by token: for decoding and short inputs. Drop-in for
    ``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule``, also called ``fused_recurrent_gdn``.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j // (HV / H). bfloat16, float16,
            float32 (float64 runs in plain torch). Different dtypes are promoted as torch promotes them. Any strides. With cu_seqlens B is 1
            and the sequences are packed along T.
        g: [B, T, HV]; gk: [B, T, HV, K]; gv: [B, T, HV, V]: natural-log decays, normally <= 0, of the state, of its rows, of its columns.
        beta: [B, T, HV], or headwise [B, T, HV, V]; None for ones.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] (N sequences) of any float dtype, [N, HV, V, K] with state_v_first.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: g is raw, and -exp(A_log) softplus(g + dt_bias) is the decay; A_log, dt_bias [HV], used only then.
        use_beta_sigmoid_in_kernel: beta is raw, and sigmoid(beta) is meant; twice that with allow_neg_eigval.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n + 1]. Empty ones are fine.
        transpose_state_layout: old name of state_v_first.
        inplace_state: write the states back to initial_state (each state contiguous) instead of to a new tensor. Without gradients only.
        state_indices: [N] int32 or int64 on q's device: initial_state is a pool of P states, [P, HV, K, V] or [P, HV, V, K], and sequence n
            reads and overwrites the one at state_indices[n]. A negative entry, or one outside the pool where its value is not looked at,
            skips its sequence: its outputs are zeros and no state changes. No two sequences may share a state. Without gradients only.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state in float32 (float64 for float64 tensors), laid out like initial_state, or None;
        with inplace_state or state_indices it is initial_state itself. Rows that cu_seqlens does not cover are zero, as are their gradients.
        Without gradients all of it is one launch.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot run the call.

    Differs from fla where fla fails: has a backward (q, k, v, g, gk, gv, beta, A_log, dt_bias and initial_state get gradients, through o and
    through the final state), checks its arguments, and an unknown keyword is an error.
    """
    op = "fused_recurrent_gated_delta_rule"
    no_unknown(op, unknown)
    if use_gate_in_kernel:
        if g is None or A_log is None:
            raise ValueError(f"{'g' if g is None else 'A_log'}: got None, need a tensor with use_gate_in_kernel")
    else:
        A_log = dt_bias = None
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: got True, need use_beta_sigmoid_in_kernel with it (else double beta yourself)")
    if use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError("beta: got None, need a tensor with use_beta_sigmoid_in_kernel")
    asked = {"delta": True, "l2norm": use_qk_l2norm_in_kernel, "sigmoid": use_beta_sigmoid_in_kernel, "neg_eigval": allow_neg_eigval,
             "v_first": v_first(op, state_v_first, transpose_state_layout)}
    x = Inputs(q, k, v, beta, g, None, gk, gv, A_log=A_log, dt_bias=dt_bias, h0=initial_state, bounds=cu_seqlens)
    return recurrent.run(op, x, tuple(flag for flag, on in asked.items() if on), scale, output_final_state, state_indices, inplace_state)


fused_recurrent_gdn = fused_recurrent_gated_delta_rule
