"""The delta rule whose transition matrix is diagonal plus low rank (DPLR).

Mirrors ``fla.ops.generalized_delta_rule.dplr``. The recurrence is

    S_t = Diag(e^{gk_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T q_t

a reads the state before its decay. Source: Yang et al. 2024 (arXiv 2406.06484); Peng et al. 2025 (arXiv
2503.14456) for this form.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashlin.kernels.dplr import inputs, torch_path
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.chunked import (
    CHUNK_SIZES,
    QKV,
    Argument,
    Chunked,
    Raw,
    Request,
    check_options,
    run_chunked,
)
from flashlin.ops._common.context_parallel import run_over_ranks
from flashlin.ops._common.entry import entry
from flashlin.ops._common.operator import Gradients
from flashlin.ops._common.pointwise import gradients_of_inputs
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.gates import fused_kda_gate
from flashlin.ops.norm import l2norm

NOT_KDA = None, None, None  # beta, A_log and dt_bias, which only Kimi Delta Attention has


def _ready(x: inputs.Inputs, how: inputs.Scalars) -> inputs.Inputs:
    """Return the inputs with normalized q and k, and with decays in place of the raw gate."""
    wide = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    return x._replace(q=l2norm(x.q), k=l2norm(x.k), A_log=None, dt_bias=None,
                      g=fused_kda_gate(x.g, x.A_log, x.dt_bias, how.lowest, wide))


def _backward(x: inputs.Inputs, how: inputs.Scalars, wanted: frozenset[str], raw: bool,
              run: Callable[[inputs.Inputs, frozenset[str]], Gradients]) -> Gradients:
    """Return the gradients of raw inputs. ``run`` returns those of normalized q and k, and of log decays."""
    gate = wanted & {"g", "A_log", "dt_bias"}
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(name in wanted) for name, t in (("q", x.q), ("k", x.k))]
        q, k = map(l2norm, leaves)
    inner = x._replace(q=q.detach(), k=k.detach())
    if not raw:
        inner = inner._replace(A_log=None, dt_bias=None,
                               g=fused_kda_gate(x.g, x.A_log, x.dt_bias, how.lowest))
    found: dict[str, Any] = {**run(inner, wanted - gate | ({"g"} if gate else set()))}
    for name, leaf, y in (("q", leaves[0], q), ("k", leaves[1], k)):
        if name in wanted:
            found[name], = torch.autograd.grad(y, leaf, found[name])
    if gate:
        assert x.A_log is not None
        found["g"], found["A_log"], found["dt_bias"] = gradients_of_inputs(
            "fused_kda_gate", *x.g.shape[2:], found["g"], x.g, x.A_log[:, None], x.dt_bias, bound=how.lowest)
        found["A_log"] = found["A_log"].flatten()
    return found


# Two other ops use this family. Kimi Delta Attention (kda.py) passes beta instead of a and b. Gated DeltaNet
# 2 (gdn2.py) passes only a.
FAMILY = Chunked("dplr", inputs.Inputs, {
    **QKV, "g": Argument(("B", "T", "HV", "K"), wide=True, unless="A_log"),
    "a": Argument(("B", "T", "HV", "K"), optional=True), "b": Argument(("B", "T", "HV", "K"), optional=True),
    "beta": Argument(("B", "T", "HV"), wide=True, optional=True,
                     hint=" (a beta per value channel needs fused_recurrent)"),
    "A_log": Argument(("HV",), wide=True, optional=True),
    "dt_bias": Argument(("HV", "K"), wide=True, optional=True)}, torch_path.compute,
    scalars=inputs.Scalars, raw=Raw("A_log", "dplr_prepare_raw", _ready, _backward),
    over_ranks=run_over_ranks)


@entry
def chunk_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, safe_gate: bool = False, chunk_size: int | None = None,
    disable_recompute: bool = False, cp_context: Any = None, lower_bound: float | None = None, *,
    process_group: Any = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the DPLR delta rule chunk by chunk.

    Drop-in for ``fla.ops.generalized_delta_rule.chunk_dplr_delta_rule``. The transition matrix is diagonal
    plus low rank (DPLR):

        S_t = Diag(e^{gk_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k, v, a and b follow torch's promotion. With cu_seqlens B is 1 and sequences are packed
            along T.
        k: [B, T, H, K], like q.
        v: [B, T, H, V], like q.
        a: [B, T, H, K], like q: the vectors that read the old state.
        b: [B, T, H, K], like q: the vectors that write the values read with a. With a = -k' and b = rate *
            k', k' of unit length, the state does not grow. With other vectors the recurrence itself may grow.
        gk: [B, T, H, K], natural-log decays, normally <= 0, of any strength. -inf forgets everything except
            the values that a reads.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, H, K, V] for N sequences, any float dtype; gets a gradient.
        output_final_state: also return the state after each sequence.
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        safe_gate: accepted for compatibility. In fla it promises weak decays, which flashlin does not need.
        chunk_size: None, 16, 32 or 64, accepted for compatibility. The launch table chooses the chunk size,
            which changes the result only by rounding.
        disable_recompute: accepted for compatibility; backward always recomputes.
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``.
        lower_bound: below 0 or None. In fla the caller promises that no log decay is below it, so that chunks
            of 64 tokens are accurate. Here decays of any strength are exact, so it changes nothing.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [N, H, K, V] in float32 (float64 for float64
        tensors), or None. Every float tensor gets a gradient, through o and through the final state.
        cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked only in debug mode,
        and in compiled code never. Without the check, rows outside all sequences and their gradients are
        zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: strong decays, K above 256, float32, any B * H, checked shapes and
    cu_seqlens, and CPU tensors. Strong decays are exact, in chunks and token by token. K above 256 runs in
    plain torch if the GPU has too little shared memory.
    """
    check_options(chunk_size, (None, *CHUNK_SIZES), lower_bound)
    request = Request("chunk_dplr_delta_rule", scale, initial_state, output_final_state, cu_seqlens,
                      cu_seqlens_cpu, cp_context=cp_context, process_group=process_group)
    return run_chunked(FAMILY, request, (q, k, v, gk, a, b, *NOT_KDA), called={"g": "gk", "a": "a", "b": "b"})


