"""Kimi Delta Attention: the gated delta rule with a decay for each key channel; mirrors ``fla.ops.kda``.

    S' = Diag(e^{g_t}) S_{t-1}        u_t = beta_t (v_t - S'^T k_t)        S_t = S' + k_t u_t^T
    o_t = scale S_t^T q_t

Source: Kimi Team 2025 (arXiv 2510.26692).
"""
from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from flashlin.compat.tracing import numbers
from flashlin.guards import scalars
from flashlin.guards.tensors import check_floats, check_qkv
from flashlin.kernels.dplr.inputs import LOWEST
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.casting import wants_grad
from flashlin.ops._common.chunked import Asked, Request, by_chunks, check_options, run_chunked
from flashlin.ops._common.entry import entry
from flashlin.ops._common.pipeline import planned
from flashlin.ops._common.preprocess import beta_of_logits, check_gates, exact, wide
from flashlin.ops._common.recurrent import flags_of, run_recurrent
from flashlin.ops.dplr_delta_rule import FAMILY
from flashlin.ops.gates import checked_bound, fused_kda_gate, parameter
from flashlin.ops.norm import l2norm
from flashlin.ops.simple_gla import v_first

CHUNK_SIZES = (32, 64)
Gate = tuple[Tensor | None, Tensor | None, float | None]  # A_log, dt_bias, lower bound; see gate_of


