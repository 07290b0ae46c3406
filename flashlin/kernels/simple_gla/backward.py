"""Backward kernels of the scalar-decay family, deterministic and without atomics.

In the notation of ``forward.py``, dh is the gradient of the state that leaves a chunk, and ds_ij = scale
e^{G_i - G_j} (do_i . v_j) for j <= i:

    dq_i = scale e^{G_i} do_i h^T + sum_j ds_ij k_j
    dk_j = e^{G_L - G_j} v_j dh^T + sum_i ds_ij q_i
    dv_j = e^{G_L - G_j} k_j dh + sum_i scale e^{G_i - G_j} (q_i . k_j) do_i
    dh' = e^{G_L} dh + scale sum_i e^{G_i} q_i^T do_i

The gate g_t scales everything that passes from before token t to token t or later. For the chunk that
contains t, let

    a_i = q_i . dq_i
    b_j = k_j . (the second term of dk_j)
    c_j = k_j . (the first term of dk_j, what token j leaves to later chunks)

Then

    dg_t = sum_{i >= t} (a_i - b_i) + sum_{j < t} c_j + e^{G_L} <h, dh>

This avoids differences of two large sums. The terms of pairs i = j cancel on paper but not in floating point.
Under strong decays they exceed everything else, so a and b leave them out. Each chunk starts again with
<h, dh>, so rounding errors do not add up along the sequence.

Without a gate, there are three scans, each split so that no partial sums are needed. A decay that is the same
for all tokens, or no decay, needs no gradient. ``simple_gla_dq`` multiplies by the state, and
``simple_gla_dk`` by the gradient of the state. Both products sum over V, so these two kernels split K. The
products of ``simple_gla_dv`` sum over K, so it splits V.

With a gate, there are two scans and one kernel over all chunks. ``simple_gla_states`` stores the state that
enters each chunk. ``simple_gla_dv`` also stores the gradient of the state that leaves it.
``simple_gla_grads`` computes everything else, with one program per chunk and head. The plan may also choose
these kernels for calls without a gate.

If heads of v share q and k (Mamba2), ``simple_gla_shared`` replaces the last kernel and adds the dq and dk of
these heads. It adds ds over these heads first. Then the sums over pairs in dq and dk need one product for all
heads. The scores q_i . k_j are also the same for all heads. The terms of one head's gate use them, and the
products q_i h and k_j dh, which have V columns (in Mamba2, V is smaller than K):

    a_i = scale e^{G_i} do_i . (q_i h) + sum_j ds_ij (q_i . k_j)
    b_j = sum_i ds_ij (q_i . k_j)
    c_j = e^{G_L - G_j} v_j . (k_j dh)

The gradient of the state that leaves a chunk has as many elements as the chunk's rows of dq and dk if V is
twice the tokens of a chunk. Then it is stored in these rows until its only reader overwrites them, and it
needs no memory of its own. The constant SIDE enables this and is the side of the stored blocks.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.compat.traits import OVERLAPPED
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, precision, summed, zero_forgotten
from flashlin.kernels.chunked import STATE_ALONE, Scalars
from flashlin.kernels.configs import BLOCK
from flashlin.kernels.sequence_split import by_decays, part_of
from flashlin.kernels.simple_gla.inputs import Inputs
from flashlin.kernels.simple_gla.parts import simple_gla_alone
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


@triton.jit(do_not_specialize=["T", "N", "R", "L", "scale"])
def simple_gla_dq(
    k, v, do, G, gamma, h0, dq, bounds, scale, T, N, H, R, L, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, HAS_H0: tl.constexpr,
    V_FIRST: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dq for decays that need no gradient, by a scan over the chunks.

    One program computes BK channels of one head.

    k: [rows, H // GROUP, K].
    v, do: [rows, H, V].
    G: [H, R], fp32.
    gamma: [H].
    h0: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K]; the states that enter the sequences or, if
        these are split, the segments.
    dq: [rows, H, K].
    bounds: [N + 1] or None.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    program = tl.program_id(0)
    i_k = program % NK
    k0 = i_k * BK
    own = program // NK
    i_h = own % H
    n, i_part, first, length, last = part_of(own // H, bounds, T, N, L, VARLEN)
    if GAPS:
        if i_part == 0:
            zero_gaps(dq, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
    at, inside = state_offsets(own, k0, 0, K, V, BK, BV, V_FIRST)
    if HAS_H0:
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    rows = tl.arange(0, BT)
    causal = rows[:, None] >= rows[None, :]
    for t0 in range(0, length, BT):
        b_k = tile(k, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=k0, BT=BT, BD=BK)
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=0, BT=BT, BD=BV)
        b_do = tile(do, first, t0, length, i_h, H, D=V, d0=0, BT=BT, BD=BV).to(b_v.dtype)
        D, total = decays(G, gamma, first, t0, length, i_h, R, BT=BT, BLOCK=BLOCK, DECAY=DECAY)
        p = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_dq = tl.dot(b_do, tl.trans(h).to(b_do.dtype), input_precision=PRECISION)
        if DECAY == 0:
            ds = tl.where(causal, p * scale, 0.0)
            b_dq *= scale
            b_w = b_k
        else:
            ds = p * scaled_decay(D, D, causal, scale)
            b_dq *= (tl.exp2(D) * scale)[:, None]
            b_w = (b_k * tl.exp2(total - D)[:, None]).to(b_k.dtype)
            h *= tl.exp2(total)
        b_dq += tl.dot(ds.to(b_k.dtype), b_k, input_precision=PRECISION)
        h += tl.dot(tl.trans(b_w), b_v, input_precision=PRECISION)
        put(dq, b_dq, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)


@triton.jit(do_not_specialize=["T", "N", "R", "L", "scale"])
def simple_gla_dk(
    q, v, do, G, gamma, dht, dk, bounds, scale, T, N, H, R, L, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, HAS_DHT: tl.constexpr,
    V_FIRST: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dk for decays that need no gradient, by a scan over the chunks from the last to the first.

    One program computes BK channels of one head.

    q: [rows, H // GROUP, K].
    v, do: [rows, H, V].
    G: [H, R], fp32.
    gamma: [H].
    dht: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K]; gradients of the states that leave the
        sequences or, if these are split, the segments.
    dk: [rows, H, K].
    bounds: [N + 1] or None.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    program = tl.program_id(0)
    i_k = program % NK
    k0 = i_k * BK
    own = program // NK
    i_h = own % H
    n, i_part, first, length, last = part_of(own // H, bounds, T, N, L, VARLEN)
    if GAPS:
        if i_part == 0:
            zero_gaps(dk, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
    at, inside = state_offsets(own, k0, 0, K, V, BK, BV, V_FIRST)
    if HAS_DHT:
        dh = tl.load(dht + at, mask=inside, other=0.0).to(tl.float32)
    else:
        dh = tl.zeros([BK, BV], dtype=tl.float32)
    rows = tl.arange(0, BT)
    later = rows[:, None] <= rows[None, :]
    chunks = (length + BT - 1) // BT
    for i_c in range(chunks):
        t0 = (chunks - 1 - i_c) * BT
        b_q = tile(q, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=k0, BT=BT, BD=BK)
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=0, BT=BT, BD=BV)
        b_do = tile(do, first, t0, length, i_h, H, D=V, d0=0, BT=BT, BD=BV).to(b_v.dtype)
        D, total = decays(G, gamma, first, t0, length, i_h, R, BT=BT, BLOCK=BLOCK, DECAY=DECAY)
        p = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        onwards = tl.dot(b_v, tl.trans(dh).to(b_v.dtype), input_precision=PRECISION)
        if DECAY == 0:
            ds = tl.where(later, p * scale, 0.0)
            b_w = (b_q * scale).to(b_q.dtype)
        else:
            ds = p * scaled_decay(-D, -D, later, scale)
            onwards *= tl.exp2(total - D)[:, None]
            b_w = (b_q * (tl.exp2(D) * scale)[:, None]).to(b_q.dtype)
        b_dk = tl.dot(ds.to(b_q.dtype), b_q, input_precision=PRECISION)
        b_dk += onwards
        if DECAY != 0:
            dh *= tl.exp2(total)
        dh += tl.dot(tl.trans(b_w), b_do, input_precision=PRECISION)
        put(dk, b_dk, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)


@triton.jit
def dstate_at(dstates, rest, tails, n, first, t0, length, i_h, H, k0, v0, K: tl.constexpr, V: tl.constexpr,
              BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIDE: tl.constexpr):
    """Return pointers to a [BK, BV] tile of the gradient of the state that leaves a chunk, and its mask.

    Without SIDE, the gradient is in dstates, which has one entry per chunk. With SIDE, it is in the chunk's 2
    BT rows of dq and dk, as blocks [SIDE, SIDE]. Blocks of the same rows of the state are one below the
    other; blocks of the same columns are next to each other. So SIDE rows of the state are in SIDE columns of
    dq and dk, and the reader overwrites these columns after it has read them. The last chunk of a sequence
    may have too few rows, so its gradient is in ``tails``.

    dstates: [slots, H, K, V]; with SIDE, dq [rows, H, K].
    rest, tails: with SIDE, dk [rows, H, K], and [N, V rounded up to SIDE, H, K].
    first, length: of the sequence or segment.
    k0, v0: the first row and column of the tile, multiples of SIDE and BV.
    """
    if SIDE == 0:
        slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
        at, inside = state_offsets(slot, k0, v0, K, V, BK, BV, False)
        return dstates + at, inside
    else:
        TALL: tl.constexpr = (V + SIDE - 1) // SIDE * SIDE
        k = tl.arange(0, BK)
        v = tl.arange(0, BV)
        rows = (k % SIDE)[:, None] + (v // SIDE * SIDE)[None, :]
        columns = (k // SIDE * SIDE)[:, None] + (v % SIDE)[None, :]
        whole = t0 + BT <= length
        row = tl.where(whole, first + t0 + v0 % BT // SIDE * SIDE, n.to(tl.int64) * TALL + v0 // SIDE * SIDE)
        begin = (row * H + i_h) * K + k0
        if BV < SIDE:
            begin += v0 % SIDE // BV * BV  # written so that the compiler can see the alignment
        home = tl.where(whole, tl.where(v0 < BT, dstates, rest), tails)
        return home + begin + (rows * (H * K) + columns), (k0 + k < K)[:, None] & (v0 + v < V)[None, :]


@triton.jit(do_not_specialize=["T", "N", "R", "L", "scale"])
def simple_gla_dv(
    q, k, do, G, gamma, dht, dv, dh0, dstates, rest, tails, bounds, scale, T, N, H, R, L, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIDE: tl.constexpr,
    DECAY: tl.constexpr, HAS_DHT: tl.constexpr, HAS_DH0: tl.constexpr, V_FIRST: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dv and dh0 by a scan over the chunks from the last to the first.

    One program computes BV columns of one head. If ``dstates`` is given, it also stores the gradient of the
    state that leaves each chunk (see ``dstate_at``).

    q, k: [rows, H // GROUP, K].
    do: [rows, H, V].
    G: [H, R], fp32.
    gamma: [H].
    dht: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K].
    dv: [rows, H, V].
    dh0: [N, H, K, V] or, with V_FIRST, [N, H, V, K].
    dstates: receives the gradients of states, see dstate_at; or None.
    rest, tails: with SIDE, memory for gradients of states in addition to dstates, see dstate_at.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    own = program // NV
    i_h = own % H
    n, i_part, first, length, last = part_of(own // H, bounds, T, N, L, VARLEN)
    if GAPS:
        if i_part == 0:
            zero_gaps(dv, bounds, n, T, N, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
    at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
    if HAS_DHT:
        dh = tl.load(dht + at, mask=inside, other=0.0).to(tl.float32)
    else:
        dh = tl.zeros([BK, BV], dtype=tl.float32)
    rows = tl.arange(0, BT)
    later = rows[:, None] <= rows[None, :]
    chunks = (length + BT - 1) // BT
    for i_c in range(chunks):
        t0 = (chunks - 1 - i_c) * BT
        b_q = tile(q, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=0, BT=BT, BD=BK)
        b_k = tile(k, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=0, BT=BT, BD=BK)
        b_do = tile(do, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV).to(b_q.dtype)
        D, total = decays(G, gamma, first, t0, length, i_h, R, BT=BT, BLOCK=BLOCK, DECAY=DECAY)
        b_dh = dh.to(b_k.dtype)
        if dstates is not None:
            to, whole = dstate_at(dstates, rest, tails, n, first, t0, length, i_h, H, k0=0, v0=v0, K=K, V=V,
                                  BT=BT, BK=BK, BV=BV, SIDE=SIDE)
            tl.store(to, b_dh, mask=whole)
        s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        b_dv = tl.dot(b_k, b_dh, input_precision=PRECISION)
        if DECAY == 0:
            s = tl.where(later, s * scale, 0.0)
            b_w = (b_do * scale).to(b_do.dtype)
        else:
            s *= scaled_decay(-D, -D, later, scale)
            b_dv *= tl.exp2(total - D)[:, None]
            b_w = (b_do * (tl.exp2(D) * scale)[:, None]).to(b_do.dtype)
            dh *= tl.exp2(total)
        b_dv += tl.dot(s.to(b_do.dtype), b_do, input_precision=PRECISION)
        dh += tl.dot(tl.trans(b_q), b_w, input_precision=PRECISION)
        put(dv, b_dv, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_DH0:
        at, inside = state_offsets(n * H + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(dh0 + at, dh, mask=inside & (i_part == 0))


@triton.jit(do_not_specialize=["T", "N", "R", "L"])
def simple_gla_states(
    k, v, G, gamma, h0, states, bounds, T, N, H, R, L, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, HAS_H0: tl.constexpr, V_FIRST: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Recompute the state that enters each chunk and store it into ``states``.

    One program computes BV columns of one head's state.

    k: [rows, H // GROUP, K].
    v: [rows, H, V].
    G: [H, R], fp32.
    gamma: [H].
    h0: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K].
    states: [slots, H, K, V], one entry per chunk.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    own = program // NV
    i_h = own % H
    n, i_part, first, length, last = part_of(own // H, bounds, T, N, L, VARLEN)
    if HAS_H0:
        at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    for t0 in range(0, length, BT):
        b_k = tile(k, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=0, BT=BT, BD=BK)
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        D, total = decays(G, gamma, first, t0, length, i_h, R, BT=BT, BLOCK=BLOCK, DECAY=DECAY)
        slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
        to, whole = state_offsets(slot, 0, v0, K, V, BK, BV, False)
        tl.store(states + to, h.to(states.dtype.element_ty), mask=whole)
        b_w = (b_v * tl.exp2(total - D)[:, None]).to(b_v.dtype)
        h *= tl.exp2(total)
        h += tl.dot(tl.trans(b_k), b_w, input_precision=PRECISION)


@triton.jit
def grads_of_chunk(q, k, v, do, G, states, dstates, rest, tails, dq, dk, dg, scale, n, first, t0, length, i_h,
                   H, R, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                   BV: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Compute and store dq and dk [BT, K] and dg [BT] of one chunk and head.

    states: the states that enter the chunks.
    dstates: the gradients of the states that leave the chunks. With SIDE they are spread over dq (dstates),
        dk (rest) and tails, see ``dstate_at``.
    """
    rows = tl.arange(0, BT)
    D, total = decays(G, G, first, t0, length, i_h, R, BT=BT, BLOCK=BLOCK, DECAY=2)
    slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
    p = tl.zeros([BT, BT], dtype=tl.float32)
    for v0 in range(0, V, BV):
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        b_do = tile(do, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        p += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], p, 0.0), 1) * scale
    ds = (p * scaled_decay(D, D, rows[:, None] > rows[None, :], scale)).to(v.dtype.element_ty)
    here = tl.zeros([BT], dtype=tl.float32)
    left = tl.zeros([BT], dtype=tl.float32)
    across = 0.0
    for k0 in range(0, K, BK):
        b_q = tile(q, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        b_k = tile(k, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        from_h = tl.zeros([BT, BK], dtype=tl.float32)
        to_h = tl.zeros([BT, BK], dtype=tl.float32)
        for v0 in range(0, V, BV):
            at, whole = state_offsets(slot, k0, v0, K, V, BK, BV, False)
            h = tl.load(states + at, mask=whole, other=0.0)
            leaving, there = dstate_at(dstates, rest, tails, n, first, t0, length, i_h, H, k0=k0, v0=v0, K=K,
                                       V=V, BT=BT, BK=BK, BV=BV, SIDE=SIDE)
            dh = tl.load(leaving, mask=there, other=0.0)
            b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
            b_do = tile(do, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
            from_h += tl.dot(b_do, tl.trans(h), input_precision=PRECISION)
            to_h += tl.dot(b_v, tl.trans(dh), input_precision=PRECISION)
            across += tl.sum(h.to(tl.float32) * dh.to(tl.float32))
        if SIDE > 0:
            tl.debug_barrier()  # all threads have read the gradients that others overwrite below
        from_h *= (tl.exp2(D) * scale)[:, None]
        to_h *= tl.exp2(total - D)[:, None]
        from_h += tl.dot(ds, b_k, input_precision=PRECISION)
        k_columns = tl.dot(tl.trans(ds), b_q, input_precision=PRECISION)
        wide_q = b_q.to(tl.float32)
        wide_k = b_k.to(tl.float32)
        here += tl.sum(wide_q * from_h - wide_k * k_columns, 1)
        left += tl.sum(wide_k * to_h, 1)
        put(dq, from_h + diagonal[:, None] * wide_k, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        to_h += k_columns + diagonal[:, None] * wide_q
        put(dk, to_h, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
    b_dg = tl.sum(tl.where(rows[:, None] >= rows[None, :], here[:, None], left[:, None]), 0)
    b_dg += across * tl.exp2(total)
    tl.store(dg + (first + t0 + rows) * H + i_h, b_dg, mask=t0 + rows < length)


@triton.jit(do_not_specialize=["T", "N", "R", "S", "scale"])
def simple_gla_grads(
    q, k, v, do, G, states, dstates, rest, tails, dq, dk, dg, bounds, scale, T, N, H, R, S, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dq, dk and dg of all chunks.

    In a dense batch, a program computes one chunk of one head. In a packed batch, S programs per sequence and
    head loop over its chunks.

    states: the states that enter the chunks.
    dstates: the gradients of the states that leave the chunks. With SIDE they are spread over dq (dstates),
        dk (rest) and tails, see ``dstate_at``.

    q, k: [rows, H, K].
    v, do: [rows, H, V].
    G: [H, R], fp32.
    states: [slots, H, K, V], one entry per chunk.
    dstates, rest, tails: where the gradients of states are stored, see dstate_at.
    dq, dk: [rows, H, K].
    dg: [rows, H], fp32.
    bounds: [N + 1] or None.
    """
    program = tl.program_id(0)
    i_h = program % H
    share = program // H % S
    n = program // H // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:  # a compile-time test; with "and", the code inside would still be compiled
        if share == 0:
            for k0 in range(0, K, BK):
                zero_gaps(dq, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dk, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
            zero_gaps(dg, bounds, n, T, N, i_h, H, D=1, d0=0, BT=BT, BD=1)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            grads_of_chunk(
                q=q, k=k, v=v, do=do, G=G, states=states, dstates=dstates, rest=rest, tails=tails, dq=dq,
                dk=dk, dg=dg, scale=scale, n=n, first=first, t0=t0, length=length, i_h=i_h, H=H, R=R, K=K,
                V=V, BT=BT, BK=BK, BV=BV, SIDE=SIDE, BLOCK=BLOCK, PRECISION=PRECISION)
    else:  # one chunk per program; a loop that runs once would still keep every mask in registers
        grads_of_chunk(
            q=q, k=k, v=v, do=do, G=G, states=states, dstates=dstates, rest=rest, tails=tails, dq=dq,
            dk=dk, dg=dg, scale=scale, n=n, first=first, t0=share * BT, length=length, i_h=i_h, H=H, R=R, K=K,
            V=V, BT=BT, BK=BK, BV=BV, SIDE=SIDE, BLOCK=BLOCK, PRECISION=PRECISION)


@triton.jit
def grads_of_head(b_q, b_k, scores, b_dq, b_dk, b_ds, v, do, G, states, dstates, dg, scale, n, first, t0,
                  length, i_h, H, R, i_k, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                  BK: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Add one head's terms to the sums of dq, dk and ds over heads, and store its part of dg.

    Returns the three sums.

    b_q, b_k: rows of the chunk, [BT, BK].
    scores: [BT, BT], q_i . k_j for i > j, else 0.
    b_dq, b_dk: [BT, BK], the sums so far, without pairs of tokens within the chunk.
    b_ds: [BT, BT], the sum so far of ds for the pairs within the chunk.
    dg: receives [BT] per head: the part of the gradient that comes from these BK channels.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    rows = tl.arange(0, BT)
    D, total = decays(G, G, first, t0, length, i_h, R, BT=BT, BLOCK=BLOCK, DECAY=2)
    into = tl.exp2(D) * scale
    onwards = tl.exp2(total - D)
    slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
    p = tl.zeros([BT, BT], dtype=tl.float32)
    read = tl.zeros([BT], dtype=tl.float32)
    left = tl.zeros([BT], dtype=tl.float32)
    across = 0.0
    for v0 in range(0, V, BV):
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        b_do = tile(do, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        at, whole = state_offsets(slot, i_k * BK, v0, K, V, BK, BV, False)
        h = tl.load(states + at, mask=whole, other=0.0)
        dh = tl.load(dstates + at, mask=whole, other=0.0)
        p += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        across += tl.sum(h.to(tl.float32) * dh.to(tl.float32))
        read += tl.sum(tl.dot(b_q, h, input_precision=PRECISION) * b_do.to(tl.float32), 1)
        left += tl.sum(tl.dot(b_k, dh, input_precision=PRECISION) * b_v.to(tl.float32), 1)
        b_do = (b_do * into[:, None]).to(h.dtype)
        b_v = (b_v * onwards[:, None]).to(h.dtype)
        b_dq += tl.dot(b_do, tl.trans(h), input_precision=PRECISION)
        b_dk += tl.dot(b_v, tl.trans(dh), input_precision=PRECISION)
    ds = p * scaled_decay(D, D, rows[:, None] >= rows[None, :], scale)
    pairs = ds * scores
    here = into * read + tl.sum(pairs, 1) - tl.sum(pairs, 0)
    left *= onwards
    b_dg = tl.sum(tl.where(rows[:, None] >= rows[None, :], here[:, None], left[:, None]), 0)
    b_dg += across * tl.exp2(total)
    tl.store(dg + ((first + t0 + rows) * H + i_h) * NK + i_k, b_dg, mask=t0 + rows < length)
    return b_dq, b_dk, b_ds + ds


@triton.jit
def grads_of_share(q, k, v, do, G, states, dstates, dq, dk, dg, scale, n, first, t0, length, i_s, H, R, i_k,
                   K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                   BH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Compute and store dq and dk [BT, BK] of one chunk, summed over a slice of a group's heads.

    The GROUP heads that share q and k are divided into slices of at most BH heads. For each head, the part of
    dg that comes from these BK channels is stored as well.

    i_s, i_k: indices of the slice of heads, and of the block of BK channels.
    """
    SHARES: tl.constexpr = (GROUP + BH - 1) // BH
    i_g = i_s // SHARES
    k0 = i_k * BK
    rows = tl.arange(0, BT)
    b_q = tile(q, first, t0, length, i_g, H // GROUP, D=K, d0=k0, BT=BT, BD=BK)
    b_k = tile(k, first, t0, length, i_g, H // GROUP, D=K, d0=k0, BT=BT, BD=BK)
    scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    scores = tl.where(rows[:, None] > rows[None, :], scores, 0.0)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    ds = tl.zeros([BT, BT], dtype=tl.float32)
    begin = i_g * GROUP + i_s % SHARES * GROUP // SHARES
    end = i_g * GROUP + (i_s % SHARES + 1) * GROUP // SHARES
    for i in range(end - begin):
        i_h = begin + i
        b_dq, b_dk, ds = grads_of_head(b_q, b_k, scores, b_dq, b_dk, ds, v, do, G, states=states,
                                       dstates=dstates, dg=dg, scale=scale, n=n, first=first, t0=t0,
                                       length=length, i_h=i_h, H=H, R=R, i_k=i_k, K=K, V=V, BT=BT, BK=BK,
                                       BV=BV, BLOCK=BLOCK, PRECISION=PRECISION)
    b_ds = ds.to(b_q.dtype)
    b_dq += tl.dot(b_ds, b_k, input_precision=PRECISION)
    b_dk += tl.dot(tl.trans(b_ds), b_q, input_precision=PRECISION)
    put(dq, b_dq, first, t0, length, i_s, H // GROUP * SHARES, D=K, d0=k0, BT=BT, BD=BK)
    put(dk, b_dk, first, t0, length, i_s, H // GROUP * SHARES, D=K, d0=k0, BT=BT, BD=BK)


@triton.jit(do_not_specialize=["T", "N", "R", "S", "scale"])
def simple_gla_shared(
    q, k, v, do, G, states, dstates, dq, dk, dg, bounds, scale, T, N, H, R, S, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dq, dk and dg of all chunks for heads of v that share q and k.

    One program computes BK channels of one chunk for a slice of the GROUP heads that share one q and k. A
    slice has at most BH heads, and dq and dk are sums over them. torch adds the sums of several slices, and
    the parts of dg from several blocks of channels. In a packed batch, S programs divide the chunks of a
    sequence.

    states: the states that enter the chunks.
    dstates: the gradients of the states that leave the chunks.

    q, k: [rows, H // GROUP, K].
    v, do: [rows, H, V].
    G: [H, R], fp32.
    states, dstates: [slots, H, K, V], one entry per chunk.
    dq, dk: [rows, slices of heads, K].
    dg: [rows, H, NK], fp32.
    bounds: [N + 1] or None.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    SHARES: tl.constexpr = (GROUP + BH - 1) // BH
    shares = H // GROUP * SHARES
    program = tl.program_id(0)
    i_k = program % NK
    i_s = program // NK % shares
    i_c = program // NK // shares % S
    n = program // NK // shares // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:  # a compile-time test; with "and", the code inside would still be compiled
        if i_c == 0:
            k0 = i_k * BK
            zero_gaps(dq, bounds, n, T, N, i_s, shares, D=K, d0=k0, BT=BT, BD=BK)
            zero_gaps(dk, bounds, n, T, N, i_s, shares, D=K, d0=k0, BT=BT, BD=BK)
            if i_s % SHARES == 0:
                for i in range(GROUP):
                    i_h = i_s // SHARES * GROUP + i
                    zero_gaps(dg, bounds, n, T, N, i_h, H, D=NK, d0=i_k, BT=BT, BD=1)
    if VARLEN:
        for t0 in range(i_c * BT, length, S * BT):
            grads_of_share(q, k, v, do, G, states, dstates, dq, dk, dg=dg, scale=scale, n=n, first=first,
                           t0=t0, length=length, i_s=i_s, H=H, R=R, i_k=i_k, K=K, V=V, BT=BT, BK=BK, BV=BV,
                           BH=BH, GROUP=GROUP, BLOCK=BLOCK, PRECISION=PRECISION)
    else:  # one chunk per program
        grads_of_share(q=q, k=k, v=v, do=do, G=G, states=states, dstates=dstates, dq=dq, dk=dk, dg=dg,
                       scale=scale, n=n, first=first, t0=i_c * BT, length=length, i_s=i_s, H=H, R=R, i_k=i_k,
                       K=K, V=V, BT=BT, BK=BK, BV=BV, BH=BH, GROUP=GROUP, BLOCK=BLOCK, PRECISION=PRECISION)


def launch_backward(plan: Plan, x: Inputs, how: Scalars, do: torch.Tensor, dht: torch.Tensor | None,
        needs: frozenset[str]) -> dict[str, torch.Tensor | None]:
    """Run the backward launches and return the gradients, keyed by input name; None for missing inputs.

    The gradients of g and h0 are fp32. gamma gets None, since its gradient is not computed.

    how: the scalars of the call.
    do: gradient of o, [B, T, H, V].
    dht: gradient of the final states, with their layout, or None.
    needs: names of the inputs whose gradients are needed.
    """
    given, gated = x, any(launch.kernel == "gate_cumsum" for launch in plan.launches)
    if gated and x.g is None:
        x = x._replace(g=as_gate(x), gamma=None)
    batch, whole = Batch(plan, x), needs != STATE_ALONE
    H, K, V, group = batch.HV, batch.K, batch.V, batch.HV // max(batch.H, 1)
    walking = plan.launch("simple_gla_overlapped_back", "simple_gla_dv")
    shared = gated and group > 1
    finishing = (plan.launch("simple_gla_overlapped_shared", "simple_gla_shared") if shared
                 else plan.launch("simple_gla_grads" if gated else "simple_gla_dk"))
    NK = -(-K // finishing.block("BK"))
    shares, strips = (-(-group // finishing.block("BH")), NK) if shared else (1, 1)
    if OVERLAPPED in finishing.traits:
        strips = 2  # each of the kernel's two groups of warps stores its own part of dg
    side = dict(walking.tile).get("SIDE", 0)  # if not 0, dstates is stored in dq and dk
    own = {} if side else {"SIDE": 0}
    dv = batch.new(V, dtype=x.v.dtype)
    # Sums over slices of heads are added later, so they stay in fp32.
    dq, dk = (batch.new(K, dtype=x.q.dtype if shares == 1 else torch.float32, heads=batch.H * shares)
              for _ in range(2))
    dg = batch.new(dtype=torch.float32, heads=H * strips) if gated else None
    dh0 = batch.initial_gradient(needs)
    constants = dict(VARLEN=batch.packed, K=K, V=V, DECAY=batch.decay, V_FIRST=how.state_v_first,
                     GROUP=group, BLOCK=BLOCK, PRECISION=precision(plan))
    scanned = dict(constants, GAPS=batch.gaps)
    of_chunks = {name: scanned[name] for name in ("VARLEN", "K", "V", "BLOCK", "GAPS", "PRECISION")}
    # The kernels multiply do in the dtype of v, even if o is float32.
    for part in batch.parts(walking, dq=dq, dk=dk, dv=dv, dg=dg, dh0=dh0, do=do.to(x.v.dtype),
                            dht=dht, scale=how.scale, H=H):
        part.update(dict.fromkeys(("states", "dstates", "rest", "tails")), R=part["rows"],
                    G=summed(plan, part["g"], part["bounds"], part["N"]))
        by_decays(batch, part, simple_gla_alone, constants, ("k", "v"))
        by_decays(batch, part, simple_gla_alone, constants, ("q", "do"), reverse=True)
        entered, handed = dict(HAS_H0=part["h0"] is not None), dict(HAS_DHT=part["dht"] is not None)
        if gated and whole:
            table = part["slots"], H, K, V
            beside = {"tails": (part["N"], -(-V // side) * side, H, K)} if side else {"dstates": table}
            for name, size in {"states": table, **beside}.items():
                part[name] = torch.empty(size, dtype=x.q.dtype, device=batch.device)
            if side:
                part.update(dstates=part["dq"], rest=part["dk"])
            batch.scan(simple_gla_states, constants | entered, part)
        initial = dict(HAS_DH0=dh0 is not None)
        if OVERLAPPED in walking.traits:
            scan_overlapped(batch, constants | handed | initial, part)
        else:
            batch.scan(simple_gla_dv, scanned | handed | own | initial, part)
        if not (whole and batch.T):
            continue
        of_groups = part["N"] * part["S"] * batch.H * shares
        if OVERLAPPED in finishing.traits:
            from flashlin.kernels.simple_gla.overlapping_shared import simple_gla_overlapped_shared
            start(finishing, simple_gla_overlapped_shared, of_groups, {"GROUP": group}, part)
        elif shared:
            start(finishing, simple_gla_shared, of_groups * NK, dict(of_chunks, GROUP=group), part)
        elif gated:
            start(finishing, simple_gla_grads, part["N"] * part["S"] * H, of_chunks | own, part)
        else:
            programs = part["parts"] * H * NK
            start(plan.launch("simple_gla_dq"), simple_gla_dq, programs, scanned | entered, part)
            start(finishing, simple_gla_dk, programs, scanned | handed, part)
    if dg is not None and strips > 1:
        dg = dg.unflatten(2, (H, strips)).sum(3)
    zero_forgotten(dg, given.g)
    return dict(q=batch.of_groups(dq), k=batch.of_groups(dk), v=dv, g=None if given.g is None else dg,
                gamma=None, h0=dh0)


def as_gate(x: Inputs) -> torch.Tensor:
    """Return the decay of each head as a gate [B, T, H] in float32, with zeros if there is no decay."""
    B, T, H, _ = x.v.shape
    g = torch.empty(B, T, H, dtype=torch.float32, device=x.v.device)
    return g.zero_() if x.gamma is None else g.copy_(x.gamma)


def scan_overlapped(batch: Batch, constants: dict[str, Any], part: dict[str, Any]) -> None:
    """Start the overlapping scan of ``overlapping_back.py`` in place of ``simple_gla_dv``.

    batch: the call.
    part: the arguments that the launches of a batch slice share, see ``Batch.parts``.
    constants: constants of ``simple_gla_dv``.
    """
    from flashlin.kernels.simple_gla.overlapping_back import simple_gla_overlapped_back
    own = {name: constants[name] for name in ("V", "DECAY", "V_FIRST", "GROUP", "HAS_DHT", "HAS_DH0")}
    leaving = part["dv"] if part["dstates"] is None else part["dstates"]
    batch.scan(simple_gla_overlapped_back, dict(own, STATES=part["dstates"] is not None), {
        **part, "dstates": leaving, "rest": leaving if part["rest"] is None else part["rest"]})
