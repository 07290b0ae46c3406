"""The delta rule; mirrors ``fla.ops.delta_rule``.

    u_t = beta_t (v_t - S_{t-1}^T k_t)        S_t = S_{t-1} + k_t u_t^T        o_t = scale S_t^T q_t

Source: Schlag et al. 2021 (arXiv 2102.11174); Yang et al. 2024 (arXiv 2406.06484) for the chunked form.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import check_qkv
from flashlin.kernels.configs import BLOCK, FACTS
from flashlin.kernels.delta import inputs, torch_path
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import CHUNK_SIZES, QKV, Argument, Chunked, Request, by_chunks, run_chunked
from flashlin.ops._common.context_parallel import run_over_ranks
from flashlin.ops._common.entry import entry
from flashlin.ops._common.preprocess import exact
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.norm import l2norm


def _room(needs_grad: bool, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
          g: Tensor | None, p: Tensor | None) -> tuple[Tensor | None, ...]:
    """Allocate the buffers that the forward kernels of ``kernels/delta/forward.py`` fill.

    The first holds the inverses of the chunks. The second holds their rounding errors in 16 bits, and is None
    if it is not needed. The third is an fp32 buffer for beta and the cumulative g. The fourth is an fp32
    buffer for the numbers of ``delta_facts``. It is None without g, with p, or without gradients.
    """
    B, T, HV = beta.shape
    A = q.new_empty(B, T, HV, BLOCK)
    lost = torch.empty_like(A) if needs_grad and q.dtype != torch.float32 else None
    lines = q.new_empty(2, HV, B * T, dtype=torch.float32)
    if g is None or p is not None or not needs_grad:
        return A, lost, lines, None
    return A, lost, lines, lines.new_empty(HV, FACTS, B * -(-T // BLOCK))


FAMILY = Chunked("delta", inputs.Inputs, {
    **QKV, "beta": Argument(("B", "T", "HV"), wide=True, either=True,
                            hint=" (a beta per value channel needs fused_recurrent)"),
    "g": Argument(("B", "T", "HV"), wide=True, optional=True),
    "p": Argument(("B", "T", "H", "K"), optional=True)},
    torch_path.compute, kept=("A", "A_low", "lines", "facts"), room=_room, over_ranks=run_over_ranks)


@entry
def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None,
                     initial_state: Tensor | None = None, output_final_state: bool = False,
                     use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
                     cu_seqlens_cpu: Tensor | None = None, chunk_size: int = 64, *, cp_context: Any = None,
                     process_group: Any = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule chunk by chunk.

    Drop-in for ``fla.ops.delta_rule.chunk_delta_rule``. The recurrence is

        u_t = beta_t (v_t - S_{t-1}^T k_t)        S_t = S_{t-1} + k_t u_t^T        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like q.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of q and k.
        beta: [B, T, HV], the fraction of the old value that the new value of a key replaces. It is normally
            in 0 .. 1, and up to 2 with negative eigenvalues. With beta near 2 and repeated keys the state
            forgets nothing, so rounding errors of 16-bit operands accumulate; use float32 there.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] (N sequences) of any float dtype; gets a gradient.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: first normalize q and k: ``x rsqrt(sum x^2 + 1e-6)``. With keys longer than 1
            the recurrence itself grows without bound in any implementation.
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        chunk_size: 16, 32 or 64, accepted for compatibility. The launch table chooses the chunk size, which
            changes the result only by rounding.
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

    These cases work here and fail in fla: float32, K above 256, grouped value heads, any B * H, checked
    cu_seqlens and CPU tensors. Each chunk needs the inverse of a triangular matrix, which stays accurate even
    if its keys are nearly equal. An unknown keyword is an error.
    """
    scalars.choice("chunk_size", chunk_size, CHUNK_SIZES)
    request = Request("chunk_delta_rule", scale, initial_state, output_final_state, cu_seqlens,
                      cu_seqlens_cpu, cp_context=cp_context, process_group=process_group)
    return run_delta(request, q, k, v, beta, l2=use_qk_l2norm_in_kernel)


@entry
def fused_recurrent_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None,
                               scale: float | None = None, initial_state: Tensor | None = None,
                               output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
                               cu_seqlens: Tensor | None = None, *, state_v_first: bool = False,
                               state_indices: Tensor | None = None, inplace_state: bool = False,
                               **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.delta_rule.fused_recurrent_delta_rule``. Arguments, results and errors are the same
    as in ``fused_recurrent_gated_delta_rule``, without its decays, gate and sigmoid. beta is [B, T, HV], or
    [B, T, HV, V] with one value per value channel; None means ones. Every float tensor gets a gradient,
    through o and through the final state.

    Two cases work here and fail in fla: the gradient of a beta per value channel is right for any V, and a
    strided initial_state keeps its gradient.
    """
    op = "fused_recurrent_delta_rule"
    flags = flags_of("delta", use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first)
    return run_recurrent(op, Inputs(q, k, v, beta, h0=initial_state, bounds=cu_seqlens), flags, scale,
                         output_final_state, state_indices, inplace_state)


@entry
def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None,
               initial_state: Tensor | None = None, output_final_state: bool = False,
               use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
               cu_seqlens_cpu: Tensor | None = None, mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule in the mode that suits the call.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. ``auto`` chooses from T, the need for gradients and the
    GPU; ``flashlin.explain`` prints the reason. All other arguments are the same as in ``chunk_delta_rule``.
    """
    check_qkv(q, k, v, grouped=True)
    shared: dict[str, Any] = dict(
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)
    if by_chunks(FAMILY, "delta_rule", mode, (q, k, v, beta, None, None), initial_state):
        return chunk_delta_rule(q, k, v, beta, cu_seqlens_cpu=cu_seqlens_cpu, **shared)
    return fused_recurrent_delta_rule(q, k, v, beta, **shared)


def run_delta(request: Request, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, *,
              l2: bool) -> tuple[Tensor, Tensor | None]:
    """Run a chunked delta-rule op, where k both reads and writes the state.

    beta and g are the values that the recurrence uses, after any sigmoid or gate. l2: normalize q and k
    first.
    """
    scalars.flags(use_qk_l2norm_in_kernel=l2)
    if l2:
        check_qkv(q, k, v, grouped=True)
        q, k = l2norm(exact(q, k, v)), l2norm(exact(k, q, v))
    return run_chunked(FAMILY, request, (q, k, v, beta, g, None), grouped=True)
