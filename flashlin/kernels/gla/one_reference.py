"""Scores and gradients of chunks with one decay reference, for gated linear attention and RWKV-6.

Halving (``forward.py``) needs six products of a chunk's rows. If a chunk forgets little, as most chunks do,
one decay reference M is enough for all of its pairs. Then the scores below the diagonal are one product, of
the rows q_i e^{G_i - M} and k_j e^{M - G_j}. In each channel M = (G_1 + G_L) / 2, so no exponent exceeds half
of what the channel forgets. A chunk fits one decay reference if no channel forgets more than 120 bits. Then
no factor exceeds 2^60, and inputs of any usual size neither overflow nor underflow in float32. A reference at
the middle row would allow exponents up to 120.

The device decides for each chunk which method to use (``decays.py``). Each step has two kernels. The first
computes the chunks that fit and stores which they are. The second, ``gla_scores_rest`` or ``gla_grads_rest``,
halves the remaining chunks. In one kernel, the two methods would compete for registers. The first kernels
also sum the decays. They store only the sums of whole chunks, which the scans read.

Halving is always used for float16, because its largest number is below 2^16. It is used for float32, because
the rounding of such large sums causes larger errors than halving. It is also used on GPUs other than Hopper
(``halves_all`` in ``recipe.py``).

The gradients need only two products within a chunk, with ds below the diagonal and with its transpose. The
gradients of rows that read (q) come first; their products need the states. Then follow the gradients of rows
that are written (k); their products need the gradients of states. So a thread has few tiles in registers at a
time.
"""

import triton
import triton.language as tl

from flashlin.kernels.gla.decays import (
    bonus_of,
    decays_of_gates,
    others_summed,
    rows_beside,
    scored,
    still_served,
)
from flashlin.kernels.tile_ops import chunk_of, first_slot, put, state_offsets, tile


