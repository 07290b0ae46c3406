"""The generalised delta rule whose transition is diagonal plus low rank (DPLR); mirrors
``fla.ops.generalized_delta_rule.dplr``.

    S_t = Diag(e^{gk_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T q_t
a reads the state before it decays. Source: Yang et al. 2024 (arXiv 2406.06484); Peng et al. 2025 (arXiv
2503.14456) for this form.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.kernels.dplr import inputs, torch_path
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import (
    CHUNK_SIZES,
    QKV,
    Argument,
    Chunked,
    Request,
    check_options,
    run_chunked,
)
from flashlin.ops._common.context_parallel import run_over_ranks
from flashlin.ops._common.entry import entry
from flashlin.ops._common.recurrent import flags_of, run_recurrent

# With beta instead of a and b it is Kimi Delta Attention (kda.py), with a alone Gated DeltaNet 2 (gdn2.py).
FAMILY = Chunked("dplr", inputs.Inputs, {
    **QKV, "g": Argument(("B", "T", "HV", "K"), wide=True),
    "a": Argument(("B", "T", "HV", "K"), optional=True), "b": Argument(("B", "T", "HV", "K"), optional=True),
    "beta": Argument(("B", "T", "HV"), wide=True, optional=True,
                     hint=" (a beta per value channel needs fused_recurrent)")}, torch_path.compute,
    over_ranks=run_over_ranks)


@entry
def chunk_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
    *,
    process_group: Any = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """The DPLR delta rule, chunk by chunk. Drop-in for
    ``fla.ops.generalized_delta_rule.chunk_dplr_delta_rule``.

    Args:
        q, k, a, b: [B, T, H, K]; v: [B, T, H, V]. bfloat16, float16, float32 (float64 runs in plain torch).
            Different dtypes are promoted as torch promotes them. Any strides. With cu_seqlens B is 1 and the
            sequences are packed along T. The old state is read with a and written to with b: with a = -k', b
            = rate k' of unit length it does not grow; for any others the recurrence itself may.
        gk: [B, T, H, K] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything but
            what a reads).
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, H, K, V] (N sequences) of any float dtype; gets a gradient.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.
        cu_seqlens_cpu: the same on the host, so that its values can be checked without waiting for the GPU.
        safe_gate, lower_bound: accepted for compatibility; they promise weak decays, and nothing here needs
            that. lower_bound: below 0.
        chunk_size: None, 16, 32 or 64, accepted for compatibility; the launch table chooses the chunk, which
            never changes the result beyond rounding. disable_recompute: accepted for compatibility: backward
            always recomputes.
        cp_context, process_group: ranks that share the sequences, as in ``chunk_gated_delta_rule``.

    Returns:
        o [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in float32 (float64 for float64
        tensors), or None. cu_seqlens has to cover all rows, else ValueError. Where its values are not read
        (on a GPU outside debug mode, or compiled), rows that it leaves out are zero, as are their gradients.
        Everything that is a tensor of floats gets a gradient, through o and through the final state.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: strong decays are exact in every mode, K above 256 (in plain torch where
    the card has too little shared memory), float32, any B * H, checked shapes and cu_seqlens, CPU tensors.
    """
    check_options(chunk_size, (None, *CHUNK_SIZES), lower_bound)
    request = Request("chunk_dplr_delta_rule", scale, initial_state, output_final_state, cu_seqlens,
                      cu_seqlens_cpu, cp_context=cp_context, process_group=process_group)
    return run_chunked(FAMILY, request, (q, k, v, gk, a, b, None), called={"g": "gk", "a": "a", "b": "b"})


@entry
def fused_recurrent_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """The DPLR delta rule, token by token: for decoding and short inputs. Drop-in for
    ``fla.ops.generalized_delta_rule.fused_recurrent_dplr_delta_rule``.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j // (HV
            / H). bfloat16, float16, float32 (float64 runs in plain torch). Different dtypes are promoted as
            torch promotes them. Any strides. With cu_seqlens B is 1 and the sequences are packed along T.
        a, b: [B, T, HV, K]: what the old state is read with, and where that is written. With a = -k', b =
            rate k' of unit length the state does not grow; for any others the recurrence itself may.
        gk: [B, T, HV, K] natural-log decays, normally <= 0, as strong as you like (-inf forgets everything
            but what a reads).
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] (N sequences) of any float dtype and strides.
        output_final_state: also return the state after each sequence.
        reverse: run each sequence from its last token to its first.
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequence n is rows cu_seqlens[n] .. cu_seqlens[n +
            1]. Empty ones are fine.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [N, HV, K, V] in float32 (float64 for float64
        tensors), or None. cu_seqlens has to cover all rows, else ValueError. Where its values are not read
        (on a GPU outside debug mode, or compiled), rows that it leaves out are zero, as are their gradients.
        Everything that is a tensor of floats gets a gradient, through o and through the final state.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: has a backward, any K, checked shapes and cu_seqlens, CPU tensors.
    """
    inputs = Inputs(q, k, v, gk=gk, a=a, b=b, h0=initial_state, bounds=cu_seqlens)
    return run_recurrent("fused_recurrent_dplr_delta_rule", inputs, flags_of(reverse=reverse), scale,
                         output_final_state, called={"gk": "gk", "a": "a", "b": "b"})
