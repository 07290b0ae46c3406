"""Comba, a gated delta rule that reads the old state with a separate vector p; mirrors ``fla.ops.comba``.

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T        o_t = scale S_t^T q_t

p reads the state before the decay. The chunked op runs the kernels of the gated delta rule. The
token-by-token op is one launch without gradients. With gradients it runs the DPLR delta rule
(``dplr_delta_rule.py``), which reads with -beta p and writes with k. Source: Hu et al. 2025 (arXiv
2506.02475).
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import check_qkv, need_tensor
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import Request, run_chunked
from flashlin.ops._common.entry import entry
from flashlin.ops._common.preprocess import exact
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.delta_rule import FAMILY
from flashlin.ops.norm import l2norm


@entry
def chunk_comba(q: Tensor, k: Tensor, v: Tensor, p: Tensor | None, g: Tensor, beta: Tensor | None = None,
                scale: float | None = None, initial_state: Tensor | None = None,
                output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
                cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *,
                cp_context: Any = None, process_group: Any = None,
                **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute Comba chunk by chunk.

    Drop-in for ``fla.ops.comba.chunk_comba``. It runs the kernels of the gated delta rule, which read the old
    state with p in place of k, before the decay. The recurrence is

        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like q.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of q, k and p.
        p: [B, T, H, K], the vectors that read the old state; None means k.
        g: [B, T, HV], natural-log decays, normally <= 0, of any strength. -inf forgets everything except the
            values that p reads.
        beta: [B, T, HV]; None means ones.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] for N sequences, any float dtype; gets a gradient.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: first normalize q, k and p: x / sqrt(sum x^2 + 1e-6). The layer of fla passes
            a multiple of k as p; the normalization removes that factor, as in fla.
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 (float64 for float64
        tensors), or None. cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked
        only in debug mode, and in compiled code never. Without the check, rows outside all sequences and
        their gradients are zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: calls without beta, K above 256, any B * H, checked shapes and
    cu_seqlens, CPU tensors and torch.compile. The function naive_recurrent_comba of fla reads the state after
    the decay. The kernels of fla, its naive_chunk_comba and the paper read it before the decay.
    """
    scalars.flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    check_qkv(q, k, v, grouped=True)
    B, T, HV = v.shape[:3]
    if p is not None:
        need_tensor("p", p, tuple(k.shape), "[B, T, H, K]", q.device)
    need_tensor("g", g, (B, T, HV), "[B, T, HV]", q.device)
    if beta is not None:
        need_tensor("beta", beta, (B, T, HV), "[B, T, HV]", q.device)
    if use_qk_l2norm_in_kernel:
        p = None if p is None else l2norm(exact(p, q, k, v))
        q, k = l2norm(exact(q, k, v)), l2norm(exact(k, q, v))
    beta = v.new_ones(B, T, HV) if beta is None else beta
    request = Request("chunk_comba", scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      cp_context=cp_context, process_group=process_group)
    return run_chunked(FAMILY, request, (q, k, v, beta, g, k if p is None else p), grouped=True)


@entry
def fused_recurrent_comba(q: Tensor, k: Tensor, p: Tensor | None, v: Tensor, g: Tensor,
                          beta: Tensor | None = None, scale: float | None = None,
                          initial_state: Tensor | None = None, output_final_state: bool = False,
                          use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
                          **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute Comba token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.comba.fused_recurrent_comba``. Arguments, results and errors are the same as in
    ``chunk_comba``, but p comes before v, as in fla. A beta per value channel, [B, T, HV, V], is an error;
    the kernel of fla accepts it without documenting it. A call without gradients is one launch. With
    gradients, torch first computes the norms and applies beta.

    These cases work here and fail in fla: the backward, several value heads without beta, checked shapes and
    cu_seqlens, and CPU tensors. q, k, v, p, g, beta and initial_state get gradients, through o and through
    the final state.
    """
    flags = flags_of("delta", "undecayed", use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    inputs = Inputs(q, k, v, beta, g, a=p, h0=initial_state, bounds=cu_seqlens)
    called = {"g": "g"} if p is None else {"g": "g", "a": "p"}
    return run_recurrent("fused_recurrent_comba", inputs, flags, scale, output_final_state, called=called)
