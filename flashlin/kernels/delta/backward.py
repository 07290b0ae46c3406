"""Backward kernels of the delta families. All of them are deterministic.

A reverse scan computes the gradients of the states, a scan recomputes the states, and a last kernel computes
the other gradients of all chunks in parallel. See forward.py for the notation; dh is the gradient of the
state after a chunk, and ds_ij = scale e^{G_i - G_j} (do_i . u_j) for j <= i. The reverse scan is split over V
like the forward scan. It computes:

    du_j = sum_{i >= j} scale e^{G_i - G_j} (q_i . k_j) do_i + e^{G_L - G_j} k_j dh
    dy = A^T du
    dv = beta dy
    dh' = e^{G_L} dh + scale sum_i e^{G_i} q_i^T do_i - sum_i e^{G_i} k_i^T dv_i

The other gradients are sums over V. The last kernel therefore has one program for each chunk, and needs no
partial sums. Let z_ij = -e^{G_i - G_j} (dy_i . u_j) for j < i, which is the gradient of (k_i . k_j) without
the factor beta_i. Then:

    dq_i = scale e^{G_i} do_i h^T + sum_j ds_ij k_j
    dk_i = e^{G_L - G_i} u_i dh^T - e^{G_i} dv_i h^T + sum_j ds_ji q_j
           + beta_i sum_j z_ij k_j + sum_j z_ji beta_j k_j
    dbeta_i = dy_i . (v_i - e^{G_i} k_i h) + k_i . sum_j z_ij k_j

With EARLIER (Comba), p_i and G_{i-1} replace k_i and G_i in predictions, that is, in z, dbeta and dh'. The
terms of dk with dv_i h^T and with sum_j z_ij k_j then belong to dp.

The gradient of the gate g_t is computed as in simple_gla: it sums all effects of tokens before t on t or
later tokens. To avoid differences of large sums, it leaves out pairs i = j, and starts each chunk from
<h, dh>.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.compat.traits import OVERLAPPED
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, precision, zero_forgotten
from flashlin.kernels.chunked import STATE_ALONE, Scalars
from flashlin.kernels.configs import FORGOTTEN
from flashlin.kernels.delta.forward import (
    delta_states,
    launch_forward,
    packed_scan,
    put_columns,
    states_between,
)
from flashlin.kernels.delta.inputs import Inputs
from flashlin.kernels.delta.packed import chunk_rows, put_tails, tails_of
from flashlin.kernels.delta.parts import enter_segments
from flashlin.kernels.delta.steps import rows_of, sums_read
from flashlin.kernels.sequence_split import back_by_transfers, own_part
from flashlin.kernels.tile_ops import (
    decays,
    first_slot,
    put,
    scaled_decay,
    sequence_of,
    state_offsets,
    tile,
    zero_gaps,
)

MUCH = 3 * 2**26  # if a table of states has more bytes, backward computes the time axis in two sections
# Tensors whose second dimension has tokens: [B, T, ...], or [HV, B * T] for betas and G.
OF_TOKENS = ("q", "k", "v", "g", "A", "u", "dy", "do", "betas", "G", "dq", "dk", "dv", "dbeta", "dg")


@triton.jit(do_not_specialize=["T", "N", "R", "L", "scale"])
def delta_reverse(
    q, k, p, do, A, A_low, betas, G, dht, dy, dh0, dstates, undivided, bounds, scale, T, N, H, HV, R, L,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, EARLIER: tl.constexpr, HAS_DHT: tl.constexpr, HAS_DH0: tl.constexpr,
    ALONE: tl.constexpr, V_FIRST: tl.constexpr, HALF: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run the reverse scan of a delta rule, from the last chunk to the first.

    It writes dy [rows, HV, V], the gradient of y in forward.py; dstates, the gradient of the state after each
    chunk; and dh0, the gradient of h0.

    ALONE: write only dh0, the gradient of the initial state of each segment except the first of a sequence,
    as if the final state of the segment had no gradient.

    q, k: [rows, H, K].
    p: [rows, H, K], or None.
    do: [rows, HV, V].
    A, A_low: [rows, HV, BT].
    betas, G: [HV, R], fp32.
    dht: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K].
    dy: [rows, HV, V], or None.
    dh0: [N, HV, K, V] or, with V_FIRST, [N, HV, V, K]; with ALONE, [segments, ...].
    dstates: [slots, HV, K, V], one for each chunk, or None.
    undivided: [N, HV], int32, or None.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    own = program // NV
    i_h = own % HV
    i_qk = i_h // (HV // H)
    n, i_part, first, length, last, entered = own_part(own // HV, i_h, undivided, bounds, T, N, HV, L,
                                                       VARLEN=VARLEN, REVERSE=True)
    if ALONE:
        length = tl.where(i_part > 0, length, 0)
    if HAS_DHT:
        at, inside = state_offsets(entered * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        dh = tl.load(dht + at, mask=inside, other=0.0).to(tl.float32)
    else:
        dh = tl.zeros([BK, BV], dtype=tl.float32)
    rows = tl.arange(0, BT)
    later = rows[:, None] <= rows[None, :]
    chunks = (length + BT - 1) // BT
    for i_c in range(chunks):
        t0 = (chunks - 1 - i_c) * BT
        b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        b_do = tile(do, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV).to(b_q.dtype)
        b_A = tile(A, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_beta = rows_of(betas, first, t0, length, i_h, R, BT)
        D, total = decays(G, G, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY)
        b_dh = dh.to(b_k.dtype)
        if not ALONE:
            slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
            to, whole = state_offsets(slot, 0, v0, K, V, BK, BV, False)
            tl.store(dstates + to, b_dh, mask=whole)
        s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        du = tl.dot(b_k, b_dh, input_precision=PRECISION)
        if DECAY == 0:
            s = tl.where(later, s * scale, 0.0)
            b_w = (b_do * scale).to(b_do.dtype)
        else:
            s *= scaled_decay(-D, -D, later, scale)
            du *= tl.exp2(total - D)[:, None]
            b_w = (b_do * (tl.exp2(D) * scale)[:, None]).to(b_do.dtype)
            dh *= tl.exp2(total)
        du += tl.dot(s.to(b_do.dtype), b_do, input_precision=PRECISION)
        # If keys resemble each other, the terms of A^T du largely cancel, so the rounding of both operands is
        # compensated.
        b_du = du.to(b_A.dtype)
        b_dy = tl.dot(tl.trans(b_A), b_du, input_precision=PRECISION)
        if HALF:
            b_low = tile(A_low, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
            b_dy += tl.dot(tl.trans(b_A), (du - b_du).to(b_A.dtype), input_precision=PRECISION)
            b_dy += tl.dot(tl.trans(b_low), b_du, input_precision=PRECISION)
        if not ALONE:
            put(dy, b_dy, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        if DECAY == 0:
            b_dv = b_dy * b_beta[:, None]
        else:
            read = sums_read(G, D, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY, EARLIER=EARLIER)
            b_dv = b_dy * (b_beta * tl.exp2(read))[:, None]
        dh += tl.dot(tl.trans(b_q), b_w, input_precision=PRECISION)
        b_p = b_k
        if EARLIER:
            b_p = tile(p, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        dh -= tl.dot(tl.trans(b_p), b_dv.to(b_k.dtype), input_precision=PRECISION)
    if ALONE:
        at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(dh0 + at, dh, mask=inside & (length > 0))
    elif HAS_DH0:
        at, inside = state_offsets(n * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(dh0 + at, dh, mask=inside & (i_part == 0))


@triton.jit
def grads_of_chunk(q, k, p, v, do, u, dy, betas, G, states, dstates, dq, dk, dp, dv, dbeta, dg, scale, n,
                   first, t0, length, i_h, H, HV, R, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                   BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, EARLIER: tl.constexpr,
                   PRECISION: tl.constexpr):
    """Compute and store the gradients dq, dk, dp, dv, dbeta and dg of one chunk and head."""
    i_qk = i_h // (HV // H)
    rows = tl.arange(0, BT)
    below = rows[:, None] > rows[None, :]
    inside = t0 + rows < length
    b_beta = rows_of(betas, first, t0, length, i_h, R, BT)
    D, total = decays(G, G, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY)
    read = sums_read(G, D, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY, EARLIER=EARLIER)
    slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
    ds = tl.zeros([BT, BT], dtype=tl.float32)
    z = tl.zeros([BT, BT], dtype=tl.float32)
    b_dbeta = tl.zeros([BT], dtype=tl.float32)
    for v0 in range(0, V, BV):
        b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_do = tile(do, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV).to(b_v.dtype)
        b_u = tile(u, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_dy = tile(dy, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        ds += tl.dot(b_do, tl.trans(b_u), input_precision=PRECISION)
        z += tl.dot(b_dy, tl.trans(b_u), input_precision=PRECISION)
        wide = b_dy.to(tl.float32)
        b_dbeta += tl.sum(wide * b_v.to(tl.float32), 1)
        put(dv, wide * b_beta[:, None], first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], ds, 0.0), 1) * scale
    if DECAY == 0:
        ds = tl.where(below, ds * scale, 0.0)
        z = tl.where(below, -z, 0.0)
    else:
        between = scaled_decay(D, D, below, 1.0)
        ds *= between * scale
        z *= -scaled_decay(read, D, below, 1.0) if EARLIER else -between
    if EARLIER:
        # Neighbouring tokens have no decay between them. Their terms in dg would cancel only in exact
        # arithmetic.
        neighbours = rows[:, None] == rows[None, :] + 1
        near = tl.where(neighbours, z, 0.0).to(k.dtype.element_ty)
        z = tl.where(neighbours, 0.0, z)
        # The terms of dg from predictions with p; ``here`` is for the other terms.
        earlier = tl.zeros([BT], dtype=tl.float32)
    here = tl.zeros([BT], dtype=tl.float32)
    left = tl.zeros([BT], dtype=tl.float32)
    across = 0.0
    for k0 in range(0, K, BK):
        b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
        b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
        b_ds = ds.to(b_k.dtype)
        b_z = z.to(b_k.dtype)
        from_h = tl.zeros([BT, BK], dtype=tl.float32)
        dy_h = tl.zeros([BT, BK], dtype=tl.float32)
        to_h = tl.zeros([BT, BK], dtype=tl.float32)
        for v0 in range(0, V, BV):
            at, whole = state_offsets(slot, k0, v0, K, V, BK, BV, False)
            h = tl.load(states + at, mask=whole, other=0.0)
            dh = tl.load(dstates + at, mask=whole, other=0.0)
            b_do = tile(do, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV).to(h.dtype)
            b_u = tile(u, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            b_dy = tile(dy, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            from_h += tl.dot(b_do, tl.trans(h), input_precision=PRECISION)
            dy_h += tl.dot(b_dy, tl.trans(h), input_precision=PRECISION)
            to_h += tl.dot(b_u, tl.trans(dh), input_precision=PRECISION)
            if DECAY != 0:
                across += tl.sum(tl.sum(h.to(tl.float32) * dh.to(tl.float32), 1), 0)
        if DECAY == 0:
            from_h *= scale
        else:
            from_h *= (tl.exp2(D) * scale)[:, None]
            dy_h *= tl.exp2(read)[:, None]
            to_h *= tl.exp2(total - D)[:, None]
        b_p = b_k
        if EARLIER:
            b_p = tile(p, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
        wide_q = b_q.to(tl.float32)
        wide_k = b_k.to(tl.float32)
        scaled_p = (b_p * b_beta[:, None]).to(b_k.dtype)
        if EARLIER:  # dp comes first: this order spills least with p, and more without p
            p_rows = tl.dot(b_z, b_k, input_precision=PRECISION) - dy_h
            earlier += tl.sum(scaled_p.to(tl.float32) * p_rows, 1)
            p_rows += tl.dot(near, b_k, input_precision=PRECISION)
            b_dbeta += tl.sum(b_p.to(tl.float32) * p_rows, 1)
            put(dp, p_rows * b_beta[:, None], first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            q_rows = from_h + tl.dot(b_ds, b_k, input_precision=PRECISION)
            here += tl.sum(wide_q * q_rows, 1)
            put(dq, q_rows + diagonal[:, None] * wide_k, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            k_columns = tl.dot(tl.trans(b_ds), b_q, input_precision=PRECISION)
            k_columns += tl.dot(tl.trans(b_z), scaled_p, input_precision=PRECISION)
            here -= tl.sum(wide_k * k_columns, 1)
            k_columns += tl.dot(tl.trans(near), scaled_p, input_precision=PRECISION)
            left += tl.sum(wide_k * to_h, 1)
            b_dk = to_h + k_columns
        else:
            q_rows = tl.dot(b_ds, b_k, input_precision=PRECISION)
            k_rows = tl.dot(b_z, b_k, input_precision=PRECISION)
            k_columns = tl.dot(tl.trans(b_ds), b_q, input_precision=PRECISION) + tl.dot(
                tl.trans(b_z), scaled_p, input_precision=PRECISION)
            b_dbeta += tl.sum(wide_k * (k_rows - dy_h), 1)
            k_rows = (k_rows - dy_h) * b_beta[:, None]
            if DECAY != 0:
                here += tl.sum(wide_q * (from_h + q_rows), 1) + tl.sum(wide_k * (k_rows - k_columns), 1)
                left += tl.sum(wide_k * to_h, 1)
            put(dq, from_h + q_rows + diagonal[:, None] * wide_k, first, t0, length, i_h, HV, D=K, d0=k0,
                BT=BT, BD=BK)
            b_dk = to_h + k_rows + k_columns
        put(dk, b_dk + diagonal[:, None] * wide_q, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
    tl.store(dbeta + (first + t0 + rows) * HV + i_h, b_dbeta, mask=inside)
    if DECAY != 0:
        b_dg = tl.sum(tl.where(rows[:, None] >= rows[None, :], here[:, None], left[:, None]),
                      0) + across * tl.exp2(total)
        if EARLIER:
            b_dg += tl.sum(tl.where(rows[:, None] > rows[None, :], earlier[:, None], 0.0), 0)
        tl.store(dg + (first + t0 + rows) * HV + i_h, b_dg, mask=inside)


@triton.jit(do_not_specialize=["T", "N", "R", "S", "scale"])
def delta_grads(
    q, k, p, v, do, u, dy, betas, G, states, dstates, dq, dk, dp, dv, dbeta, dg, bounds, scale, T, N, H, HV,
    R, S, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, EARLIER: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dq, dk, dp, dv, dbeta and dg of all chunks; S programs divide the chunks of a sequence.

    q, k: [rows, H, K].
    p: [rows, H, K], or None.
    v, do, u, dy: [rows, HV, V].
    betas, G: [HV, R], fp32.
    states, dstates: [slots, HV, K, V], one for each chunk.
    dq, dk: [rows, HV, K].
    dp: [rows, HV, K], or None.
    dv: [rows, HV, V].
    dbeta: [rows, HV].
    dg: [rows, HV], fp32.
    bounds: [N + 1] or None.
    """
    program = tl.program_id(0)
    i_h = program % HV
    share = program // HV % S
    n = program // HV // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:  # a compile-time test; with "and", the code inside would still be compiled
        if share == 0:
            for k0 in range(0, K, BK):
                zero_gaps(dq, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dk, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                if EARLIER:
                    zero_gaps(dp, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            for v0 in range(0, V, BV):
                zero_gaps(dv, bounds, n, T, N, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            zero_gaps(dbeta, bounds, n, T, N, i_h, HV, D=1, d0=0, BT=BT, BD=1)
            if DECAY != 0:
                zero_gaps(dg, bounds, n, T, N, i_h, HV, D=1, d0=0, BT=BT, BD=1)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            grads_of_chunk(q=q, k=k, p=p, v=v, do=do, u=u, dy=dy, betas=betas, G=G, states=states,
                           dstates=dstates, dq=dq, dk=dk, dp=dp, dv=dv, dbeta=dbeta, dg=dg, scale=scale, n=n,
                           first=first, t0=t0, length=length, i_h=i_h, H=H, HV=HV, R=R, K=K, V=V, BT=BT,
                           BK=BK, BV=BV, DECAY=DECAY, EARLIER=EARLIER, PRECISION=PRECISION)
    else:  # one chunk for each program; even a loop of one step would keep all masks in registers
        grads_of_chunk(q=q, k=k, p=p, v=v, do=do, u=u, dy=dy, betas=betas, G=G, states=states,
                       dstates=dstates, dq=dq, dk=dk, dp=dp, dv=dv, dbeta=dbeta, dg=dg, scale=scale, n=n,
                       first=first, t0=share * BT, length=length, i_h=i_h, H=H, HV=HV, R=R, K=K, V=V, BT=BT,
                       BK=BK, BV=BV, DECAY=DECAY, EARLIER=EARLIER, PRECISION=PRECISION)


def tables(batch: Batch, part: dict[str, Any], divided: bool, BT: int) -> int:
    """Make the table ``dstates``, with one entry for each chunk, and store it in part.

    Return the number of tokens of the first section of the time axis. It is T, or a third of T in whole
    chunks if the table is larger than MUCH and divided is True. In the second case, this function also makes
    ``states``. Only the first section of ``states`` has its own memory. The second section overwrites it and
    the first section of ``dstates``, which is not needed any longer.

    part: the arguments that all launches of a slice share, see ``Batch.parts``.
    divided: True if the kernels after the reverse scan can compute one section after the other, and
        sequences are not split.
    """
    N, like = part["N"], (batch.HV, batch.K, batch.V)
    T: int = batch.T
    tokens, part["whole"], part["entries"] = T, T, T // BT + 1
    if divided and part["slots"] * math.prod(like) * part["v"].element_size() > MUCH:
        tokens = -(-T // (3 * BT)) * BT
    if tokens == T:
        part["dstates"] = part["v"].new_empty(part["slots"], *like)
    else:
        part["entries"] = (T + tokens) // BT
        part["slots"] = N * part["entries"] - tokens // BT
        part["states"] = part["v"].new_empty(N * part["entries"], *like)
        part["dstates"] = part["states"][tokens // BT:]
    return tokens


def sections(batch: Batch, part: dict[str, Any], tokens: int, BT: int,
             v_first: bool) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the kernels that restore states and compute gradients, for each section.

    ``ht`` carries the states from the first section to the second. With one section, ``ht`` is None, and this
    function makes ``states``. Views of the second section have gaps between sequences. The kernels use only
    their addresses, and the distance ``whole`` between sequences.

    tokens: tokens of the first section, see ``tables``. v_first: the layout of states.
    """
    T, HV, K, V = batch.T, batch.HV, batch.K, batch.V
    part["ht"] = None
    if tokens == T:
        part["states"] = torch.empty_like(part["dstates"])
        yield part
        return
    part["ht"] = part["v"].new_empty(part["N"], HV, *((V, K) if v_first else (K, V)), dtype=torch.float32)
    yield {**part, "T": tokens, "S": tokens // BT}
    later = {name: part[name][:, tokens:] for name in OF_TOKENS if part[name] is not None}
    yield {**part, **later, "T": T - tokens, "S": (T - tokens) // BT, "rows": part["rows"] - tokens,
           "h0": part["ht"], "dstates": part["dstates"][tokens // BT:],
           "slots": part["slots"] - tokens // BT}


def launch_backward(plan: Plan, x: Inputs, how: Scalars, do: torch.Tensor, dht: torch.Tensor | None,
                    needs: frozenset[str], A: torch.Tensor, A_low: torch.Tensor | None,
                    lines: torch.Tensor, facts: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Run the backward launches of a plan; return the gradients by tensor name.

    x, how: the arguments of launch_forward. A, A_low, lines, facts: the results of launch_forward for
    backward.
    do: gradient of the outputs, [B, T, HV, V]. dht: gradient of the final states, or None. needs: names of
    the tensors whose gradients are needed. The gradients of g and h0 are float32.
    """
    batch, whole = Batch(plan, x), needs != STATE_ALONE
    if batch.packed and OVERLAPPED in plan.launch("delta_overlapped_back", "delta_reverse").traits:
        return packed_backward(batch, x, how, do, dht, needs, A, A_low, lines)
    HV, K, V = batch.HV, batch.K, batch.V
    reversing = plan.launch("delta_overlapped_back", "delta_reverse")
    finishing = plan.launch("delta_overlapped_grads", "delta_grads")
    restoring = plan.launch("delta_states", "delta_overlapped")
    grads = batch.gradients(needs, "q", "k", "p", "v", "beta", "g")
    constants = dict(VARLEN=batch.packed, PRECISION=precision(plan), K=K, V=V, DECAY=batch.decay,
                     EARLIER=x.p is not None)
    scanned = dict(constants, V_FIRST=how.state_v_first)
    reverse = dict(scanned, HALF=A_low is not None)
    short = {name: scanned[name] for name in ("V", "DECAY", "V_FIRST")}
    kernel, backwards = delta_reverse, reverse
    if OVERLAPPED in reversing.traits:
        from flashlin.kernels.delta.overlapping_back import delta_overlapped_back
        kernel, backwards = delta_overlapped_back, short
    overlapped, BT = OVERLAPPED in finishing.traits, finishing.block("BT")
    divided = whole and not batch.split and OVERLAPPED in (
        finishing.traits & restoring.traits & reversing.traits)
    for part in batch.parts(reversing, **grads, do=do, dht=dht, A=A, A_low=A_low, scale=how.scale,
                            R=lines.shape[2]):
        put_columns(part, lines, facts)
        if overlapped or OVERLAPPED in reversing.traits:
            part["do"] = part["do"].to(x.v.dtype)  # these kernels load tensors of one dtype
        part["dy"] = part["dv"] if overlapped else torch.empty_like(part["v"])
        part["u"] = part["dq"] if overlapped and K == V else torch.empty_like(part["v"])
        tokens = tables(batch, part, divided, BT)
        enter_segments(batch, part, reverse, has_dht=dht is not None, back=True)
        back_by_transfers(batch, part, kernel, backwards, "dy", "dstates")
        batch.scan(kernel, dict(backwards, HAS_DHT=part["dht"] is not None, HAS_DH0=part["dh0"] is not None,
                                ALONE=False), {**part, "windows_back": None})
        if not whole or not batch.T:
            continue
        for mine in sections(batch, part, tokens, BT, how.state_v_first):
            ends = dict(HAS_H0=mine["h0"] is not None)
            if OVERLAPPED in restoring.traits:
                from flashlin.kernels.delta.overlapping import delta_overlapped
                batch.scan(delta_overlapped, dict(short, **ends, o=mine["u"], HAS_HT=mine["ht"] is not None),
                           {**mine, "q": None})
            else:
                batch.scan(delta_states, dict(scanned, **ends), mine)
            programs = mine["N"] * mine["S"] * HV
            if overlapped:
                from flashlin.kernels.delta.overlapping_grads import delta_overlapped_grads
                start(finishing, delta_overlapped_grads, programs, dict(
                    K=K, DECAY=batch.decay, FORGOTTEN=FORGOTTEN), mine)
            else:
                start(finishing, delta_grads, programs, dict(constants, GAPS=batch.gaps), mine)
            mine.clear()  # frees the tables before gradients are summed
    if not overlapped:
        zero_forgotten(grads["dg"], x.g)
    return batch.by_tensor(grads)


def packed_backward(batch: Batch, x: Inputs, how: Scalars, do: torch.Tensor, dht: torch.Tensor | None,
                    needs: frozenset[str], A: torch.Tensor, A_low: torch.Tensor | None,
                    lines: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Run the backward of packed sequences in Gluon (``packed.py``), like ``launch_backward``."""
    from flashlin.kernels.delta.overlapping_back import delta_overlapped_back
    from flashlin.kernels.delta.overlapping_grads import delta_overlapped_grads
    plan, HV, K, V, bounds = batch.plan, batch.HV, batch.K, batch.V, x.bounds
    assert bounds is not None
    finishing = plan.launch("delta_overlapped_grads")
    BT, do, middle = finishing.block("BT"), do.to(x.v.dtype), states_between(batch, how)
    chunks, grads = batch.T // BT, batch.gradients(needs, "q", "k", "v", "beta", "g")
    states, dstates = (x.v.new_empty(chunks, HV, K, V) for _ in range(2))
    made: dict[str, torch.Tensor | None] = {}
    short = dict(V=V, DECAY=batch.decay, V_FIRST=how.state_v_first)
    for part in batch.parts(finishing, **grads, do=do, A=A, A_low=A_low, scale=how.scale, R=lines.shape[2],
                            betas=lines[0], G=lines[1], states=states, dstates=dstates, windows_back=None,
                            whole=batch.T, entries=chunks):
        part["dy"], part["u"] = part["dv"], part["dq"] if K == V else torch.empty_like(x.v)
        part["slots"] = chunks
        enter_segments(batch, part, dict(short, K=K, VARLEN=True, PRECISION=precision(plan), EARLIER=False,
                                         HALF=True), has_dht=True)
        packed_scan(batch, how, {**part, "q": None, "o": part["u"], "ht": middle})
        tails = tails_of(plan, x, "q", "k", "v", "beta", "g", do=do)
        pulled = tails.pop("do")
        own = Inputs(**tails, p=None, h0=middle, bounds=None)
        _, _, *kept = launch_forward(plan, own, how)
        made = launch_backward(plan, own, how, pulled, dht, needs | {"h0"}, *kept)  # type: ignore[arg-type]
        part["dht"] = made["h0"]
        back_by_transfers(batch, part, delta_overlapped_back, short, "dy", "dstates")
        batch.scan(delta_overlapped_back, dict(short, HAS_DHT=True, HAS_DH0=part["dh0"] is not None,
                                               ALONE=False), part)
        if needs != STATE_ALONE:
            part["chunk_rows"] = chunk_rows(plan, bounds, batch.T)
            start(finishing, delta_overlapped_grads, chunks * HV, dict(
                K=K, DECAY=batch.decay, FORGOTTEN=FORGOTTEN), {**part, "N": 1, "T": chunks * BT})
    found = batch.by_tensor(grads)
    for name in ("q", "k", "v", "beta", "g") if needs != STATE_ALONE else ():
        if (whole := found[name]) is not None and (tail := made[name]) is not None:
            put_tails(plan, whole, tail, bounds)
    return found
