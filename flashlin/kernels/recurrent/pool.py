"""The gated delta rule on a pool of states, token by token: for decoding, draft tokens and prompts.

One compiled kernel is used for all of these. Draft tokens, packed sequences and initial states are options at
run time and need no other kernel. The state is rounded to the pool's dtype after every token. Therefore a
prompt in one call gives bitwise the same states as one call per token.
"""

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, row_stride, with_rows
from flashlin.kernels.recurrent.forward import of_unit_length, tile_of_state, updated, vector
from flashlin.kernels.recurrent.inputs import Inputs, bound_of
from flashlin.kernels.tile_ops import zero_gaps, zero_rows


@triton.jit(do_not_specialize=["scale", "T", "N", "H", "HV", "P", "columns", "packed", "gaps", "counted",
                               "q_row", "k_row", "v_row"])
def recurrent_pool(
    q, k,  # [rows, H, K]
    v,  # [rows, HV, V]
    beta,  # [rows, HV]
    g,  # [rows, HV] or None
    gk,  # [rows, HV, K] or None
    A_log,  # [HV] or None
    dt_bias,  # [HV] or, for gk, [HV, K], or None
    pool,  # [P, HV, V, K]
    o,  # [rows, HV, V]
    indices,  # [N, columns]
    accepted,  # [N] if counted
    bounds,  # [N + 1] if packed
    scale,
    T,  # tokens of a sequence, or of all sequences if packed
    N, H, HV,
    P,  # number of states in the pool
    columns,  # number of states that are written for each sequence
    packed,  # 1 if sequences are packed, with their positions in bounds
    gaps,  # 1 if rows outside all sequences must be zeroed
    counted,  # 1 if accepted selects the initial states
    q_row, k_row, v_row,  # elements from one token to the next
    state_row,  # elements from one state to the next
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L2NORM: tl.constexpr, SIGMOID: tl.constexpr, BOUND: tl.constexpr,
):
    """Run the gated delta rule over the tokens of each sequence, on states of a pool.

    Sequence n starts with state indices[n, accepted[n] - 1] of the pool, or with zeros if accepted[n] is 0.
    Without accepted it starts with state indices[n, 0]. The states after its last ``columns`` tokens are
    written to the states indices[n, :] of the pool. A state whose index is outside the pool is not written.
    If the initial state is outside the pool, the sequence is padding: its outputs are zero, and the pool does
    not change.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    nh = program // NV
    i_h = nh % HV
    n = nh // HV
    i_qk = i_h // (HV // H)
    first = n.to(tl.int64) * T
    length = T
    if packed != 0:
        first = tl.load(bounds + n).to(tl.int64)
        length = (tl.load(bounds + n + 1).to(tl.int64) - first).to(tl.int32)
    if gaps != 0:
        zero_gaps(o, bounds, n, T, N, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    mine = indices + n.to(tl.int64) * columns
    column = 0
    if counted != 0:
        column = tl.load(accepted + n).to(tl.int32) - 1
    slot = tl.load(mine + tl.minimum(tl.maximum(column, 0), columns - 1)).to(tl.int64)
    there = (slot >= 0) & (slot < P)
    zero_rows(o, first, tl.where(there, 0, length), i_h, HV, V, v0, BT, BV)
    length = tl.where(there, length, 0)
    in_k = tl.arange(0, BK)
    in_v = v0 + tl.arange(0, BV)
    tile = tile_of_state(in_k, in_v, K, V, True)
    of_head = i_h.to(tl.int64) * (K * V)
    # no scalar in the mask: in the interpreter of Triton 3.9, two scalars do not make a mask
    mask = (in_k < K)[:, None] & (in_v < tl.where(there & (column >= 0), V, 0))[None, :]
    S = tl.load(pool + (slot * state_row + of_head) + tile, mask=mask, other=0.0).to(tl.float32)
    unwritten = tl.maximum(length - columns, 0)
    for i in range(length):
        token = first + i
        b_q = vector(q, token * q_row + i_qk * K, in_k, K)
        b_k = vector(k, token * k_row + i_qk * K, in_k, K)
        b_v = vector(v, token * v_row + i_h * V, in_v, V)
        if L2NORM:
            b_q = of_unit_length(b_q)
            b_k = of_unit_length(b_k)
        b_q *= scale
        row = token * HV + i_h
        S = updated(S, b_k, b_k, b_v, beta, g, None, gk, None, a=None, b=None, A_log=A_log, dt_bias=dt_bias,
                    row=row, i_h=i_h, in_k=in_k, in_v=in_v, K=K, V=V, DELTA=True, PER_CHANNEL=False,
                    SIGMOID=SIGMOID, RATE=False, BOUND=BOUND, ERASE_RATE=False, UNDECAYED=False)
        b_o = tl.sum(S * b_q[:, None], 0)
        tl.store(o + row * V + in_v, b_o.to(o.dtype.element_ty), mask=in_v < V)
        left = S.to(pool.dtype.element_ty)
        S = left.to(tl.float32)
        if i >= unwritten:
            to = tl.load(mine + (i - unwritten)).to(tl.int64)
            known = (to >= 0) & (to < P)
            mask = (in_k < K)[:, None] & (in_v < tl.where(known, V, 0))[None, :]
            tl.store(pool + (to * state_row + of_head) + tile, left, mask=mask)


def launch_pool(plan: Plan, x: Inputs, pool: torch.Tensor, indices: torch.Tensor,
                accepted: torch.Tensor | None, flags: tuple[str, ...], scale: float,
                out_dtype: torch.dtype) -> torch.Tensor:
    """Run the plan's launch on a pool of states; return o [B, T, HV, V] in ``out_dtype``.

    It writes new states to the pool [P, HV, V, K], whose states are contiguous. x has no h0. Its tensors are
    contiguous, except that q, k and v may have any stride between tokens. indices: [N, columns], contiguous.
    accepted: [N] or None. accepted and bounds have the dtype of indices.
    """
    x = x._replace(q=with_rows(x.q), k=with_rows(x.k), v=with_rows(x.v))
    batch, launch = Batch(plan, x), plan.launch("recurrent_pool")
    HV, V = batch.HV, batch.V
    o = batch.new(V, dtype=out_dtype)
    sigmoid = (2.0 if "neg_eigval" in flags else 1.0) if "sigmoid" in flags else 0.0
    own = dict(pool=pool, P=pool.shape[0], columns=indices.shape[1], packed=int(batch.packed),
               gaps=int(batch.gaps), counted=int(accepted is not None), state_row=pool.stride(0), K=batch.K,
               L2NORM="l2norm" in flags, SIGMOID=sigmoid, BOUND=bound_of(flags), V=V)
    strips = -(-V // launch.block("BV"))
    for part in batch.parts(launch, o=o, indices=indices, accepted=accepted, scale=scale,
                            q_row=row_stride(x.q), k_row=row_stride(x.k), v_row=row_stride(x.v)):
        for name in ("accepted", "bounds"):  # a placeholder for a missing tensor, which is never read
            part[name] = part["indices"] if part[name] is None else part[name]
        start(launch, recurrent_pool, part["N"] * HV * strips, own, part)
    return o
