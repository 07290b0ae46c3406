"""The gated delta rule (Gated DeltaNet); mirrors ``fla.ops.gated_delta_rule``.

    S' = e^{g_t} S_{t-1}        u_t = beta_t (v_t - S'^T k_t)        S_t = S' + k_t u_t^T        o_t = scale
    S_t^T q_t

Source: Yang et al. 2024 (arXiv 2412.06464).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards.tensors import check_floats, check_qkv, need_tensor
from flashlin.kernels.pointwise.torch_path import gate
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import CHUNK_SIZES, Request, by_chunks, check_options
from flashlin.ops._common.entry import entry
from flashlin.ops._common.preprocess import beta_of_logits, check_gates, exact
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.delta_rule import FAMILY, run_delta
from flashlin.ops.simple_gla import v_first


@entry
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None, cp_context: Any = None, *,
    use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int = 64, transpose_state_layout: bool | None = None, process_group: Any = None,
    **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule chunk by chunk.

    Drop-in for ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``. The recurrence is

        S' = e^{g_t} S_{t-1}        u_t = beta_t (v_t - S'^T k_t)        S_t = S' + k_t u_t^T
        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like q.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of q and k.
        g: [B, T, HV], natural-log decays, normally <= 0, of any strength (-inf forgets everything). With
            use_gate_in_kernel it is the raw gate.
        beta: [B, T, HV], or its logits with use_beta_sigmoid_in_kernel.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] for N sequences, any float dtype; gets a gradient. With state_v_first it
            is [N, HV, V, K].
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: first normalize q and k: ``x rsqrt(sum x^2 + 1e-6)``.
        use_beta_sigmoid_in_kernel: use sigmoid(beta) in place of beta.
        allow_neg_eigval: use 2 sigmoid(beta) in place of sigmoid(beta).
        state_v_first: store the initial and final states as [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        chunk_indices: accepted for compatibility; flashlin needs no table of chunks.
        cp_context: the result of ``fla.ops.cp.build_cp_context``, an alternative to process_group. It
            contains the bounds of this rank's sequences, so cu_seqlens is not read. initial_state and
            output_final_state are errors with it. With its layout ``zigzag`` the ranks exchange the tokens
            before and after the computation.
        use_gate_in_kernel: use -exp(A_log) softplus(g + dt_bias) as the log decay.
        A_log: [HV], required by use_gate_in_kernel; gets a gradient.
        dt_bias: [HV] or None, for use_gate_in_kernel; gets a gradient.
        chunk_size: 16, 32 or 64, accepted for compatibility. The launch table chooses the chunk size, which
            changes the result only by rounding.
        transpose_state_layout: the old name of state_v_first.
        process_group: a torch.distributed group whose ranks share the sequences. Each rank has one segment of
            T; all segments have the same length and follow the order of the ranks. All ranks make the same
            calls. cu_seqlens and initial_state describe the whole sequences and are the same on every rank.
            The host reads cu_seqlens, which waits for the GPU; cu_seqlens_cpu avoids the wait. Each rank
            returns its own contribution to the final states and to the gradients of shared tensors; the sum
            over all ranks is the total. ``flashlin.explain(op, ranks=4)`` shows how such a call runs.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64 tensors), in
        the layout of initial_state, or None. cu_seqlens must cover all rows, else ValueError. On a GPU the
        values are checked only in debug mode, and in compiled code never. Without the check, rows outside all
        sequences and their gradients are zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: training on Hopper with any Triton release
    (fla-org/flash-linear-attention#640), K above 256, any B * H, checked cu_seqlens and CPU tensors.
    Each chunk needs the inverse of a triangular matrix, which stays accurate even if its keys are nearly
    equal. An unknown keyword is an error.
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
        g = gate(exact(g, q, k, v), A_log, dt_bias)
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
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None,
    gv: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, *,
    transpose_state_layout: bool | None = None, state_indices: Tensor | None = None,
    inplace_state: bool = False, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule``, which is also called
    ``fused_recurrent_gdn``. ``chunk_gated_delta_rule`` documents the recurrence.

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like q.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of q and k.
        g: [B, T, HV], natural-log decays of the whole state, normally <= 0.
        gk: [B, T, HV, K], natural-log decays of the rows of the state.
        gv: [B, T, HV, V], natural-log decays of the columns of the state.
        beta: [B, T, HV], or [B, T, HV, V] with one value per value channel; None means ones.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] for N sequences, any float dtype; [N, HV, V, K] with state_v_first.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: first normalize q and k: x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: use -exp(A_log) softplus(g + dt_bias) as the log decay.
        A_log: [HV], only for use_gate_in_kernel, which requires it.
        dt_bias: [HV] or None, only for use_gate_in_kernel.
        use_beta_sigmoid_in_kernel: use sigmoid(beta) in place of beta.
        allow_neg_eigval: use 2 sigmoid(beta) in place of sigmoid(beta).
        state_v_first: store the initial and final states as [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        transpose_state_layout: the old name of state_v_first.
        state_indices: [N] int32 or int64 on the device of q. With it, initial_state is a pool of P states,
            [P, HV, K, V] or [P, HV, V, K]. Sequence n reads and overwrites the state at state_indices[n]. A
            negative index skips its sequence: the outputs are zero and no state changes. An index past the
            end is an error on the CPU and in debug mode. On a GPU or in compiled code, without debug mode, it
            skips its sequence like a negative one. Two sequences must not use the same state. Only without
            gradients.
        inplace_state: write the final states to initial_state instead of a new tensor. Each state must be
            contiguous. Only without gradients.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64 tensors), in
        the layout of initial_state, or None. With inplace_state or state_indices it is initial_state itself.
        cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked only in debug mode,
        and in compiled code never. Without the check, rows outside all sequences and their gradients are
        zero. A call without gradients is one launch.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Unlike in fla, there is a backward. q, k, v, g, gk, gv, beta, A_log, dt_bias and initial_state get
    gradients, through o and through the final state. Arguments are checked, and an unknown keyword is an
    error.
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
def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
                     initial_state: Tensor | None = None, output_final_state: bool = False,
                     use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
                     allow_neg_eigval: bool = False, state_v_first: bool = False,
                     cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *,
                     use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
                     dt_bias: Tensor | None = None, mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule in the mode that suits the call.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. ``auto`` chooses from T, the need for gradients and the
    GPU; ``flashlin.explain`` prints the reason. All other arguments are the same as in
    ``chunk_gated_delta_rule``.
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
