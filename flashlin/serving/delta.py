"""The delta rules on a pool of states: plain, gated (Gated DeltaNet), and gated by channel (KDA).

    S' = e^g S        u = beta (v - S'^T k)        S = S' + k u^T        o = scale S^T q

Source: Yang et al. 2024 (arXiv 2412.06464), Kimi Team 2025 (arXiv 2510.26692).
"""
from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan
from flashlin.guards.tensors import (
    check_cu_seqlens,
    check_dense,
    check_floats,
    check_integers,
    check_pool,
    check_qkv,
    check_values,
    need_tensor,
    shown,
)
from flashlin.kernels.recurrent import pool_torch
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common.arguments import check_has
from flashlin.ops._common.casting import can_write, common_dtype, count_of, dtype_as_planned, wants_grad
from flashlin.ops._common.entry import entry
from flashlin.ops._common.operator import Overwriting, kernels
from flashlin.ops._common.pipeline import traced_over_heads
from flashlin.ops._common.preprocess import check_gates
from flashlin.ops._common.recurrent import flags_of, loadable, problem_of
from flashlin.ops.gated_delta_rule import chunk_gated_delta_rule
from flashlin.ops.gates import checked_bound
from flashlin.ops.kda import chunk_kda, gate_of

MODES = ("chunk", "fused_recurrent")


@entry
def decode(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, states: Tensor,
           indices: Tensor, *, num_accepted_tokens: Tensor | None = None, cu_seqlens: Tensor | None = None,
           scale: float | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
           lower_bound: float | None = None, use_gate_in_kernel: bool = False,
           use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
           allow_neg_eigval: bool = False) -> Tensor:
    """Decode the next token, or several drafted tokens, of N requests in one launch, gates included.

    Args:
        q: [N, T, H, K]. bfloat16, float16 or float32 (float64 runs in plain torch), any strides. With
            cu_seqlens the shape is [1, T, H, K], and the tokens of the N requests are packed along T.
        k: of q's shape.
        v: [N, T, HV, V], with HV a multiple of H: value head j reads q and k of head j // (HV / H).
        g: [N, T, HV] natural-log decays of heads (Gated DeltaNet), [N, T, HV, K] of channels (KDA), or None.
            With use_gate_in_kernel it is the raw gate instead.
        beta: [N, T, HV]; with use_beta_sigmoid_in_kernel its logits; None for ones.
        states: [slots, HV, V, K], the pool, UPDATED IN PLACE. float32 or q's dtype, each state contiguous
            (another float dtype runs in plain torch).
        indices: [N] int32 or int64: the slot of each request. With drafts [N, 1 + drafts], see below.
        num_accepted_tokens: [N] int32 or int64: number of tokens accepted in the previous step, see below.
        cu_seqlens: [N + 1] int32 or int64: request n is rows cu_seqlens[n] .. cu_seqlens[n + 1]. The requests
            must cover all rows, as in ``chunk_gated_delta_rule``.
        scale: factor on the output; None means K ** -0.5.
        A_log: [HV] for use_gate_in_kernel. With decays of channels HV elements or None.
        dt_bias: [HV] or None, for use_gate_in_kernel. With decays of channels HV * K elements or None.
        lower_bound: a number below 0 or None, for use_gate_in_kernel with decays of channels.
        use_gate_in_kernel: the decay is -exp(A_log) softplus(g + dt_bias), or with a lower_bound it is
            lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta).
        allow_neg_eigval: beta is 2 sigmoid(beta).

    Returns:
        o [N, T, HV, V] in v's dtype.

    Drafts: with indices [N, 1 + drafts] and T = 1 + drafts, the state after token t is written to indices[n,
    t]. If a request has more tokens than columns, the states of its last tokens are written. A request starts
    from column num_accepted_tokens[n] - 1, or from column 0 if that number is None or 0. It starts with the
    state in the slot of that column, or with zeros if its number is 0. A number above the number of columns
    is clamped to it (an error with FLASHLIN_DEBUG=1).

    Padding: if the slot of the request's start column is outside the pool, o is zero and nothing is written.
    A state for any other slot outside the pool is not written. No two indices may name one slot.
    FLASHLIN_DEBUG=1 checks this, and that no index is past the end.

    States are rounded to their dtype after every token. Therefore drafts, and ``prefill`` in the mode
    ``fused_recurrent``, give bitwise the results of token-by-token calls with the same pool, dtypes and
    options.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name; tensors that require gradients.
        UnsupportedError: this machine cannot run the call.
    """
    given = Inputs(q, k, v, beta, g, A_log=A_log, dt_bias=dt_bias, bounds=cu_seqlens)
    options = dict(use_gate_in_kernel=use_gate_in_kernel, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                   use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval)
    return _on_pool(given, states, indices, num_accepted_tokens, scale, lower_bound, options)


