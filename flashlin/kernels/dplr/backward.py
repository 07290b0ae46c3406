"""Backward kernels of the delta families with a decay for each key channel, without partial sums or atomics.

A scan recomputes the states, a reverse scan computes their gradients, and a third kernel computes all chunks
at once.

In the notation of ``forward.py``, dh is the gradient of the state that leaves a chunk, and q', P and R
include the scale. The reverse scan splits V, like the forward, and computes

    dX = b' dh + P^T do
    dY = T^T dX
    dV = N^T dY + k' dh + R^T do
    dh' = Diag(e^{G_L}) dh + q'^T do + a'^T dY

With dY, the gradient of T needs no product of three matrices. The gradients of the operands are

    da' = dY h^T
    dL = dY X^T
    dN = dY V^T
    db' = X dh^T
    dk' = V dh^T
    dq' = scale do h^T
    dP = scale do X^T
    dR = scale do V^T

They all contract over V, so one program computes one chunk. From the gradients of the scores, the gradients
of q, k, a and b are computed level by level, like the scores. Let Z_1 = dR and Z_2 = dL, made symmetric, and
let C be dP below the diagonal and dN^T above it. Let Y1 = C X2 + Z_1 X1 and Y2 = C^T X1 + Z_2 X2. Then row i
of Y1 is the gradient that row i of X1 gets from the rows of the other half. Y2 is the same for X2. Without a
second writing vector, C is dP below and dL^T above the diagonal, and no Z_1 and Z_2 are needed.

The gradient of the gate is computed as in ``kernels/gla``. The gate of token t scales everything that the
state carries from tokens before t to token t or later. The term of a pair is added at the row that reads and
subtracted at the row that writes, as the same product of the same rounded numbers. a reads the state before
the decay of its own token, so its terms count at the previous row. Some pairs do not decay: q with the writes
of its own token, and a with the writes of the previous token. They are computed outside of the levels,
because their terms in the gate's gradient would cancel only in exact arithmetic.

For KDA, the gradient of a = -beta k gives those of k and beta, and dv = beta dY. For Gated DeltaNet 2
(ERASE_RATE), the gradient of a = -rate k gives those of k and the rate, and dv = dY.
"""

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.compat.traits import OVERLAPPED
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, precision, zero_forgotten
from flashlin.kernels.chunked import STATE_ALONE
from flashlin.kernels.dplr.forward import erases, prepare, scan_overlapped
from flashlin.kernels.dplr.inputs import Inputs, Scalars
from flashlin.kernels.dplr.one_reference import dplr_grads_one
from flashlin.kernels.dplr.parts import dplr_alone
from flashlin.kernels.dplr.raw import prepare_raw, sums_of_long_chunks
from flashlin.kernels.gla.decays import rows_beside, summed_before, sums_at, sums_read
from flashlin.kernels.gla.forward import halves, start_chunks, start_rest
from flashlin.kernels.gla.parts import any_left, sum_of_chunk
from flashlin.kernels.sequence_split import back_by_transfers, by_transfers, own_part
from flashlin.kernels.tile_ops import beta_of, first_slot, put, sequence_of, state_offsets, tile, zero_gaps


