"""Gated DeltaNet 2: Kimi Delta Attention with separate rates for erasing and writing.

Mirrors ``fla.ops.gdn2``. b erases at one rate for each key channel, and w writes at one rate for each value
channel:

    S' = Diag(e^{g_t}) S_{t-1}        S_t = S' + k_t (w_t v_t - S'^T (b_t k_t))^T        o_t = scale S_t^T q_t

With b = w = beta it is Kimi Delta Attention. Source: Hatamizadeh et al. 2026 (arXiv 2605.22791).

The chunked op runs the kernels of Kimi Delta Attention with w v as v and b in place of beta. Without
gradients, the recurrent op is one launch. With gradients it runs the DPLR delta rule (dplr_delta_rule.py)
with a = -b k e^g, because DPLR reads the state before the decay.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import check_qkv, need_tensor
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.casting import common_dtype
from flashlin.ops._common.chunked import Request, check_options
from flashlin.ops._common.entry import entry
from flashlin.ops._common.preprocess import check_gates
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.kda import Gate, gate_of, run_kda
from flashlin.ops.simple_gla import v_first


@entry
def chunk_gdn2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, scale: float | None = None,
               initial_state: Tensor | None = None, output_final_state: bool = False,
               use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
               cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
               safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
               return_intermediate_states: bool = False, state_v_first: bool = False, cp_context: Any = None,
               *, A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64,
               transpose_state_layout: bool | None = None, process_group: Any = None, **unknown: Any) -> Any:
    """Compute Gated DeltaNet 2 chunk by chunk.

    Drop-in for ``fla.ops.gdn2.chunk_gdn2``. It runs the kernels of Kimi Delta Attention with w v as v and b
    in place of beta. The recurrence is

        S' = Diag(e^{g_t}) S_{t-1}        S_t = S' + k_t (w_t v_t - S'^T (b_t k_t))^T
        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like q.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of q and k.
        g: [B, T, HV, K], natural-log decays, normally <= 0, of any strength. With use_gate_in_kernel it is
            the raw gate.
        b: [B, T, HV, K], any float dtype: the rates at which the values read with k are erased, normally from
            0 to 2.
        w: [B, T, HV, V], any float dtype: the rates at which v is written, normally from 0 to 1.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] for N sequences, any float dtype; gets a gradient. With state_v_first it
            is [N, HV, V, K].
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: first normalize q and k: x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: use -exp(A_log) softplus(g + dt_bias) as the log decay. With a lower_bound it is
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        safe_gate: with use_gate_in_kernel it requires a lower_bound of -5 or more, as in fla. It has no other
            effect.
        lower_bound: the lowest log decay of the gate, below 0, or None.
        disable_recompute: accepted for compatibility; backward always recomputes.
        return_intermediate_states: also return the states that enter each chunk of 64 tokens. Only allowed
            under torch.inference_mode(). The host then loops over the chunks, and with cu_seqlens it waits
            for the values.
        state_v_first: store the initial and final states as [N, HV, V, K].
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``.
        A_log: HV elements, for use_gate_in_kernel; gets a gradient. With a lower_bound it may be None, for a
            factor of 1.
        dt_bias: HV * K elements or None, for use_gate_in_kernel; gets a gradient.
        chunk_size: only 64, as in fla. The launch table chooses the chunk size, which changes the result only
            by rounding.
        transpose_state_layout: the old name of state_v_first.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64 tensors), in
        the layout of initial_state, or None. With return_intermediate_states also h [B, chunks, HV, K, V] in
        the dtype of k, as in ``chunk_kda``. cu_seqlens must cover all rows, else ValueError. The values are
        not checked in compiled code, nor on a GPU outside debug mode. Without the check, rows outside all
        sequences and their gradients are zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: strong decays (exact without safe_gate), HV above H, K above 256,
    any B * H, states of any float dtype, checked cu_seqlens, CPU tensors and torch.compile. An unknown
    keyword is an error, and so is A_log or dt_bias if the call does not use it.
    """
    op = "chunk_gdn2"
    scalars.flags(safe_gate=safe_gate, return_intermediate_states=return_intermediate_states)
    check_options(chunk_size, (64,))
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      v_first(op, state_v_first, transpose_state_layout), cp_context=cp_context,
                      process_group=process_group)
    scalars.flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    check_qkv(q, k, v, grouped=True)
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    for name, y in (("g", g), ("b", b)):
        need_tensor(name, y, (B, T, HV, K), "[B, T, HV, K]", q.device)
    need_tensor("w", w, (B, T, HV, V), "[B, T, HV, V]", q.device)
    gate = _gate_of(op, g, use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate)
    # torch multiplies 16-bit tensors in float32, and the product is rounded to the dtype of v. A float32 b
    # must not make q, k and v float32.
    v, b = (w * v).to(v.dtype), b.to(common_dtype(q, k, v))
    return run_kda(request, q, k, v, g, gate, b=b, l2=use_qk_l2norm_in_kernel,
                   chunk=chunk_size if return_intermediate_states else None)


@entry
def fused_recurrent_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    lower_bound: float | None = None, state_v_first: bool = False, cu_seqlens: Tensor | None = None, *,
    transpose_state_layout: bool | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute Gated DeltaNet 2 token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.gdn2.fused_recurrent_gdn2``. The arguments, results and errors are the same as in
    ``chunk_gdn2``. A call without gradients is one launch, which includes the gate. With gradients, torch
    first computes gates, norms and rates.

    Differences from fla: every float tensor gets a gradient, through o and through the final state. In fla no
    tensor gets one, and no error says so. A gate without A_log and without lower_bound is an error. fla uses
    e in place of exp(A_log) in that case, and its chunked op refuses it. An unknown keyword is an error.
    """
    op = "fused_recurrent_gdn2"
    # Check g first, because the shapes of the gate's parameters depend on it. The test is ``is True`` because
    # ``flags_of`` refuses a value that is not a bool.
    if use_gate_in_kernel is True:
        check_qkv(q, k, v, grouped=True)
        need_tensor("g", g, (*v.shape[:3], q.shape[3]), "[B, T, HV, K]", q.device)
    A_log, dt_bias, bound = _gate_of(op, g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    flags = flags_of("delta", "erase", bound=bound, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                     state_v_first=v_first(op, state_v_first, transpose_state_layout))
    inputs = Inputs(q, k, v, w, gk=g, a=b, A_log=A_log, dt_bias=dt_bias, h0=initial_state, bounds=cu_seqlens)
    return run_recurrent(op, inputs, flags, scale, output_final_state,
                         called={"gk": "g", "a": "b", "beta": "w"})


def _gate_of(op: str, g: Tensor, inside: bool, A_log: Tensor | None, dt_bias: Tensor | None,
             bound: float | None, safe: bool = False) -> Gate:
    """Check the gate parameters and return them as ``kda.gate_of`` does: (A_log, dt_bias, lower bound).

    Unlike in ``kda.gate_of``, a gate needs an A_log or a lower bound.
    """
    check_gates(op, inside, A_log, dt_bias, False, False)
    if inside and A_log is None and bound is None:
        raise ValueError(f"{op}: A_log: got None, need a tensor [HV] with use_gate_in_kernel and without "
                         "lower_bound")
    return gate_of(g, inside, A_log, dt_bias, bound, safe)