@entry
def prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, states: Tensor,
            indices: Tensor, cu_seqlens: Tensor, has_initial_state: Tensor, *, mode: str = "chunk",
            scale: float | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
            lower_bound: float | None = None, use_gate_in_kernel: bool = False,
            use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
            allow_neg_eigval: bool = False) -> Tensor:
    """Process prompts, or pieces of prompts, of N requests, and write their final states to the pool.

    Args:
        q: [1, total, H, K], as in ``decode``.
        k: [1, total, H, K], as in ``decode``.
        v: [1, total, HV, V], as in ``decode``.
        g: as in ``decode``.
        beta: as in ``decode``.
        states: as in ``decode``.
        indices: [N] int32 or int64: the slot of each request. An index outside the pool is padding.
        cu_seqlens: [N + 1] int32 or int64. Request n has the rows cu_seqlens[n] to cu_seqlens[n + 1]
            (exclusive). The requests must cover all rows. A request without tokens does not change its slot.
        has_initial_state: [N] bool: True if a request continues from its slot's state (a later piece).
            Otherwise it starts with zeros, whatever the slot contains.
        mode: ``chunk`` is fast, because it uses matrix products. A prompt in pieces gives the same results as
            in one call, up to rounding. ``fused_recurrent`` computes token by token. Its results have the
            same bits as those of ``decode``, wherever the prompt is cut. Use it if a trainer must repeat a
            rollout.
        scale: as in ``decode``.
        A_log: as in ``decode``.
        dt_bias: as in ``decode``.
        lower_bound: as in ``decode``.
        use_gate_in_kernel: as in ``decode``.
        use_qk_l2norm_in_kernel: as in ``decode``.
        use_beta_sigmoid_in_kernel: as in ``decode``.
        allow_neg_eigval: as in ``decode``.

    Returns:
        o [1, total, HV, V] in v's dtype; rows of padding are zero. The final states are in the slots.

    ``chunk`` copies states: they are gathered into float32 and scattered by torch's indexing. The copies move
        about nine times the bytes of the N states; two times would be the least. The kernels of a piece of
        1,000 tokens move several times as many bytes as the copies. ``fused_recurrent`` copies nothing.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name; tensors that require gradients.
        UnsupportedError: this machine cannot run the call.
    """
    scalars.choice("mode", mode, MODES)
    if isinstance(indices, Tensor) and indices.ndim != 1:
        raise ValueError(f"indices: got shape {shown(indices.shape)}, need [N]")
    given = Inputs(q, k, v, beta, g, A_log=A_log, dt_bias=dt_bias, bounds=cu_seqlens)
    options = dict(use_gate_in_kernel=use_gate_in_kernel, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                   use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval)
    return _on_pool(given, states, indices, has_initial_state, scale, lower_bound, options, mode)


class Beside(NamedTuple):
    """The scalars and tensors of a call on a pool other than the inputs.

    accepted: has_initial_state of ``prefill``, or num_accepted_tokens of ``decode``.
    flags: names of the options that are on, separated by blanks.
    """
    pool: Tensor
    indices: Tensor
    accepted: Tensor | None
    scale: float
    flags: str
    out_dtype: torch.dtype
    call: str