@triton.jit
def scores_from_reference(q, k, u, g, G, A, q_in, k_out, served, scale, n, first, t0, length, i_h, H,
                          K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, EARLIER: tl.constexpr,
                          ONE: tl.constexpr, PRECISION: tl.constexpr):
    """Compute and store the scores and the weighted q and k of one chunk, with one decay reference.

    ``gla_scores`` describes A, q_in and k_out. If the chunk does not fit one decay reference,
    ``gla_scores_rest`` overwrites the results.

    served: receives 1 if no channel forgets more than 120 bits, so that the chunk fits; else 0.
    ONE: False in tests, where no chunk counts as fitting.
    """
    rows = tl.arange(0, BT)
    last = tl.minimum(BT, length - t0) - 1
    serves = 1 if ONE else 0
    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    diagonal = tl.zeros([BT], dtype=tl.float32)
    for k0 in range(0, K, BK):
        reading, written, entered, left, kept, forgotten = decays_of_gates(
            g, G, last, first, t0, length, i_h, H, K=K, k0=k0, BT=BT, BK=BK, EARLIER=EARLIER, SUM=True)
        serves = still_served(serves, forgotten)
        b_q = tile(q, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        b_k = tile(k, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        own = b_q.to(tl.float32) * b_k.to(tl.float32)
        if EARLIER:
            own *= bonus_of(u, i_h, K, k0, BK)
        diagonal += tl.sum(own, 1)
        put(q_in, b_q * entered, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        X_k = b_k * written
        put(k_out, X_k * left[None, :], first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        b_A = scored(b_A, b_q * reading, X_k, b_q.dtype, PRECISION)
    b_A = tl.where(rows[:, None] > rows[None, :], b_A, tl.where(
        rows[:, None] == rows[None, :], diagonal[:, None], 0.0))
    put(A, b_A * scale, first, t0, length, i_h, H, D=BT, d0=0, BT=BT, BD=BT)
    tl.store(served + (first_slot(n, first, BT) + t0 // BT) * H + i_h, serves)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def gla_scores_one(
    q, k, u, g, G, A, q_in, k_out, served, bounds, scale, T, N, H, S, K: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, EARLIER: tl.constexpr, ONE: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the scores and the weighted q and k of the chunks that fit one decay reference.

    In these chunks no channel forgets more than 120 bits, so decays can be taken relative to a single point.
    ``gla_scores_rest`` computes all other chunks. ``gla_scores`` describes A, q_in and k_out.

    served: receives 1 for chunks that fit, else 0.
    ONE: False in tests, where no chunk counts as fitting.

    q, k: [rows, H, K].
    u: [H, K] or None.
    g: [rows, H, K], fp32.
    G: [rows, H, K], fp32: decays summed within each chunk; only the last row is set.
    A: [rows, H, BT].
    q_in, k_out: [rows, H, K].
    served: [slots, H], int32.
    bounds: [N + 1] or None.
    """
    program = tl.program_id(0)
    i_h = program % H
    n, first, length, t0 = chunk_of(program // H, bounds, T, N, S, BT, VARLEN)
    if t0 < length:
        scores_from_reference(q=q, k=k, u=u, g=g, G=G, A=A, q_in=q_in, k_out=k_out, served=served,
                              scale=scale, n=n, first=first, t0=t0, length=length, i_h=i_h, H=H, K=K,
                              BT=BT, BK=BK, EARLIER=EARLIER, ONE=ONE, PRECISION=PRECISION)


@triton.jit
def grads_from_reference(q, k, v, u, do, g, G, states, dstates, dq, dk, dg, du, served, scale, n, first, t0,
                         length, i_h, H, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                         BV: tl.constexpr, EARLIER: tl.constexpr, PRECISION: tl.constexpr):
    """Compute and store dq, dk and dg [BT, K] of one chunk and head, if it fits one decay reference.

    With EARLIER (RWKV-6) it also stores the chunk's part of the gradient of the bonus u, du [K].

    states: the states that enter the chunks.
    dstates: the gradients of the states that leave the chunks.
    served: 1 for chunks that fit one decay reference, else 0.
    """
    rows = tl.arange(0, BT)
    last = tl.minimum(BT, length - t0) - 1
    slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
    if tl.load(served + slot) > 0:
        p = tl.zeros([BT, BT], dtype=tl.float32)
        for v0 in range(0, V, BV):
            b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
            b_do = tile(do, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV).to(b_v.dtype)
            p += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        p *= scale
        diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], p, 0.0), 1)
        apart = rows[:, None] - rows[None, :]
        if EARLIER:
            # Adjacent tokens do not decay. They are computed separately, because in the gate's gradient they
            # would cancel on paper but not in floating point.
            reads_above = tl.sum(tl.where(apart == 1, p, 0.0), 1)
            read_below = tl.sum(tl.where(apart == 1, p, 0.0), 0)
            for k0 in range(0, K, BK):  # a separate loop, because these sums would spill in the next one
                b_q = tile(q, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
                b_k = tile(k, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
                columns = k0 + tl.arange(0, BK)
                tl.store(du + slot * K + columns, tl.sum(b_q * b_k * diagonal[:, None], 0), mask=columns < K)
        ds = tl.where(apart > (1 if EARLIER else 0), p, 0.0).to(v.dtype.element_ty)
        for k0 in range(0, K, BK):
            reading, written, entered, left, kept, _ = decays_of_gates(
                g, G, last, first, t0, length, i_h, H, K=K, k0=k0, BT=BT, BK=BK, EARLIER=EARLIER, SUM=False)
            b_q = tile(q, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
            b_k = tile(k, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
            wide_q, wide_k = b_q.to(tl.float32), b_k.to(tl.float32)
            X_q, X_k = (b_q * reading).to(b_q.dtype), (b_k * written).to(b_q.dtype)
            b_dq = tl.zeros([BT, BK], dtype=tl.float32)
            across = tl.zeros([BK], dtype=tl.float32)
            for v0 in range(0, V, BV):
                at, whole = state_offsets(slot, k0, v0, K, V, BK, BV, False)
                h = tl.load(states + at, mask=whole, other=0.0)
                dh = tl.load(dstates + at, mask=whole, other=0.0)
                b_do = tile(do, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV).to(h.dtype)
                b_dq += tl.dot(b_do, tl.trans(h), input_precision=PRECISION)
                across += tl.sum(h.to(tl.float32) * dh.to(tl.float32), 1)
            b_dq *= entered * scale
            here = wide_q * b_dq
            y = tl.dot(ds, X_k, input_precision=PRECISION)
            here += X_q.to(tl.float32) * y
            b_dq += y * reading
            if EARLIER:
                bonus = bonus_of(u, i_h, K, k0, BK)
                b_dq += (diagonal[:, None] * bonus) * wide_k + reads_above[:, None] * rows_beside(
                    k, -1, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
            else:
                b_dq += diagonal[:, None] * wide_k
            put(dq, b_dq, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
            b_dk = tl.zeros([BT, BK], dtype=tl.float32)
            for v0 in range(0, V, BV):
                at, whole = state_offsets(slot, k0, v0, K, V, BK, BV, False)
                dh = tl.load(dstates + at, mask=whole, other=0.0)
                b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
                b_dk += tl.dot(b_v, tl.trans(dh), input_precision=PRECISION)
            b_dk *= written * left[None, :]
            sent = wide_k * b_dk
            y = tl.dot(tl.trans(ds), X_q, input_precision=PRECISION)
            read = X_k.to(tl.float32) * y
            here -= read
            b_dk += y * written
            if EARLIER:
                b_dk += (diagonal[:, None] * bonus) * wide_q + read_below[:, None] * rows_beside(
                    q, 1, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
            else:
                b_dk += diagonal[:, None] * wide_q
            put(dk, b_dk, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
            if EARLIER:
                b_dg = others_summed(here, True) - read
            else:
                b_dg = tl.cumsum(here, 0, reverse=True)
            b_dg += (kept * across)[None, :]
            b_dg += others_summed(sent, False)
            put(dg, b_dg, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def gla_grads_one(
    q, k, v, u, do, g, G, states, dstates, dq, dk, dg, du, served, bounds, scale, T, N, H, S, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, EARLIER: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dq, dk and dg of the chunks that fit one decay reference.

    In these chunks no channel forgets more than 120 bits, so decays can be taken relative to a single point.
    ``gla_grads_rest`` computes all other chunks.

    states: the states that enter the chunks.
    dstates: the gradients of the states that leave the chunks.
    du: with EARLIER (RWKV-6), receives each chunk's part of the gradient of the bonus u.
    served: 1 for chunks that fit, as stored by ``gla_scores_one``, else 0.

    q, k: [rows, H, K].
    v: [rows, H, V].
    u: [H, K] or None.
    do: [rows, H, V].
    g: [rows, H, K], fp32.
    G: [rows, H, K], fp32: decays summed within each chunk; only the last row is read.
    states, dstates: [slots, H, K, V], one entry per chunk.
    dq, dk: [rows, H, K].
    dg: [rows, H, K], fp32.
    du: [slots, H, K], fp32, or None.
    served: [slots, H], int32.
    bounds: [N + 1] or None.
    """
    program = tl.program_id(0)
    i_h = program % H
    n, first, length, t0 = chunk_of(program // H, bounds, T, N, S, BT, VARLEN)
    if t0 < length:
        grads_from_reference(
            q=q, k=k, v=v, u=u, do=do, g=g, G=G, states=states, dstates=dstates, dq=dq, dk=dk, dg=dg,
            du=du, served=served, scale=scale, n=n, first=first, t0=t0, length=length, i_h=i_h, H=H,
            K=K, V=V, BT=BT, BK=BK, BV=BV, EARLIER=EARLIER, PRECISION=PRECISION)