@entry
def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
              initial_state: Tensor | None = None, output_final_state: bool = False,
              use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
              use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
              safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
              return_intermediate_states: bool = False, state_v_first: bool = False,
              cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None,
              *, A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64,
              use_graph: bool = False, max_num_seqs: int | None = None,
              transpose_state_layout: bool | None = None, process_group: Any = None, **unknown: Any) -> Any:
    """Compute Kimi Delta Attention chunk by chunk.

    Drop-in for ``fla.ops.kda.chunk_kda``. The recurrence is

        S' = Diag(e^{g_t}) S_{t-1}        u_t = beta_t (v_t - S'^T k_t)        S_t = S' + k_t u_t^T
        o_t = scale S_t^T q_t

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like q.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of q and k.
        g: [B, T, HV, K], natural-log decays, normally <= 0, of any strength. With use_gate_in_kernel it is
            the raw gate.
        beta: [B, T, HV], or its logits with use_beta_sigmoid_in_kernel.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] for N sequences, any float dtype; gets a gradient. With state_v_first it
            is [N, HV, V, K].
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: first normalize q and k: x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: use -exp(A_log) softplus(g + dt_bias) as the log decay. With a lower_bound it is
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: use sigmoid(beta) in place of beta.
        allow_neg_eigval: use 2 sigmoid(beta) in place of sigmoid(beta).
        safe_gate: with use_gate_in_kernel it requires a lower_bound of -5 or more, as in fla. It has no other
            effect.
        lower_bound: the lowest log decay of the gate, below 0, or None.
        disable_recompute: accepted for compatibility; backward always recomputes.
        return_intermediate_states: also return the states that enter each chunk of chunk_size tokens. Only
            allowed under torch.inference_mode(). The host then loops over the chunks, and with cu_seqlens it
            waits for the values.
        state_v_first: store the initial and final states as [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        cu_seqlens_cpu: a copy of cu_seqlens on the host, which is checked without waiting for the GPU.
        cp_context: the ranks that share the sequences, as in ``chunk_gated_delta_rule``.
        A_log: HV elements, for use_gate_in_kernel, or None for a factor of 1; gets a gradient.
        dt_bias: HV * K elements or None, for use_gate_in_kernel; gets a gradient.
        chunk_size: 32 or 64, as in fla. It only selects the states for return_intermediate_states. The launch
            table chooses the chunk size of the kernels, which changes the result only by rounding.
        use_graph: accepted for compatibility; any call can be captured in a CUDA graph.
        max_num_seqs: accepted for compatibility, like use_graph.
        transpose_state_layout: the old name of state_v_first.
        process_group: the group of these ranks, as in ``chunk_gated_delta_rule``.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64 tensors), in
        the layout of initial_state, or None. With return_intermediate_states also h [B, chunks, HV, K, V] in
        the dtype of k, in the layout of initial_state; the chunks of packed sequences follow each other.
        cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked only in debug mode,
        and in compiled code never. Without the check, rows outside all sequences and their gradients are
        zero.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: strong decays (exact without safe_gate), K above 256 (in plain
    torch if the GPU has too little shared memory), any B * H, states of any float dtype, checked shapes and
    cu_seqlens, and CPU tensors. An unknown keyword is an error.
    """
    op = "chunk_kda"
    scalars.flags(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, safe_gate=safe_gate,
                  return_intermediate_states=return_intermediate_states)
    check_gates(op, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check_options(chunk_size, CHUNK_SIZES, lower_bound)
    request = Request(op, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                      v_first(op, state_v_first, transpose_state_layout), cp_context=cp_context,
                      process_group=process_group)
    if use_gate_in_kernel or use_beta_sigmoid_in_kernel or use_qk_l2norm_in_kernel:
        check_qkv(q, k, v, grouped=True)
    gate = gate_of(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate)
    if use_beta_sigmoid_in_kernel:
        check_floats("beta", beta, "[B, T, HV]")
        beta = beta_of_logits(exact(beta, q, k, v), allow_neg_eigval)
    if beta is None:
        raise TypeError("beta: got NoneType, need a tensor of shape [B, T, HV]")
    return run_kda(request, q, k, v, g, gate, beta=beta, l2=use_qk_l2norm_in_kernel,
                   chunk=chunk_size if return_intermediate_states else None)


def run_kda(request: Request, q: Tensor, k: Tensor, v: Tensor, g: Tensor, gate: Gate, *,
            b: Tensor | None = None, beta: Tensor | None = None, l2: bool, chunk: int | None) -> Any:
    """Run a chunked op whose state decays by channel: Kimi Delta Attention or Gated DeltaNet 2.

    g: [B, T, HV, K], natural-log decays, or the raw gate if gate has an A_log.
    gate: the gate parameters of gate_of, which turn a raw g into a decay.
    b: [B, T, HV, K], the erase rates of Gated DeltaNet 2.
    beta: [B, T, HV], for Kimi Delta Attention.
    l2: first normalize q and k.
    chunk: also return the states that enter each chunk of this number of tokens; None does not return them.
    """
    if chunk is not None and not torch.is_inference_mode_enabled():
        raise ValueError("return_intermediate_states: got True, need torch.inference_mode() around it")
    lowest, raw = -math.inf if gate[2] is None else gate[2], (q, k, v, g, b, None, beta, *gate[:2])
    if l2 and chunk is None and computes_gate(request, raw, lowest):
        return run_chunked(FAMILY, request, raw, grouped=True, lowest=lowest)
    if gate[0] is not None:
        g = exact(g, q, k, v)
        g = fused_kda_gate(g, *gate, wide(g[:0]).dtype)
    if l2:
        q, k = l2norm(exact(q, k, v)), l2norm(exact(k, q, v))
    tensors = (q, k, v, g, b, None, beta, None, None)
    if chunk is not None:
        return _with_states(request, tensors, chunk)
    return run_chunked(FAMILY, request, tensors, grouped=True, lowest=lowest)


def computes_gate(request: Request, tensors: tuple[Tensor | None, ...], lowest: float) -> bool:
    """Return True if forward's kernels compute norms and gate of a call, from the raw tensors.

    They do so if the lower bound of the gate guarantees that chunks of 16 tokens fit one decay reference.
    These kernels must have run on this kind of GPU (``kernels/dplr/raw.py``), and kernels must run backward.

    tensors: the family's tensors, with q and k not yet normalized, and with the raw gate.
    """
    q, a, h0 = tensors[0], tensors[4], request.h0
    bounds = request.cu_seqlens if request.cu_seqlens_cpu is None else request.cu_seqlens_cpu
    if (lowest < LOWEST or q is None or a is not None or torch.compiler.is_compiling()
            or request.cp_context is not None or request.process_group is not None):
        return False
    # run_chunked, which runs later, raises the errors about these arguments.
    if not (h0 is None or isinstance(h0, Tensor)) or not (
            bounds is None or (isinstance(bounds, Tensor) and not bounds.is_nested and bounds.ndim == 1)):
        return False
    x, how = (*tensors, None, bounds), Asked(request.op, False, "chunk", request.state_v_first)
    if not planned(FAMILY.problem(x, how), q.device).has("dplr_prepare_raw"):
        return False
    if not wants_grad(*tensors, h0):
        return True
    back = planned(FAMILY.problem(x, how, back=True), q.device).problem
    return back.path != "torch" and back.dot == "native"


def _with_states(request: Request, tensors: tuple[Tensor | None, ...],
                 size: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the outputs, the final state and the states that enter each chunk of ``size`` tokens.

    The first call computes the outputs. Then one call for each chunk index c packs chunk c of all sequences.
    It starts with the states that the call for c - 1 returned.
    """
    q, k, v = tensors[:3]
    assert q is not None and k is not None and v is not None
    (B, T), (HV, V), K = q.shape[:2], v.shape[2:], q.shape[3]
    # This call also checks the arguments.
    o, _ = run_chunked(FAMILY, request._replace(has_ht=False), tensors, grouped=True)
    packed = request.cu_seqlens if request.cu_seqlens_cpu is None else request.cu_seqlens_cpu
    edges = range(0, B * T + 1, max(T, 1)) if packed is None else numbers(packed)
    chunks = [torch.arange(first, end, device=q.device).split(size) if first < end else ()
              for first, end in itertools.pairwise(edges)]
    shape = (V, K) if request.state_v_first else (K, V)
    state = q.new_zeros(B if packed is None else len(chunks), HV, *shape, dtype=wide(q[:0]).dtype)
    if request.h0 is not None:
        state.copy_(request.h0)
    rows = [None if x is None else x.flatten(0, 1)[None] for x in tensors]
    entering: list[list[Tensor]] = [[] for _ in chunks]
    for c in range(max(map(len, chunks), default=0)):
        alive = [n for n, of_sequence in enumerate(chunks) if c < len(of_sequence)]
        for n in alive:
            entering[n].append(state[n].to(k.dtype, copy=True))
        at = [chunks[n][c] for n in alive]
        bounds = torch.tensor([0, *itertools.accumulate(map(len, at))], dtype=torch.int32)
        here = tuple(None if x is None else x[:, torch.cat(at)] for x in rows)
        _, after = run_chunked(FAMILY, request._replace(h0=state[alive], has_ht=True, cu_seqlens_cpu=bounds,
                                                        cu_seqlens=bounds.to(q.device)), here, grouped=True)
        assert after is not None
        state[alive] = after
    states = [*itertools.chain(*entering)]
    h = torch.stack(states) if states else k.new_zeros(0, HV, *shape)
    return o, state if request.has_ht else None, h.unflatten(0, (B, len(states) // max(B, 1)))


@entry
def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    lower_bound: float | None = None, state_v_first: bool = False, cu_seqlens: Tensor | None = None, *,
    transpose_state_layout: bool | None = None, state_indices: Tensor | None = None,
    inplace_state: bool = False, **unknown: Any) -> tuple[Tensor, Tensor | None]:
    """Compute Kimi Delta Attention token by token, for decoding and short inputs.

    Drop-in for ``fla.ops.kda.fused_recurrent_kda``. ``chunk_kda`` documents the recurrence.

    Args:
        q: [B, T, H, K], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. Mixed dtypes
            of q, k and v follow torch's promotion. With cu_seqlens B is 1 and sequences are packed along T.
        k: [B, T, H, K], like q.
        v: [B, T, HV, V], HV a multiple of H. Value head j reads head j // (HV / H) of q and k.
        g: [B, T, HV, K], natural-log decays, normally <= 0. With use_gate_in_kernel it is the raw gate.
        beta: [B, T, HV], or [B, T, HV, V] with one value per value channel. With use_beta_sigmoid_in_kernel
            it contains the logits.
        A_log: HV elements, or None for a factor of 1; only for use_gate_in_kernel.
        dt_bias: HV * K elements or None; only for use_gate_in_kernel.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N, HV, K, V] for N sequences, any float dtype and strides; [N, HV, V, K] with
            state_v_first.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: first normalize q and k: x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: use -exp(A_log) softplus(g + dt_bias) as the log decay. With a lower_bound it is
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        use_beta_sigmoid_in_kernel: use sigmoid(beta) in place of beta.
        allow_neg_eigval: use 2 sigmoid(beta) in place of sigmoid(beta).
        lower_bound: the lowest log decay of the gate, below 0, or None. Without use_gate_in_kernel it has no
            effect, as in fla.
        state_v_first: store the initial and final states as [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 on the device of q. Sequence n has the rows cu_seqlens[n] to
            cu_seqlens[n + 1] (exclusive). Empty sequences are allowed.
        transpose_state_layout: the old name of state_v_first.
        state_indices: [N] integers that select states of a pool, as in ``fused_recurrent_gated_delta_rule``.
        inplace_state: write the final states to initial_state, as in ``fused_recurrent_gated_delta_rule``.
        **unknown: raises an error that names the unknown keyword.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 (float64 for float64 tensors), in
        the layout of initial_state, or None. With inplace_state or state_indices it is initial_state itself.
        cu_seqlens must cover all rows, else ValueError. On a GPU the values are checked only in debug mode,
        and in compiled code never. Without the check, rows outside all sequences and their gradients are
        zero. A call without gradients is one launch, which includes the gate.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from fla: q, k, v, g, beta, A_log, dt_bias and initial_state get gradients, through o and
    through the final state. In fla no tensor gets one, and no error says so. An unknown keyword is an error,
    and so is A_log or dt_bias if the call does not use it.
    """
    op = "fused_recurrent_kda"
    check_gates(op, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    A_log, dt_bias, bound = gate_of(g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    flags = flags_of("delta", bound=bound, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                     use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
                     state_v_first=v_first(op, state_v_first, transpose_state_layout))
    inputs = Inputs(q, k, v, beta, gk=g, A_log=A_log, dt_bias=dt_bias, h0=initial_state, bounds=cu_seqlens)
    return run_recurrent(op, inputs, flags, scale, output_final_state, state_indices, inplace_state,
                         called={"gk": "g", "beta": "beta"})


def gate_of(g: Tensor, inside: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None,
            safe: bool = False) -> Gate:
    """Check the gate parameters and return (A_log [HV], dt_bias [HV, K] or None, lower bound or None).

    g: [B, T, HV, K].
    inside: the op applies the gate to a raw g. If False, g contains decays and the result is (None, None,
    None).
    A_log: HV elements; None gives zeros, for a factor of 1.
    dt_bias: HV * K elements or None.
    safe: the option safe_gate, which requires a lower_bound of -5 or more.
    """
    bound = None if lower_bound is None else checked_bound(lower_bound)
    if not inside:
        return None, None, None
    if safe and (bound is None or bound < -5):
        raise ValueError(f"lower_bound: got {bound}, need -5 <= lower_bound < 0 with safe_gate and "
                         "use_gate_in_kernel")
    check_floats("g", g, "[B, T, HV, K]", 4)
    HV, K = g.shape[2:]
    A_log = torch.zeros(HV, device=g.device) if A_log is None else parameter("A_log", A_log, (HV,), "HV", g)
    dt_bias = None if dt_bias is None else parameter("dt_bias", dt_bias, (HV, K), "HV * K", g)
    return A_log, dt_bias, bound


@entry
def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
        lower_bound: float | None = None, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
        mode: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute Kimi Delta Attention in the mode that suits the call.

    mode: ``auto``, ``chunk`` or ``fused_recurrent``. ``auto`` chooses from T, the need for gradients and the
    GPU; ``flashlin.explain`` prints the reason. A beta per value channel, [B, T, HV, V], runs token by token.
    All other arguments are the same as in ``chunk_kda``.
    """
    check_qkv(q, k, v, grouped=True)
    shared: dict[str, Any] = dict(
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound, state_v_first=state_v_first, cu_seqlens=cu_seqlens, A_log=A_log,
        dt_bias=dt_bias)
    if by_chunks(FAMILY, "kda", mode, (q, k, v, g, None, None, beta, None, None), initial_state,
                 A_log, dt_bias):
        o, ht = chunk_kda(q, k, v, g, beta, cu_seqlens_cpu=cu_seqlens_cpu, **shared)
        return o, ht
    return fused_recurrent_kda(q, k, v, g, beta, **shared)