def _on_pool(given: Inputs, pool: Tensor, indices: Tensor, accepted: Any, scale: float | None,
             lower_bound: float | None, options: dict[str, bool], mode: str = "") -> Tensor:
    """Check and run a call of ``decode``, or of ``prefill`` if a mode is given.

    accepted: num_accepted_tokens of ``decode`` or has_initial_state of ``prefill``.
    options: the kernel options by name.
    """
    x, flags = _checked(given, pool, indices, lower_bound, options, bool(mode))
    N = count_of(x.v, x.bounds)
    name = "has_initial_state" if mode else "num_accepted_tokens"
    check_integers("indices", indices, (N,) if indices.ndim < 2 else (N, None), "[N] or [N, 1 + drafts]",
                   x.q.device, "q")
    if mode:
        check_has(name, accepted, N, x.q.device)
    elif accepted is not None:
        check_integers(name, accepted, (N,), "[N]", x.q.device, "q")
    table = indices if indices.ndim == 2 else indices[:, None]
    if not table.shape[1]:
        raise ValueError("indices: got no columns, need [N] or [N, 1 + drafts]")
    if policy.current().debug:
        _check_slots(table, accepted, len(pool), name)
    scale = x.q.shape[3] ** -0.5 if scale is None else scalars.number("scale", scale)
    if wants_grad(*x, pool):
        raise ValueError("states: got tensors that require gradients, need torch.no_grad() or "
                         "inference_mode() around a call that overwrites states")
    if mode == "chunk":
        return _chunked(x, pool, indices, accepted, scale, lower_bound, options)
    planned_as = ("fused_recurrent_kda" if x.gk is not None else "fused_recurrent_delta_rule" if x.g is None
                  else "fused_recurrent_gated_delta_rule")
    common = common_dtype(x.v, x.q, x.k)
    beside = Beside(pool, table, accepted, scale, " ".join(flags), x.v.dtype, planned_as)
    x = x._replace(q=x.q.to(common), k=x.k.to(common), v=x.v.to(common))
    return cast(Tensor, DECODE.run_planned(x, beside))


def _token_by_token(plan: Plan, x: Inputs, beside: Beside) -> Tensor:
    """Run the kernel that reads and writes the pool in place, or plain torch if no kernel can write to it."""
    pool, indices, accepted, scale, words, out_dtype, _ = beside
    flags, dot = tuple(words.split()), plan.problem.dot
    if not can_write(plan, pool, x.q.dtype):
        return pool_torch.compute(x, pool, indices, accepted, flags, scale).to(out_dtype)
    bounds = None if x.bounds is None else x.bounds.to(indices.dtype)
    accepted = None if accepted is None else accepted.to(indices.dtype)
    o: Tensor = kernels("recurrent", "pool").launch_pool(
        plan, loadable(x, dot)._replace(bounds=bounds), pool, indices.contiguous(), accepted, flags, scale,
        dtype_as_planned(out_dtype, dot))
    return o.to(out_dtype)


DECODE = Overwriting(
    "serving_decode", Inputs, Beside, "pool", family="recurrent",
    problem=lambda x, how: problem_of(x, how, "delta", "pool", "v_first"),
    while_tracing=lambda x, how: traced_over_heads(x, how, "fused_recurrent", ("v_first",)),
    launch=_token_by_token, empty=lambda x, how: x.v.new_empty(x.v.shape, dtype=how.out_dtype))


def _chunked(x: Inputs, pool: Tensor, indices: Tensor, has: Tensor, scale: float, lower_bound: float | None,
             options: dict[str, bool]) -> Tensor:
    """Return o, computed chunk by chunk from gathered states; the final states are scattered to the pool."""
    q, k, v, bounds = x.q, x.k, x.v, x.bounds
    assert bounds is not None
    beta = v.new_ones(v.shape[:3]) if x.beta is None else x.beta
    slots = indices.long()
    there = (slots >= 0) & (slots < len(pool))
    h0 = pool_torch.states_of(pool, slots, there & has)
    shared: dict[str, Any] = dict(
        options, scale=scale, initial_state=h0, output_final_state=True, state_v_first=True,
        cu_seqlens=bounds, A_log=x.A_log, dt_bias=x.dt_bias)
    if x.gk is not None:
        o, ht = chunk_kda(q, k, v, x.gk, beta, lower_bound=lower_bound, **shared)
    else:
        g = v.new_zeros(v.shape[:3], dtype=torch.float32) if x.g is None else x.g
        o, ht = chunk_gated_delta_rule(q, k, v, g, beta, **shared)
    pool_torch.put(pool, slots, ht, there & (bounds[1:] > bounds[:-1]))
    return pool_torch.rows_of(o, bounds, there)