@entry
def fused_recurrent_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the DPLR delta rule token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.generalized_delta_rule.fused_recurrent_dplr_delta_rule``. The transition matrix is
    diagonal plus low rank (DPLR):

        S_t = Diag(e^{gk_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k, v, a and b follow torch's promotion. With cu_seqlens B is 1 and sequences are packed
            along T.
        k: [B, T, H, K], like q.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of q and k.
        a: [B, T, HV, K], the vectors that read the old state.
        b: [B, T, HV, K], the vectors that write the values read with a. With a = -k' and b = rate * k', k' of
            unit length, the state does not grow. With other vectors the recurrence itself may grow.
        gk: [B, T, HV, K], natural-log decays, normally <= 0, of any strength. -inf forgets everything except
            the values that a reads.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] for N sequences, any float dtype and strides.
        output_final_state: also return the state after each sequence.
        reverse: run each sequence from its last token to its first.
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state [N, HV, K, V] in float32 (float64 for float64
        tensors), or None. Every float tensor gets a gradient, through o and through the final state.
        cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked only in debug mode,
        and in compiled code never. Without the check, rows outside all sequences and their gradients are
        zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: the backward pass, any K, checked shapes and cu_seqlens, and CPU
    tensors.
    """
    inputs = Inputs(q, k, v, gk=gk, a=a, b=b, h0=initial_state, bounds=cu_seqlens)
    return run_recurrent("fused_recurrent_dplr_delta_rule", inputs, flags_of(reverse=reverse), scale,
                         output_final_state, called={"gk": "gk", "a": "a", "b": "b"})
