"""Kimi Delta Attention: the gated delta rule with a decay for each key channel; mirrors ``fla.ops.kda``.

    S' = Diag(e^{g_t}) S_{t-1}        u_t = beta_t (v_t - S'^T k_t)        S_t = S' + k_t u_t^T        o_t = scale S_t^T q_t
Source: Kimi Team 2025 (arXiv 2510.26692).
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin.guards.tensors import no_unknown
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops import recurrent
from flashlin.ops.pointwise import check_parameter
from flashlin.ops.simple_gla import v_first


def fused_recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
                        scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
                        use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
                        allow_neg_eigval: bool = False, lower_bound: float | None = None, state_v_first: bool = False,
                        cu_seqlens: Tensor | None = None, *, transpose_state_layout: bool | None = None, state_indices: Tensor | None = None,
                        inplace_state: bool = False, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, token by token: for decoding and short inputs. Drop-in for ``fla.ops.kda.fused_recurrent_kda``.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j // (HV / H). bfloat16, float16,
            float32 (float64 runs in plain torch). Different dtypes are promoted as torch promotes them. Any strides. With cu_seqlens B is 1
            and the sequences are packed along T.
        g: [B, T, HV, K] natural-log decays, normally <= 0; with use_gate_in_kernel the raw gate instead.
        beta: [B, T, HV], or headwise [B, T, HV, V]; with use_beta_sigmoid_in_kernel its logits.
        A_log: HV elements, None for a factor of 1; dt_bias: HV * K elements or None. For use_gate_in_kernel only.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] (N sequences) of any float dtype and strides, [N, HV, V, K] with state_v_first.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: the decay is -exp(A_log) softplus(g + dt_bias), or with a lower_bound lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta); allow_neg_eigval: twice that.
        lower_bound: below 0. Without use_gate_in_kernel it promises something about g that nothing here needs.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n + 1]. Empty ones are fine.
        transpose_state_layout: old name of state_v_first.
        inplace_state, state_indices: states that are overwritten and pools of states, as in ``fused_recurrent_gated_delta_rule``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state in float32 (float64 for float64 tensors), laid out like initial_state, or None;
        with inplace_state or state_indices it is initial_state itself. Rows that cu_seqlens does not cover are zero, as are their gradients.
        Without gradients all of it is one launch, the gate included.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot run the call.

    Differs from fla where fla fails: there nothing gets a gradient, without a word; here q, k, v, g, beta, A_log, dt_bias and initial_state do,
    through o and through the final state. An unknown keyword is an error, and so is A_log or dt_bias that nothing would read.
    """
    op = "fused_recurrent_kda"
    no_unknown(op, unknown)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound: got {lower_bound}, need a number below 0, or None")
    if use_gate_in_kernel:
        A_log, dt_bias = gate_parameters(g, A_log, dt_bias)
    elif A_log is not None or dt_bias is not None:
        raise ValueError(f"{op}: got {'dt_bias' if A_log is None else 'A_log'} without use_gate_in_kernel, which alone reads it")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(f"{op}: got allow_neg_eigval without use_beta_sigmoid_in_kernel, need both (or a beta in 0 .. 2)")
    bounded = use_gate_in_kernel and lower_bound is not None
    asked = {"delta": True, "l2norm": use_qk_l2norm_in_kernel, f"bound:{lower_bound}": bounded, "sigmoid": use_beta_sigmoid_in_kernel,
             "neg_eigval": allow_neg_eigval, "v_first": v_first(op, state_v_first, transpose_state_layout)}
    inputs = Inputs(q, k, v, beta, gk=g, A_log=A_log, dt_bias=dt_bias, h0=initial_state, bounds=cu_seqlens)
    return recurrent.run(op, inputs, tuple(flag for flag, on in asked.items() if on), scale, output_final_state, state_indices, inplace_state,
                         {"gk": "g", "beta": "beta"})


def gate_parameters(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A_log [HV], zeros for None, and dt_bias [HV, K] or None."""
    if not isinstance(g, Tensor) or g.ndim != 4:
        raise ValueError("g: need a tensor of shape [B, T, HV, K]")
    HV, K = g.shape[2:]
    for name, x, count, meaning in (("A_log", A_log, HV, "HV"), ("dt_bias", dt_bias, HV * K, "HV * K")):
        if x is not None:
            check_parameter(name, x, count, meaning, "g", g)
    return torch.zeros(HV, device=g.device) if A_log is None else A_log.reshape(HV), None if dt_bias is None else dt_bias.reshape(HV, K)
