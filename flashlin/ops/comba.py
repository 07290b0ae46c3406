"""Comba, a gated delta rule that is fed back with a vector of its own; mirrors ``fla.ops.comba``.

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T        o_t = scale S_t^T q_t
p reads the state before it decays. Source: Hu et al. 2025 (arXiv 2506.02475). Chunk by chunk it runs the
gated delta rule's kernels. Token by token it is one launch, or, where gradients are wanted, composed: the
DPLR delta rule (dplr_delta_rule.py) that reads with -beta p and writes to k.
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
def chunk_comba(
    q: Tensor, k: Tensor, v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    *,
    cp_context: Any = None, process_group: Any = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Comba, chunk by chunk. Drop-in for ``fla.ops.comba.chunk_comba``. Runs the gated delta rule's kernels,
    which then read the old state with p, before it decays, and not with k.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head j reads q, k and p of head j //
            (HV / H). bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted
            as torch promotes them. Any strides. With cu_seqlens B is 1 and the sequences are packed along T.
        p: [B, T, H, K], what the old state is read with; None for k.
        g: [B, T, HV] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything but
            what p reads).
        beta: [B, T, HV]; None for ones.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] (N sequences) of any float dtype; gets a gradient.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: q, k and p become x / sqrt(sum x^2 + 1e-6). As in fla p does, too, so of a p
            that is a share of k, as its layer has it, only the direction is left.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.
        cu_seqlens_cpu: the same on the host, so that its values can be checked without waiting for the GPU.
        cp_context, process_group: ranks that share the sequences, as in ``chunk_gated_delta_rule``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64
        tensors), or None. cu_seqlens has to cover all rows, else ValueError. Where its values are not read
        (on a GPU outside debug mode, or compiled), rows that it leaves out are zero, as are their gradients.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: without beta it runs, K above 256, any B * H, checked shapes and
    cu_seqlens, CPU tensors, torch.compile. (fla's naive_recurrent_comba reads the state after it decays;
    fla's kernels, its naive_chunk_comba and the paper before.)
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
def fused_recurrent_comba(
    q: Tensor, k: Tensor,
    p: Tensor | None,
    v: Tensor, g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """Comba, token by token: for decoding and short inputs. Drop-in for
    ``fla.ops.comba.fused_recurrent_comba``.

    Arguments, returns and errors as ``chunk_comba``, but, as in fla, p comes before v. A beta for each value
    channel, [B, T, HV, V], which fla's kernel takes without saying so, is an error. Without gradients all of
    it is one launch; with gradients norms and beta come first, in torch.

    Differs from fla where fla fails: has a backward (q, k, v, p, g, beta and initial_state get gradients,
    through o and through the final state), several value heads without beta, checked shapes and cu_seqlens,
    CPU tensors.
    """
    flags = flags_of("delta", "undecayed", use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    inputs = Inputs(q, k, v, beta, g, a=p, h0=initial_state, bounds=cu_seqlens)
    called = {"g": "g"} if p is None else {"g": "g", "a": "p"}
    return run_recurrent("fused_recurrent_comba", inputs, flags, scale, output_final_state, called=called)
