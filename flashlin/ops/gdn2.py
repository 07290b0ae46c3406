"""Gated DeltaNet 2: Kimi Delta Attention that erases at a rate for each key channel and writes at one for
each value channel; mirrors ``fla.ops.gdn2``.

    S' = Diag(e^{g_t}) S_{t-1}        S_t = S' + k_t (w_t v_t - S'^T (b_t k_t))^T        o_t = scale S_t^T q_t
With b = w = beta it is Kimi Delta Attention. Source: Hatamizadeh et al. 2026 (arXiv 2605.22791). Chunk by
chunk it runs Kimi Delta Attention's kernels, of w v and with b in the place of beta. Token by token it is one
launch, or, where gradients are wanted, composed: the DPLR delta rule (dplr_delta_rule.py), which reads the
state before it decays, so with -b k e^g there.
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
def chunk_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False, return_intermediate_states: bool = False, state_v_first: bool = False,
    cp_context: Any = None,
    *,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    process_group: Any = None,
    **unknown: Any,
) -> Any:
    """Gated DeltaNet 2, chunk by chunk. Drop-in for ``fla.ops.gdn2.chunk_gdn2``. Runs Kimi Delta Attention's
    kernels on w v, with b in the place of beta.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j // (HV
            / H). bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as
            torch promotes them. Any strides. With cu_seqlens B is 1 and the sequences are packed along T.
        g: [B, T, HV, K] natural-log decays, normally <= 0, as strong as you like; with use_gate_in_kernel the
            raw gate instead.
        b: [B, T, HV, K], how much of what k reads is erased, normally in 0 .. 2; w: [B, T, HV, V], how much
            of v is written, normally in 0 .. 1. Any float dtype.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] (N sequences) of any float dtype, [N, HV, V, K] with state_v_first; gets
            a gradient.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: the decay is -exp(A_log) softplus(g + dt_bias), or with a lower_bound lower_bound
            sigmoid(exp(A_log) (g + dt_bias)). A_log: HV elements, or with a lower_bound None for a factor of
            1; dt_bias: HV * K elements or None. Both get gradients.
        lower_bound: below 0. safe_gate: with use_gate_in_kernel it wants a lower_bound of -5 or more, as in
            fla; nothing here depends on it.
        return_intermediate_states: also return the states that enter each chunk of 64 tokens. Only under
            torch.inference_mode(); it then goes chunk by chunk on the host, and with cu_seqlens waits for its
            values.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.
        cu_seqlens_cpu: the same on the host, so that its values can be checked without waiting for the GPU.
        cp_context, process_group: ranks that share the sequences, as in ``chunk_gated_delta_rule``.
        chunk_size: only 64, as in fla; the launch table chooses the chunk, which never changes the result
            beyond rounding. disable_recompute: accepted for compatibility: backward always recomputes.
        transpose_state_layout: old name of state_v_first.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state in float32 (float64 for float64 tensors), laid out
        like initial_state, or None; with return_intermediate_states also h [B, chunks, HV, K, V] in k's
        dtype, as ``chunk_kda``. cu_seqlens has to cover all rows, else ValueError. Where its values are not
        read (on a GPU outside debug mode, or compiled), rows that it leaves out are zero, as are their
        gradients.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: strong decays are exact without safe_gate, several value heads to a
    head, K above 256, any B * H, states of any float dtype, checked cu_seqlens, CPU tensors, torch.compile,
    and an unknown keyword is an error, as is A_log or dt_bias that nothing would read.
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
    # weighted in at least float32 (torch multiplies 16 bits so), then rounded like v; a float32 b must not
    # make q, k and v float32
    v, b = (w * v).to(v.dtype), b.to(common_dtype(q, k, v))
    return run_kda(request, q, k, v, g, gate, b=b, l2=use_qk_l2norm_in_kernel,
                   chunk=chunk_size if return_intermediate_states else None)


@entry
def fused_recurrent_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet 2, token by token: for decoding and short inputs. Drop-in for
    ``fla.ops.gdn2.fused_recurrent_gdn2``.

    Arguments, returns and errors as ``chunk_gdn2``. Without gradients all of it is one launch, the gate
    included; with gradients gates, norms and rates come first, in torch.

    Differs from fla where fla fails: there nothing gets a gradient, without a word; here everything does,
    through o and through the final state. A gate without A_log and without a lower_bound is an error (fla
    takes e for exp(A_log) there, and refuses it chunk by chunk), and so is an unknown keyword.
    """
    op = "fused_recurrent_gdn2"
    if use_gate_in_kernel is True:  # whose parameters go by g's shape; what is no bool is refused below
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
    """Return the gate as KDA has it, which needs an A_log or a bound here."""
    check_gates(op, inside, A_log, dt_bias, False, False)
    if inside and A_log is None and bound is None:
        raise ValueError(f"{op}: A_log: got None, need a tensor [HV] with use_gate_in_kernel and without "
                         "lower_bound")
    return gate_of(g, inside, A_log, dt_bias, bound, safe)