@triton.jit(do_not_specialize=["T", "N", "L"])
def dplr_states(
    b_out, k_out, W, M, v, G, h0, x, states, undivided, bounds, T, N, HV, L, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TWO_WRITES: tl.constexpr, HAS_H0: tl.constexpr,
    V_FIRST: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Recompute the state that enters each chunk, and the values X that the tokens read from the states.

    One program computes BV columns of one head's state. The operands come from ``dplr_prepare``.

    x: receives X, whose row i is a_i S_{i-1}.
    states: receives the states.

    b_out, k_out, W: [rows, HV, K].
    M: [rows, HV, BT].
    v: [rows, HV, V].
    G: [rows, HV, K], fp32: decays summed within each chunk.
    h0: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K].
    x: [rows, HV, V].
    states: [slots, HV, K, V], one entry per chunk.
    undivided: [N, HV], int32, or None.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    own = program // NV
    i_h = own % HV
    n, i_part, first, length, last, entered = own_part(own // HV, i_h, undivided, bounds, T, N, HV, L,
                                                       VARLEN=VARLEN, REVERSE=False)
    if HAS_H0:
        at, inside = state_offsets(entered * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    for t0 in range(0, length, BT):
        b_W = tile(W, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        b_M = tile(M, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_b = tile(b_out, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        total = sum_of_chunk(G, tl.minimum(BT, length - t0) - 1, first, t0, i_h, HV, K, 0, BK)
        b_h = h.to(b_W.dtype)
        slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
        to, whole = state_offsets(slot, 0, v0, K, V, BK, BV, False)
        tl.store(states + to, b_h, mask=whole)
        b_x = tl.dot(b_M, b_v, input_precision=PRECISION)
        b_x += tl.dot(b_W, b_h, input_precision=PRECISION)
        put(x, b_x, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        h *= tl.exp2(total)[:, None]
        h += tl.dot(tl.trans(b_b), b_x.to(b_W.dtype), input_precision=PRECISION)
        if TWO_WRITES:
            b_k = tile(k_out, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
            h += tl.dot(tl.trans(b_k), b_v, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "N", "L"])
def dplr_reverse(
    q_in, a_in, b_out, k_out, P, R, N_, T_, T_low, do, G, dht, dy, dv, dh0, dstates, undivided, windows_back,
    bounds, T, N, HV, L, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, TWO_WRITES: tl.constexpr, HAS_DHT: tl.constexpr, HAS_DH0: tl.constexpr,
    ALONE: tl.constexpr, V_FIRST: tl.constexpr, HAS_LOW: tl.constexpr, VARLEN: tl.constexpr,
    GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dY, dh0 and the gradient of the state that leaves each chunk, by a reverse scan.

    One program computes BV columns of one head's state. The operands come from ``dplr_prepare``. With
    TWO_WRITES (two writing vectors) it also computes dv. With ALONE it computes only dh0, for each segment
    except a sequence's first, as if no gradient entered from later segments. ``dplr_windows`` tells how many
    chunks it needs for that.

    dy: receives dY = T^T dX, the gradient of the right-hand side of the triangular system that X solves.
    dstates: receives the gradients of the states that leave the chunks.
    dht: gradients of the states that leave the sequences or segments.

    q_in, a_in, b_out, k_out: [rows, HV, K].
    P, R, N_, T_, T_low: [rows, HV, BT].
    do: [rows, HV, V].
    G: [rows, HV, K], fp32: decays summed within each chunk.
    dht: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K].
    dy, dv: [rows, HV, V], or None.
    dh0: [N, HV, K, V] or, with V_FIRST, [N, HV, V, K]; with ALONE, N is the number of segments.
    dstates: [slots, HV, K, V], one entry per chunk, or None.
    undivided: [N, HV], int32, or None.
    windows_back: [segments, HV], int32, or None.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    own = program // NV
    i_h = own % HV
    n, i_part, first, length, last, entered = own_part(own // HV, i_h, undivided, bounds, T, N, HV, L,
                                                       VARLEN=VARLEN, REVERSE=True)
    if (GAPS and TWO_WRITES) and not ALONE:  # before Triton 3.4, "and" cannot chain three operands
        if i_part == 0:
            zero_gaps(dv, bounds, n, T, N, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    if ALONE:
        length = tl.where(i_part > 0, length, 0)
        if windows_back is not None:
            window = tl.load(windows_back + own)  # -1: the head is not split, and dh0 of no use
            length = tl.where(window == 0, length, tl.minimum(length, tl.maximum(window, 0) * BT))
    if HAS_DHT:
        at, inside = state_offsets(entered * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        dh = tl.load(dht + at, mask=inside, other=0.0).to(tl.float32)
    else:
        dh = tl.zeros([BK, BV], dtype=tl.float32)
    chunks = (length + BT - 1) // BT
    for i_c in range(chunks):
        t0 = (chunks - 1 - i_c) * BT
        b_b = tile(b_out, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        b_P = tile(P, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_do = tile(do, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV).to(b_b.dtype)
        b_dh = dh.to(b_b.dtype)
        if not ALONE:
            slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
            to, whole = state_offsets(slot, 0, v0, K, V, BK, BV, False)
            tl.store(dstates + to, b_dh, mask=whole)
        dx = tl.dot(tl.trans(b_P), b_do, input_precision=PRECISION)
        dx += tl.dot(b_b, b_dh, input_precision=PRECISION)
        if TWO_WRITES and not ALONE:  # the terms of dv with dh come first; the term with dY follows below
            b_R = tile(R, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
            b_k = tile(k_out, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
            b_dv = tl.dot(tl.trans(b_R), b_do, input_precision=PRECISION)
            b_dv += tl.dot(b_k, b_dh, input_precision=PRECISION)
        total = sum_of_chunk(G, tl.minimum(BT, length - t0) - 1, first, t0, i_h, HV, K, 0, BK)
        b_q = tile(q_in, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        dh *= tl.exp2(total)[:, None]
        dh += tl.dot(tl.trans(b_q), b_do, input_precision=PRECISION)
        # If keys are similar, the product with T^T takes differences of large terms. So the rounding errors
        # of both operands are added with two more products.
        b_T = tile(T_, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_dx = dx.to(b_b.dtype)
        y = tl.dot(tl.trans(b_T), b_dx, input_precision=PRECISION)
        if HAS_LOW:
            b_low = tile(T_low, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
            y += tl.dot(tl.trans(b_T), (dx - b_dx).to(b_b.dtype), input_precision=PRECISION)
            y += tl.dot(tl.trans(b_low), b_dx, input_precision=PRECISION)
        b_y = y.to(b_b.dtype)
        b_a = tile(a_in, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        dh += tl.dot(tl.trans(b_a), b_y, input_precision=PRECISION)
        if not ALONE:
            put(dy, b_y, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        if TWO_WRITES and not ALONE:
            b_N = tile(N_, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
            b_dv += tl.dot(tl.trans(b_N), b_y, input_precision=PRECISION)
            put(dv, b_dv, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    if ALONE:
        at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(dh0 + at, dh, mask=inside & (length > 0))
    elif HAS_DH0:
        at, inside = state_offsets(n * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(dh0 + at, dh, mask=inside & (i_part == 0))


@triton.jit
def grads_of_chunk(q, k, v, a, b, beta, do, x, dy, G, states, dstates, dq, dk, dv, da, db, dbeta, dg, scale,
                   n, first, t0, length, i_h, H, HV, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                   BK: tl.constexpr, BV: tl.constexpr, TWO_WRITES: tl.constexpr, ERASE_RATE: tl.constexpr,
                   PRECISION: tl.constexpr):
    """Compute and store the gradients of q, k, the decays and the writing vectors of one chunk and head.

    It uses halving (see ``kernels/gla/forward.py``). The outputs are dq, dk and dg [BT, K]. With TWO_WRITES
    (two writing vectors) there are also da and db. Otherwise there is dv [BT, V], and dbeta [BT] or, with
    ERASE_RATE (Gated DeltaNet 2), da as the gradient of the rate.

    x: the values X that the tokens read from the states, [rows, HV, V].
    dy: T^T dX from ``dplr_reverse``, [rows, HV, V].
    states: the states that enter the chunks.
    dstates: the gradients of the states that leave the chunks.
    G: sums of decays; with TWO_WRITES its rows are overwritten.
    """
    LEVELS: tl.constexpr = 6 if BT == 64 else 5 if BT == 32 else 4
    i_qk = i_h // (HV // H)
    rows = tl.arange(0, BT)
    last = tl.minimum(BT, length - t0) - 1
    slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
    below = rows[:, None] > rows[None, :]
    equal = rows[:, None] == rows[None, :]
    if not TWO_WRITES and not ERASE_RATE:
        b_beta = beta_of(beta, first, t0, length, i_h, HV, BT)
        b_dbeta = tl.zeros([BT], dtype=tl.float32)
    one = tl.zeros([BT, BT], dtype=tl.float32)
    two = tl.zeros([BT, BT], dtype=tl.float32)
    lower = tl.zeros([BT, BT], dtype=tl.float32)
    upper = tl.zeros([BT, BT], dtype=tl.float32)
    for v0 in range(0, V, BV):
        b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_do = tile(do, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV).to(b_v.dtype)
        b_x = tile(x, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_y = tile(dy, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        lower += tl.dot(b_do, tl.trans(b_x), input_precision=PRECISION)
        if TWO_WRITES:
            upper += tl.dot(b_v, tl.trans(b_y), input_precision=PRECISION)
            one += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            two += tl.dot(b_y, tl.trans(b_x), input_precision=PRECISION)
        else:
            upper += tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
            if ERASE_RATE:
                put(dv, b_y, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            else:
                wide = b_y.to(tl.float32)
                b_dbeta += tl.sum(wide * b_v.to(tl.float32), 1)
                put(dv, wide * b_beta[:, None], first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    qb = tl.sum(tl.where(equal, lower, 0.0), 1) * scale
    if TWO_WRITES:
        qk = tl.sum(tl.where(equal, one, 0.0), 1) * scale
        above = rows[:, None] == rows[None, :] + 1  # for each row, the column of the previous token
        after = rows[:, None] + 1 == rows[None, :]
        a_from_b = tl.sum(tl.where(above, two, 0.0), 1)
        b_from_a = tl.sum(tl.where(above, two, 0.0), 0)
        a_from_k = tl.sum(tl.where(after, upper, 0.0), 0)
        k_from_a = tl.sum(tl.where(after, upper, 0.0), 1)
        two = tl.where(above, 0.0, two)
        upper = tl.where(after, 0.0, upper)
    C = tl.where(below, lower * scale, upper).to(v.dtype.element_ty)
    if TWO_WRITES:
        Z1 = (tl.where(below, one, tl.trans(one)) * scale).to(v.dtype.element_ty)
        Z2 = tl.where(below, two, tl.trans(two)).to(v.dtype.element_ty)
    for k0 in range(0, K, BK):
        b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
        b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
        b_G = sums_at(G, tl.minimum(rows, last), first, t0, i_h, HV, K, k0, BK)
        total = sum_of_chunk(G, last, first, t0, i_h, HV, K, k0, BK)
        r_a = b_k  # a is -rate * k; the factor -rate follows below, for the rows that read the state
        b_b = b_k
        b_B = sums_read(b_G, G, last, first, t0, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, EARLIER=TWO_WRITES)
        if TWO_WRITES:
            r_a = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            b_b = tile(b, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        elif ERASE_RATE:
            rate = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
        else:
            rate = b_beta[:, None]
        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        b_dk = tl.zeros([BT, BK], dtype=tl.float32)
        b_da = tl.zeros([BT, BK], dtype=tl.float32)
        b_db = tl.zeros([BT, BK], dtype=tl.float32)
        across = tl.zeros([BK], dtype=tl.float32)
        for v0 in range(0, V, BV):
            at, whole = state_offsets(slot, k0, v0, K, V, BK, BV, False)
            h = tl.load(states + at, mask=whole, other=0.0)
            dh = tl.load(dstates + at, mask=whole, other=0.0)
            b_do = tile(do, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV).to(h.dtype)
            b_x = tile(x, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            b_y = tile(dy, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            b_dq += tl.dot(b_do, tl.trans(h), input_precision=PRECISION)
            b_da += tl.dot(b_y, tl.trans(h), input_precision=PRECISION)
            b_db += tl.dot(b_x, tl.trans(dh), input_precision=PRECISION)
            if TWO_WRITES:
                b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
                b_dk += tl.dot(b_v, tl.trans(dh), input_precision=PRECISION)
            across += tl.sum(h.to(tl.float32) * dh.to(tl.float32), 1)
        # The terms with states, and their contributions to the gate: ``here`` counts for gates up to the
        # row, ``there`` for gates strictly before it, and ``sent`` for gates after it.
        left = tl.exp2(total[None, :] - b_G)
        b_dq *= tl.exp2(b_G) * scale
        b_da *= tl.exp2(b_B)
        b_db *= left
        sent = b_b.to(tl.float32) * b_db
        if TWO_WRITES:
            b_dk *= left
            sent += b_k.to(tl.float32) * b_dk
        b_dg = summed_before(sent, dg, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        put(
            dg, b_dg + (tl.exp2(total) * across)[None, :], first, t0, length, i_h, HV,
            D=K, d0=k0, BT=BT, BD=BK)  # parked in dg until the levels are done
        here = b_q.to(tl.float32) * b_dq
        there = r_a.to(tl.float32) * b_da
        if not TWO_WRITES:
            here -= rate * there
        b_dq += qb[:, None] * b_b.to(tl.float32)
        b_db += qb[:, None] * b_q.to(tl.float32)
        if TWO_WRITES:
            b_dq += qk[:, None] * b_k.to(tl.float32)
            b_dk += qk[:, None] * b_q.to(tl.float32)
            b_da += a_from_b[:, None] * rows_beside(
                b, -1, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            b_da += a_from_k[:, None] * rows_beside(
                k, -1, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            next_a = rows_beside(a, 1, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            b_db += b_from_a[:, None] * next_a
            b_dk += k_from_a[:, None] * next_a
        for level in range(LEVELS):
            half = halves(level, BT)
            second = (half % 2 == 1)[:, None]
            partner = (half ^ 1)[:, None] == half[None, :]
            b_M = sums_at(G, tl.minimum(((half | 1) << level) - 1, last), first, t0, i_h, HV, K, k0, BK)
            decay = tl.exp2(tl.where(second, b_G - b_M, b_M - b_G))
            X1 = (tl.where(second, b_q, b_k) * decay).to(b_q.dtype)
            if TWO_WRITES:
                decay2 = tl.exp2(tl.where(second, b_B - b_M, b_M - b_G))
                X2 = (tl.where(second, r_a, b_b) * decay2).to(b_q.dtype)
            else:
                decay2 = decay
                X2 = (b_k * tl.where(second, -rate, 1.0) * decay).to(b_q.dtype)
            b_C = tl.where(partner, C, 0.0).to(b_q.dtype)
            y1 = tl.dot(b_C, X2, input_precision=PRECISION)
            y2 = tl.dot(tl.trans(b_C), X1, input_precision=PRECISION)
            if TWO_WRITES:
                y1 += tl.dot(tl.where(partner, Z1, 0.0).to(b_q.dtype), X1, input_precision=PRECISION)
                y2 += tl.dot(tl.where(partner, Z2, 0.0).to(b_q.dtype), X2, input_precision=PRECISION)
            both = X1.to(tl.float32) * y1
            own = X2.to(tl.float32) * y2
            if TWO_WRITES:
                here += tl.where(second, both, -both - own)
                there += tl.where(second, own, 0.0)
            else:
                both += own
                here += tl.where(second, both, -both)
            y1 *= decay
            y2 *= decay2
            b_dq += tl.where(second, y1, 0.0)
            b_da += tl.where(second, y2, 0.0)
            if TWO_WRITES:
                b_dk += tl.where(second, 0.0, y1)
                b_db += tl.where(second, 0.0, y2)
            else:
                b_db += tl.where(second, 0.0, y1 + y2)
        put(dq, b_dq, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        if TWO_WRITES:
            put(dk, b_dk, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            put(da, b_da, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            put(db, b_db, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            # The sums in G are no longer needed, so G serves as scratch memory.
            put(G, there, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            tl.debug_barrier()
            here += rows_beside(G, 1, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        else:
            put(dk, b_db - rate * b_da, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            if ERASE_RATE:
                put(da, -b_k.to(tl.float32) * b_da, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            else:
                b_dbeta -= tl.sum(b_k.to(tl.float32) * b_da, 1)
        tl.debug_barrier()  # this thread may read values of dg that another thread stored
        b_dg = tile(dg, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        put(dg, b_dg + tl.cumsum(here, 0, reverse=True), first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
    if not TWO_WRITES and not ERASE_RATE:
        tl.store(dbeta + (first + t0 + rows) * HV + i_h, b_dbeta, mask=t0 + rows < length)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def dplr_grads(
    q, k, v, a, b, beta, do, x, dy, G, states, dstates, dq, dk, dv, da, db, dbeta, dg, bounds, scale, T, N, H,
    HV, S, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TWO_WRITES: tl.constexpr, ERASE_RATE: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of all chunks by halving, with one program per chunk and head.

    The chunks of a packed sequence are divided among S programs. ``grads_of_chunk`` describes the inputs and
    outputs.

    q, k: [rows, H, K].
    v: [rows, HV, V].
    a, b: [rows, HV, K].
    beta: [rows, HV].
    do, x, dy: [rows, HV, V].
    G: [rows, HV, K], fp32: decays summed within each chunk.
    states, dstates: [slots, HV, K, V], one entry per chunk.
    dq, dk: [rows, HV, K].
    dv: [rows, HV, V].
    da, db: [rows, HV, K].
    dbeta: [rows, HV], fp32.
    dg: [rows, HV, K], fp32.
    bounds: [N + 1] or None.
    """
    program = tl.program_id(0)
    i_h = program % HV
    share = program // HV % S
    n = program // HV // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:  # nested: "GAPS and share == 0" would be a run-time condition and keep the code below
        if share == 0:
            for k0 in range(0, K, BK):
                zero_gaps(dq, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dk, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dg, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                if TWO_WRITES or ERASE_RATE:
                    zero_gaps(da, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                if TWO_WRITES:
                    zero_gaps(db, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            if not TWO_WRITES and not ERASE_RATE:
                zero_gaps(dbeta, bounds, n, T, N, i_h, HV, D=1, d0=0, BT=BT, BD=1)
            if not TWO_WRITES:
                for v0 in range(0, V, BV):
                    zero_gaps(dv, bounds, n, T, N, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            grads_of_chunk(q=q, k=k, v=v, a=a, b=b, beta=beta, do=do, x=x, dy=dy, G=G, states=states,
                           dstates=dstates, dq=dq, dk=dk, dv=dv, da=da, db=db, dbeta=dbeta, dg=dg,
                           scale=scale, n=n, first=first, t0=t0, length=length, i_h=i_h, H=H, HV=HV, K=K, V=V,
                           BT=BT, BK=BK, BV=BV, TWO_WRITES=TWO_WRITES, ERASE_RATE=ERASE_RATE,
                           PRECISION=PRECISION)
    else:  # one chunk per program; a loop that runs once would still keep every mask in registers
        grads_of_chunk(q=q, k=k, v=v, a=a, b=b, beta=beta, do=do, x=x, dy=dy, G=G, states=states,
                       dstates=dstates, dq=dq, dk=dk, dv=dv, da=da, db=db, dbeta=dbeta, dg=dg, scale=scale,
                       n=n, first=first, t0=share * BT, length=length, i_h=i_h, H=H, HV=HV, K=K, V=V, BT=BT,
                       BK=BK, BV=BV, TWO_WRITES=TWO_WRITES, ERASE_RATE=ERASE_RATE, PRECISION=PRECISION)


@triton.jit(do_not_specialize=["T", "N", "shares", "scale"])
def dplr_grads_rest(
    q, k, v, a, b, beta, do, x, dy, G, states, dstates, dq, dk, dv, da, db, dbeta, dg, served, bounds, scale,
    T, N, H, HV, shares, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, TWO_WRITES: tl.constexpr, ERASE_RATE: tl.constexpr, VARLEN: tl.constexpr,
    GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the gradients of the chunks that do not fit one decay reference, by halving.

    In these chunks some channel forgets more than 120 bits, so decays cannot be taken relative to a single
    point. ``dplr_grads_one`` has computed all other chunks. Rows outside of all sequences get zeros.
    ``grads_of_chunk`` describes the inputs and outputs.

    served: 1 for chunks that fit one decay reference, else 0.

    q, k: [rows, H, K].
    v: [rows, HV, V].
    a, b: [rows, HV, K].
    beta: [rows, HV].
    do, x, dy: [rows, HV, V].
    G: [rows, HV, K], fp32: decays summed within each chunk.
    states, dstates: [slots, HV, K, V], one entry per chunk.
    dq, dk: [rows, HV, K].
    dv: [rows, HV, V].
    da, db: [rows, HV, K].
    dbeta: [rows, HV], fp32.
    dg: [rows, HV, K], fp32.
    served: [slots, HV], int32.
    bounds: [N + 1] or None.
    shares: programs per sequence.
    """
    program = tl.program_id(0)
    i_h = program % HV
    share = program // HV % shares
    n = program // HV // shares
    first, length = sequence_of(n, bounds, T, VARLEN)
    slot, end = first_slot(n, first, BT), length
    if not VARLEN:
        end = tl.where(any_left(served, slot, share, length, shares, i_h, HV, BT), length, 0)
    for t0 in tl.range(share * BT, end, shares * BT, disable_licm=True):  # or masks would fill the registers
        if tl.load(served + (slot + t0 // BT) * HV + i_h) == 0:
            grads_of_chunk(
                q=q, k=k, v=v, a=a, b=b, beta=beta, do=do, x=x, dy=dy, G=G, states=states, dstates=dstates,
                dq=dq, dk=dk, dv=dv, da=da, db=db, dbeta=dbeta, dg=dg, scale=scale, n=n, first=first, t0=t0,
                length=length, i_h=i_h, H=H, HV=HV, K=K, V=V, BT=BT, BK=BK, BV=BV, TWO_WRITES=TWO_WRITES,
                ERASE_RATE=ERASE_RATE, PRECISION=PRECISION)
    if GAPS:
        if share == 0:
            for k0 in range(0, K, BK):
                zero_gaps(dq, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dk, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dg, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                if TWO_WRITES or ERASE_RATE:
                    zero_gaps(da, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                if TWO_WRITES:
                    zero_gaps(db, bounds, n, T, N, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            if not TWO_WRITES and not ERASE_RATE:
                zero_gaps(dbeta, bounds, n, T, N, i_h, HV, D=1, d0=0, BT=BT, BD=1)
            if not TWO_WRITES:
                for v0 in range(0, V, BV):
                    zero_gaps(dv, bounds, n, T, N, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)


def launch_backward(plan: Plan, x: Inputs, how: Scalars, do: torch.Tensor, dht: torch.Tensor | None,
        needs: frozenset[str]) -> dict[str, torch.Tensor | None]:
    """Run the backward launches and return the gradients, keyed by input name; None for missing inputs.

    The gradients of g, beta and h0 are fp32. With A_log, q and k are already normalized, and g is the raw
    gate. The gradient of g is then that of the log decays.

    how: the scalars of the call.
    do: gradient of o, [B, T, HV, V].
    dht: gradient of the final states, with their layout, or None.
    needs: names of the inputs whose gradients are needed.
    """
    batch, whole = Batch(plan, x), needs != STATE_ALONE
    HV, K, V = batch.HV, batch.K, batch.V
    finishing = plan.launch("dplr_overlapped_grads", "dplr_grads_one", "dplr_grads")
    reversing = plan.launch("dplr_overlapped_back", "dplr_reverse")
    restoring = plan.launch("dplr_overlapped", "dplr_states")
    grads = batch.gradients(needs, "q", "k", "v", "a", "b", "beta")
    grads["dg"] = batch.new(K, dtype=torch.float32)
    constants = dict(K=K, V=V, TWO_WRITES=x.b is not None, VARLEN=batch.packed, PRECISION=precision(plan))
    scanned = dict(constants, V_FIRST=how.state_v_first)
    short = plan.has("dplr_prepare_raw")
    for part in batch.parts(finishing, **grads, do=do, dht=dht, scale=how.scale):
        if OVERLAPPED in finishing.traits | reversing.traits:
            part["do"] = part["do"].to(x.v.dtype)  # these kernels load tensors of one dtype
        if short:  # the memory of dg contains the sums of short chunks until the last kernels write dg
            prepare_raw(plan, part, how.lowest, G=part["dg"])
        else:
            prepare(plan, part, backward=True)
        part["states"] = torch.empty(part["slots"], HV, K, V, dtype=x.v.dtype, device=batch.device)
        part["x"] = torch.empty_like(part["v"])
        by_transfers(batch, part, dplr_alone, scanned, has_dht=dht is not None)
        ends = dict(HAS_H0=part["h0"] is not None)
        if whole and OVERLAPPED in restoring.traits:
            scan_overlapped(batch, dict(ends, o=part["x"], ht=None, ERASE_RATE=False, HAS_HT=False,
                                        V_FIRST=how.state_v_first),
                            {**part, "q_in": None, "P": None, "R": None})
        elif whole:
            batch.scan(dplr_states, dict(scanned, **ends), part)
        del part["W"], part["M"]  # frees memory that the next tensors can use
        part["dstates"], part["dy"] = torch.empty_like(part["states"]), torch.empty_like(part["v"])
        reverse = dict(scanned, HAS_LOW=part["T_low"] is not None, GAPS=batch.gaps)
        back_by_transfers(batch, part, dplr_reverse, reverse, "dy", "dv", "dstates")
        ends = dict(HAS_DHT=part["dht"] is not None, HAS_DH0=part["dh0"] is not None)
        if OVERLAPPED in reversing.traits:
            from flashlin.kernels.dplr.overlapping_back import dplr_overlapped_back
            batch.scan(dplr_overlapped_back, dict(ends, V=V, V_FIRST=how.state_v_first), part)
        else:
            batch.scan(dplr_reverse, dict(reverse, **ends, ALONE=False), part)
        if short and whole:
            for name in ("G", "q_in", "a_in", "b_out", "P", "T_", "T_low"):
                del part[name]
            sums_of_long_chunks(plan, part, how.lowest)
        if whole:
            constants["ERASE_RATE"] = erases(x.a, x.b)
            if OVERLAPPED in finishing.traits:
                from flashlin.kernels.dplr.overlapping_grads import dplr_overlapped_grads
                start(finishing, dplr_overlapped_grads, part["N"] * part["S"] * HV,
                      dict(H=batch.H, HV=HV, K=K, ERASE_RATE=constants["ERASE_RATE"]), part)
                start_rest(plan, dplr_grads_rest, dict(constants, GAPS=batch.gaps), part)
            else:
                start_chunks(plan, (dplr_grads, dplr_grads_one, dplr_grads_rest), constants, part,
                             GAPS=batch.gaps)
    # Only families with one writing vector need these zeros. With two writing vectors they are skipped,
    # because the launch would read and write all of dg, the largest gradient.
    if x.b is None:
        zero_forgotten(grads["dg"], x.g, how.lowest)
    return batch.by_tensor(grads)
