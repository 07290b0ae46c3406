"""The gated delta rule (Gated DeltaNet); mirrors ``fla.ops.gated_delta_rule``.

    S' = e^{g_t} S_{t-1}        u_t = beta_t (v_t - S'^T k_t)        S_t = S' + k_t u_t^T        o_t = scale S_t^T q_t
Source: Yang et al. 2024 (arXiv 2412.06464).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards.tensors import check_floats, check_qkv, need_tensor
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import CHUNK_SIZES, Request, by_chunks, check_options
from flashlin.ops._common.entry import entry
from flashlin.ops._common.preprocess import beta_of_logits, check_gates, decay_of_gate, exact
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.delta_rule import FAMILY, run_delta
from flashlin.ops.simple_gla import v_first


@entry
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    process_group: Any = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, chunk by chunk. Drop-in for ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H (value head j reads q and k of head j // (HV
            / H)). bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as
            torch promotes them. Any strides. With cu_seqlens B is 1 and the sequences are packed along T.
        g: [B, T, HV] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything); with
            use_gate_in_kernel the raw gate instead.
        beta: [B, T, HV]; with use_beta_sigmoid_in_kernel its logits.
        scale: factor on the scores; None means K ** -0.5.
        initial_state: [N, HV, K, V] (N sequences) of any float dtype, [N, HV, V, K] with state_v_first; gets
            a gradient.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: divide q and k by their lengths first, ``x rsqrt(sum x^2 + 1e-6)``.
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta); allow_neg_eigval: twice that.
        use_gate_in_kernel: g is -exp(A_log) softplus(g + dt_bias); A_log [HV], dt_bias [HV] or None. Both get
            gradients.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.
        cu_seqlens_cpu: the same on the host, so that its values can be checked without waiting for the GPU.
        chunk_indices: accepted for compatibility; nothing here needs a table of chunks.
        chunk_size: 16, 32 or 64, accepted for compatibility; the launch table chooses the chunk, which never
            changes the result beyond rounding.
        transpose_state_layout: old name of state_v_first.
        process_group: a group of torch.distributed whose ranks share the sequences: each has its part of T,
            all of one length, in the ranks' order, and all make the same calls. cu_seqlens (read on the host:
            cu_seqlens_cpu saves waiting for it) and initial_state are then those of the whole, the same
            on every rank. Final states, and gradients of what the ranks have in common, are a rank's share:
            those of all ranks add up. ``flashlin.explain(op, ranks=4)`` tells how it runs.
        cp_context: the same as ``fla.ops.cp.build_cp_context`` makes it: it has the edges of this rank's
            sequences, so cu_seqlens is not looked at, and there are no states. Of its layout ``zigzag`` the
            tokens are exchanged before and after.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state in float32 (float64 for float64 tensors), laid out
        like initial_state, or None. cu_seqlens has to cover all rows, else ValueError. Where its values are
        not read (on a GPU outside debug mode, or compiled), rows that it leaves out are zero, as are their
        gradients.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: trains on Hopper with any Triton (fla-org/flash-linear-attention#640), K
    above 256, any B * H, checked cu_seqlens, CPU tensors; the inverse within a chunk is exact for keys that
    resemble each other; and an unknown keyword is an error.
    """
    op = "chunk_gated_delta_rule"
    check_gates(op, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_options(chunk_size, CHUNK_SIZES)
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError(f"{op}: A_log: got None, need a tensor [HV] when use_gate_in_kernel is set")
        check_floats("g", g, "[B, T, HV]", 3)
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                need_tensor(name, x, (g.shape[2],), "[HV]", g.device, "g")
        g = decay_of_gate(exact(g, q, k, v), A_log, dt_bias)
    if use_beta_sigmoid_in_kernel:
        check_floats("beta", beta, "[B, T, HV]")
        beta = beta_of_logits(exact(beta, q, k, v), allow_neg_eigval)
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      v_first(op, state_v_first, transpose_state_layout), cp_context=cp_context,
                      process_group=process_group)
    return run_delta(request, q, k, v, beta, g, l2=use_qk_l2norm_in_kernel)


chunk_gdn = chunk_gated_delta_rule


@entry
def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor,
    g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None, beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    state_indices: Tensor | None = None,
    inplace_state: bool = False,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, token by token: for decoding and short inputs. Drop-in for
    ``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule``, also called ``fused_recurrent_gdn``.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j // (HV
            / H). bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as
            torch promotes them. Any strides. With cu_seqlens B is 1 and the sequences are packed along T.
        g: [B, T, HV]; gk: [B, T, HV, K]; gv: [B, T, HV, V]: natural-log decays, normally <= 0, of the state,
            of its rows, of its columns.
        beta: [B, T, HV], or headwise [B, T, HV, V]; None for ones.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] (N sequences) of any float dtype, [N, HV, V, K] with state_v_first.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: g is raw, and -exp(A_log) softplus(g + dt_bias) is the decay; A_log, dt_bias [HV],
            for that only.
        use_beta_sigmoid_in_kernel: beta is raw, and sigmoid(beta) is meant; twice that with allow_neg_eigval.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.
        transpose_state_layout: old name of state_v_first.
        inplace_state: write the states back to initial_state (each state contiguous) instead of to a new
            tensor. Without gradients only.
        state_indices: [N] int32 or int64 on q's device: initial_state is a pool of P states, [P, HV, K, V] or
            [P, HV, V, K], and sequence n reads and overwrites the one at state_indices[n]. A negative entry,
            or one outside the pool where its value is not looked at, skips its sequence: its outputs are
            zeros and no state changes. No two sequences may share a state. Without gradients only.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state in float32 (float64 for float64 tensors), laid out
        like initial_state, or None; with inplace_state or state_indices it is initial_state itself.
        cu_seqlens has to cover all rows, else ValueError. Where its values are not read (on a GPU outside
        debug mode, or compiled), rows that it leaves out are zero, as are their gradients. Without gradients
        all of it is one launch.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: has a backward (q, k, v, g, gk, gv, beta, A_log, dt_bias and
    initial_state get gradients, through o and through the final state), checks its arguments, and an unknown
    keyword is an error.
    """
    op = "fused_recurrent_gated_delta_rule"
    check_gates(op, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_gate_in_kernel and (g is None or A_log is None):
        raise ValueError(f"{op}: {'g' if g is None else 'A_log'}: got None, need a tensor with "
                         "use_gate_in_kernel")
    if use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError(f"{op}: beta: got None, need a tensor with use_beta_sigmoid_in_kernel")
    flags = flags_of("delta", use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                     use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
                     state_v_first=v_first(op, state_v_first, transpose_state_layout))
    inputs = Inputs(q, k, v, beta, g, None, gk, gv, A_log=A_log, dt_bias=dt_bias, h0=initial_state,
                    bounds=cu_seqlens)
    return run_recurrent(op, inputs, flags, scale, output_final_state, state_indices, inplace_state)


fused_recurrent_gdn = fused_recurrent_gated_delta_rule


@entry
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    mode: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in the mode that suits the call: ``auto`` decides from T, gradients and the GPU,
    and ``flashlin.explain`` says why.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. The rest as ``chunk_gated_delta_rule``.
    """
    check_qkv(q, k, v, grouped=True)
    shared: dict[str, Any] = dict(
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log, dt_bias=dt_bias)
    if by_chunks(FAMILY, "gated_delta_rule", mode, (q, k, v, beta, g, None), initial_state,
                         A_log, dt_bias):
        return chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens_cpu=cu_seqlens_cpu, **shared)
    return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **shared)