def _checked(given: Any, pool: Tensor, indices: Tensor, lower_bound: float | None,
             options: dict[str, bool], packed: bool) -> tuple[Inputs, tuple[str, ...]]:
    """Return the checked inputs and the flags of the kernel."""
    q, v, g, beta, A_log, dt_bias = given.q, given.v, given.g, given.beta, given.A_log, given.dt_bias
    check_qkv(q, given.k, v, grouped=True)
    (B, T, HV, V), K, device = v.shape, q.shape[3], q.device
    gated, sigmoid = options["use_gate_in_kernel"], options["use_beta_sigmoid_in_kernel"]
    check_gates("flashlin.serving", gated, A_log, dt_bias, sigmoid, options["allow_neg_eigval"])
    if beta is not None or sigmoid:
        need_tensor("beta", beta, (B, T, HV), "[B, T, HV]", device)
    by_channel = isinstance(g, Tensor) and g.ndim == 4
    if g is not None or gated:
        check_floats("g", g, "[B, T, HV] or [B, T, HV, K]")
        need_tensor("g", g, (B, T, HV, K) if by_channel else (B, T, HV),
                    "[B, T, HV, K]" if by_channel else "[B, T, HV] or [B, T, HV, K]", device)
    bound = checked_bound(lower_bound)
    if bound is not None and not (by_channel and gated):
        raise ValueError(f"lower_bound: got {bound}, need None but for a g [B, T, HV, K] with "
                         "use_gate_in_kernel")
    if gated and by_channel:
        A_log, dt_bias, _ = gate_of(g, gated, A_log, dt_bias, bound)
    elif gated:
        need_tensor("A_log", A_log, (HV,), "[HV]", device)
        if dt_bias is not None:
            need_tensor("dt_bias", dt_bias, (HV,), "[HV]", device)
    bounds = given.bounds
    if bounds is not None or packed:
        bounds = check_cu_seqlens(bounds, None, q.shape, device, policy.current().debug)
        check_values("cu_seqlens", bounds)
    check_pool("states", pool, None, HV, K, V, True, device, "flashlin.serving")
    check_dense("indices", indices, "an int32 or int64 tensor of shape [N] or [N, 1 + drafts]")
    x: Inputs = given._replace(g=None if by_channel else g, gk=g if by_channel else None, A_log=A_log,
                               dt_bias=dt_bias, bounds=bounds)
    return x, flags_of(bound=bound, use_qk_l2norm_in_kernel=options["use_qk_l2norm_in_kernel"],
                       use_beta_sigmoid_in_kernel=sigmoid, allow_neg_eigval=options["allow_neg_eigval"])


def _check_slots(table: Tensor, accepted: Tensor | None, slots: int, name: str) -> None:
    """Check the values of indices and counts, which waits for the GPU; used in debug mode only.

    Indices must be in the pool or negative, no two may name one slot, and counts must fit the columns.
    """
    known = table[table >= 0]
    if known.numel() and int(known.max()) >= slots:
        raise ValueError(f"indices: got {int(known.max())}, need less than {slots}, the number of slots in "
                         "states")
    if known.bincount(minlength=1).max() > 1:
        raise ValueError("indices: got one slot twice, need a slot of its own for each state")
    if accepted is not None and accepted.numel():
        least, most = int(accepted.min()), int(accepted.max())
        if least < 0 or most > table.shape[1]:
            raise ValueError(f"{name}: got {least if least < 0 else most}, need 0 .. {table.shape[1]}, the "
                             "columns of indices")
