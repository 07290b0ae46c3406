"""The delta rule; mirrors ``fla.ops.delta_rule``.

    u_t = beta_t (v_t - S_{t-1}^T k_t)        S_t = S_{t-1} + k_t u_t^T        o_t = scale S_t^T q_t
Source: Schlag et al. 2021 (fast weight programmers); Yang et al. 2024 (DeltaNet).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards.tensors import no_unknown
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops import recurrent


def fused_recurrent_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None,
                               initial_state: Tensor | None = None, output_final_state: bool = False,
                               use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, *, state_v_first: bool = False,
                               state_indices: Tensor | None = None, inplace_state: bool = False,
                               **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """The delta rule, token by token: for decoding and short inputs. Drop-in for ``fla.ops.delta_rule.fused_recurrent_delta_rule``.

    Arguments, returns and errors as ``fused_recurrent_gated_delta_rule``, without its decays, gate and sigmoid. beta: [B, T, HV], or
    headwise [B, T, HV, V]; None for ones. Everything that is a tensor of floats gets a gradient, through o and through the final state.

    Differs from fla where fla fails: the gradient of a headwise beta is right for any V, a strided initial_state keeps its gradient.
    """
    no_unknown("fused_recurrent_delta_rule", unknown)
    flags = ("delta", *(["l2norm"] if use_qk_l2norm_in_kernel else []), *(["v_first"] if state_v_first else []))
    return recurrent.run("fused_recurrent_delta_rule", Inputs(q, k, v, beta, h0=initial_state, bounds=cu_seqlens), flags, scale,
                         output_final_state, state_indices, inplace_state)
