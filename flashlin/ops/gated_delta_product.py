"""Gated DeltaProduct: several steps of the gated delta rule for each token.

Mirrors ``fla.ops.gated_delta_product``. The recurrence with n steps for each token is

    S_{t,0} = e^{g_t} S_{t-1}
    S_{t,j} = S_{t,j-1} + beta_{t,j} k_{t,j} (v_{t,j} - S_{t,j-1}^T k_{t,j})^T        for j = 1 .. n
    S_t = S_{t,n}        o_t = scale S_t^T q_t

Source: Siems et al. 2025 (arXiv 2502.10297). Composed: the gated delta rule (gated_delta_rule.py) runs
with n rows for each token. Only the first row of a token decays the state, and only the last row is read.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.tensors import check_cu_seqlens, check_floats, check_values, need_tensor, shareable
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import Request
from flashlin.ops._common.entry import entry
from flashlin.ops._common.preprocess import exact
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.delta_rule import run_delta
from flashlin.ops.norm import l2norm


@entry
def chunk_gated_delta_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor,
                              num_householder: int, scale: float | None = None,
                              initial_state: Tensor | None = None, output_final_state: bool = False,
                              use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
                              cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, *,
                              process_group: Any = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute Gated DeltaProduct chunk by chunk.

    Drop-in for ``fla.ops.gated_delta_product.chunk_gated_delta_product``. Composed: it calls the gated delta
    rule with n rows for each token. The recurrence is

        S_{t,0} = e^{g_t} S_{t-1}
        S_{t,j} = S_{t,j-1} + beta_{t,j} k_{t,j} (v_{t,j} - S_{t,j-1}^T k_{t,j})^T        for j = 1 .. n
        S_t = S_{t,n}        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T n, H, K], like q. Rows t n to t n + n - 1 of k, v and beta are the n steps of token t.
        v: [B, T n, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of q and k.
        g: [B, T, HV], natural-log decays, normally <= 0, of any strength, one for each token. None means no
            decay (DeltaProduct).
        beta: [B, T n, HV].
        num_householder: n, at least 1.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] for N sequences, any float dtype; gets a gradient.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: first normalize q and k: ``x rsqrt(sum x^2 + 1e-6)``.
        cu_seqlens: [N + 1] int32 or int64 on the device of q, in tokens. Sequence i has the rows
            cu_seqlens[i] to cu_seqlens[i + 1] (exclusive) of q. Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``. All n rows of
            a token are on the same rank.
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

    These cases work here and fail in fla: float32 (an assertion there), HV above H, K above 256, any B * H,
    checked shapes and cu_seqlens, CPU tensors and torch.compile. A call costs as much as the gated delta rule
    for T n tokens, while the forward kernels of fla read each token once.
    """
    n, size = _checked(q, k, v, g, beta, num_householder), 1
    scalars.flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if cp_context is not None or process_group is not None:
        from flashlin.ops._common import ranks
        cp_context, size = ranks.in_rows(cp_context, process_group, n)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(exact(q, k, v)), l2norm(exact(k, q, v))
    bounds, bounds_cpu = _rows(cu_seqlens if cp_context is None else None, cu_seqlens_cpu, q, n, size)
    request = Request("chunk_gated_delta_product", scale, initial_state, output_final_state, bounds,
                      bounds_cpu, cp_context=cp_context, process_group=process_group)
    o, state = run_delta(request, _spread(q, n, n - 1), k, v, beta, None if g is None else _spread(g, n, 0),
                         l2=False)
    return o[:, n - 1::n].contiguous(), state


@entry
def fused_recurrent_gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, num_householder: int,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute Gated DeltaProduct token by token, for decoding and short inputs.

    It has the arguments, results and errors of ``chunk_gated_delta_product``. Composed: it calls the gated
    delta rule with n rows for each token. fla has no function of this name; its layer spreads the rows in the
    same manner and calls ``fused_recurrent_gated_delta_rule``. Every float tensor gets a gradient.
    """
    op = "fused_recurrent_gated_delta_product"
    n = _checked(q, k, v, g, beta, num_householder)
    bounds, _ = _rows(cu_seqlens, None, q, n, 1)
    inputs = Inputs(_spread(q, n, n - 1), k, v, beta, None if g is None else _spread(g, n, 0),
                    h0=initial_state, bounds=bounds)
    flags = flags_of("delta", use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    o, state = run_recurrent(op, inputs, flags, scale, output_final_state, called={"beta": "beta"})
    return o[:, n - 1::n].contiguous(), state


def _checked(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, num_householder: int) -> int:
    """Return n; raise an error unless q and g have T rows, k, v and beta have T n rows, and the heads fit.

    The delta rule checks everything else.
    """
    n = scalars.integer("num_householder", num_householder, 1, "an integer of at least 1")
    check_floats("q", q, "[B, T, H, K]", 4)
    B, T, H, K = q.shape
    need_tensor("k", k, (B, T * n, H, K), "[B, T n, H, K]", q.device)
    need_tensor("v", v, (B, T * n, None, None), "[B, T n, HV, V]", q.device)
    if not shareable(v.shape[2], H):
        raise ValueError(f"v: got {v.shape[2]} heads, need a multiple of the {H} heads of q and k")
    need_tensor("beta", beta, (B, T * n, v.shape[2]), "[B, T n, HV]", q.device)
    if g is not None:
        need_tensor("g", g, (B, T, v.shape[2]), "[B, T, HV]", q.device)
    return n


def _rows(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, q: Tensor, n: int,
          ranks: int) -> tuple[Tensor | None, Tensor | None]:
    """Return cu_seqlens and cu_seqlens_cpu multiplied by n, so that they count rows instead of tokens.

    Before that, cu_seqlens is checked against the number of tokens of all ranks.
    n: the number of rows for each token.
    ranks: the number of ranks that share the sequences.
    """
    if cu_seqlens is None:
        return None, cu_seqlens_cpu
    bounds = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, torch.Size((q.shape[0], q.shape[1] * ranks)),
                              q.device, policy.current().debug)
    check_values("cu_seqlens", bounds)
    return bounds * n, None if cu_seqlens_cpu is None else cu_seqlens_cpu * n


def _spread(x: Tensor, n: int, at: int) -> Tensor:
    """Return [B, T n, ...]: row ``at`` of the n rows of each token comes from x, and all others are zero."""
    if n == 1:
        return x
    nothing = x.new_zeros(()).expand(x.shape)
    return torch.stack([x if row == at else nothing for row in range(n)], 2).flatten(1, 2)
