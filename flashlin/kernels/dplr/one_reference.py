"""Operands and gradients of chunks with one decay reference, for delta families with a decay per key channel.

Scores by halving (``forward.py``) need six products. A chunk fits one decay reference if no channel forgets
more than 120 bits. Then one product gives each matrix of scores, and in bf16 a second product corrects the
rounding error of one operand. As in ``kernels/gla/one_reference.py``, each step has two kernels. The first
computes the chunks that fit and stores which they are. The second, ``dplr_prepare_rest`` or
``dplr_grads_rest``, halves the remaining chunks. The sums of decays are a separate launch, because they would
take twice as long within these kernels (benchmarks/notes/decay-per-channel.md).

Four scores [BT, BT] and four gradients [BT, BK] exceed the registers of a thread. So with two writing vectors
the kernels compute them one after the other. The first kernel computes the scores of a, inverts their
triangular system, and then computes the scores of q. The gradients' kernel first computes the gradients of q
and a, which need the states. Then it computes the gradients of b and k, which need the states' gradients.
"""

import triton
import triton.language as tl

from flashlin.kernels.gla.decays import (
    decays_of_sums,
    others_summed,
    rows_beside,
    scored,
    still_served,
    sums_at,
    sums_read,
)
from flashlin.kernels.gla.parts import sum_of_chunk
from flashlin.kernels.tile_ops import beta_of, chunk_of, first_slot, put, state_offsets, tile
from flashlin.kernels.triangular_inverse import inverse, product


@triton.jit
def rate_of(a, b_beta, first, t0, length, i_h, HV, K: tl.constexpr, k0, BT: tl.constexpr, BK: tl.constexpr,
            ERASE_RATE: tl.constexpr):
    """Return the rate at which a token erases the value that its k reads, in fp32.

    a: with ERASE_RATE, the rates per channel. The result is [BT, BK].
    b_beta: without ERASE_RATE, the rates [BT]. The result is [BT, 1].
    """
    if ERASE_RATE:
        return tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
    else:
        return b_beta[:, None]


@triton.jit
def prepare_from_reference(q, k, a, b, beta, G, q_in, a_in, b_out, k_out, W, M, P, R, N_, T_, T_low, scratch,
                           served, scale, n, first, t0, length, i_h, H, HV, K: tl.constexpr, BT: tl.constexpr,
                           BK: tl.constexpr, ONE: tl.constexpr, TWO_WRITES: tl.constexpr,
                           ERASE_RATE: tl.constexpr, BACKWARD: tl.constexpr, HAS_LOW: tl.constexpr,
                           PRECISION: tl.constexpr, MERGE: tl.constexpr):
    """Compute and store the operands of the scans for one chunk and head, if it fits one decay reference.

    The chunk fits if no channel forgets more than 120 bits. Then decays can be taken relative to a single
    point. ``dplr_prepare`` describes the operands.

    served: receives 1 if the chunk fits, else 0.
    ONE: False in tests, where no chunk counts as fitting.
    """
    i_qk = i_h // (HV // H)
    rows = tl.arange(0, BT)
    below = rows[:, None] > rows[None, :]
    diagonal = rows[:, None] == rows[None, :]
    last = tl.minimum(BT, length - t0) - 1
    slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
    serves = 1 if ONE else 0
    for k0 in range(0, K, BK):
        begin = sum_of_chunk(G, 0, first, t0, i_h, HV, K, k0, BK)
        serves = still_served(serves, sum_of_chunk(G, last, first, t0, i_h, HV, K, k0, BK) - begin)
    tl.store(served + slot, serves)
    if serves > 0:
        b_beta = rows.to(tl.float32)  # a placeholder, never read if beta does not replace it
        if not TWO_WRITES and not ERASE_RATE:
            b_beta = beta_of(beta, first, t0, length, i_h, HV, BT)
        L = tl.zeros([BT, BT], dtype=tl.float32)
        N = tl.zeros([BT, BT], dtype=tl.float32)
        b_P = tl.zeros([BT, BT], dtype=tl.float32)
        qb = tl.zeros([BT], dtype=tl.float32)
        for k0 in range(0, K, BK):
            reading, written, entered, left, kept = decays_of_sums(
                G, last, first, t0, length, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, EARLIER=TWO_WRITES)
            b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
            if TWO_WRITES:
                b_a = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
                b_b = tile(b, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            else:
                b_a = b_k * -rate_of(
                    a, b_beta, first, t0, length, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, ERASE_RATE=ERASE_RATE)
                b_b = b_k
            if BACKWARD:
                put(a_in, b_a * entered, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            X = b_b * written
            put(b_out, X * left[None, :], first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            b_a *= reading
            L = scored(L, b_a, X, b_k.dtype, PRECISION)
            if TWO_WRITES:
                X = b_k * written
                put(k_out, X * left[None, :], first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                N = scored(N, b_a, X, b_k.dtype, PRECISION)
            else:  # q and a read the state at the same time, so they share the factors
                b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
                put(q_in, b_q * (entered * scale), first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                qb += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
                b_P = scored(b_P, b_q * reading, X, b_q.dtype, PRECISION)
        if not TWO_WRITES:
            b_P = tl.where(below, b_P, tl.where(diagonal, qb[:, None], 0.0))
            put(P, b_P * scale, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        X = inverse(tl.where(below, -L, 0.0), scratch + slot.to(tl.int64) * (BT * 16), BT, MERGE)
        if TWO_WRITES:
            N = tl.where(below, N, 0.0)
            put(M, product(X, N, MERGE), first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        elif ERASE_RATE:
            put(M, X, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        else:
            put(M, X * b_beta[None, :], first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        if BACKWARD:
            if TWO_WRITES:
                put(N_, N, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
            put(T_, X, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
            if HAS_LOW:
                put(T_low, X - X.to(T_.dtype.element_ty).to(tl.float32), first, t0, length, i_h, HV, D=BT,
                    d0=0, BT=BT, BD=BT)
        for k0 in range(0, K, BK):
            b_G = sums_at(G, tl.minimum(rows, last), first, t0, i_h, HV, K, k0, BK)
            b_B = sums_read(b_G, G, last, first, t0, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, EARLIER=TWO_WRITES)
            if TWO_WRITES:
                b_a = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            else:
                b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
                b_a = b_k * -rate_of(
                    a, b_beta, first, t0, length, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, ERASE_RATE=ERASE_RATE)
            put(W, product(X, b_a * tl.exp2(b_B), MERGE), first, t0, length, i_h, HV,
                D=K, d0=k0, BT=BT, BD=BK)
        if TWO_WRITES:
            b_R = tl.zeros([BT, BT], dtype=tl.float32)
            qk = tl.zeros([BT], dtype=tl.float32)
            for k0 in range(0, K, BK):
                reading, written, entered, left, kept = decays_of_sums(
                    G, last, first, t0, length, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, EARLIER=False)
                b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
                b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
                b_b = tile(b, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                put(q_in, b_q * (entered * scale), first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                qb += tl.sum(b_q.to(tl.float32) * b_b.to(tl.float32), 1)
                qk += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
                b_P = scored(b_P, b_q * reading, b_b * written, b_q.dtype, PRECISION)
                b_R = scored(b_R, b_q * reading, b_k * written, b_q.dtype, PRECISION)
            b_P = tl.where(below, b_P, tl.where(diagonal, qb[:, None], 0.0))
            put(P, b_P * scale, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
            b_R = tl.where(below, b_R, tl.where(diagonal, qk[:, None], 0.0))
            put(R, b_R * scale, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def dplr_prepare_one(
    q, k, a, b, beta, G, q_in, a_in, b_out, k_out, W, M, P, R, N_, T_, T_low, scratch, served, bounds, scale,
    T, N, H, HV, S, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr,
    TWO_WRITES: tl.constexpr, ERASE_RATE: tl.constexpr, BACKWARD: tl.constexpr, HAS_LOW: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, MERGE: tl.constexpr,
):
    """Compute the operands of the scans for the chunks that fit one decay reference.

    In these chunks no channel forgets more than 120 bits, so decays can be taken relative to a single point.
    ``dplr_prepare_rest`` computes all other chunks. ``dplr_prepare`` describes the operands.

    served: receives 1 for chunks that fit, else 0.
    ONE: False in tests, where no chunk counts as fitting.

    q, k: [rows, H, K].
    a, b: [rows, HV, K].
    beta: [rows, HV].
    G: [rows, HV, K], fp32: decays summed within each chunk.
    q_in, a_in, b_out, k_out, W: [rows, HV, K].
    M, P, R, N_, T_, T_low: [rows, HV, BT].
    scratch: [slots, HV, BT, 16], fp32.
    served: [slots, HV], int32.
    bounds: [N + 1] or None.
    """
    program = tl.program_id(0)
    i_h = program % HV
    n, first, length, t0 = chunk_of(program // HV, bounds, T, N, S, BT, VARLEN)
    if t0 < length:
        prepare_from_reference(q=q, k=k, a=a, b=b, beta=beta, G=G, q_in=q_in, a_in=a_in, b_out=b_out,
                               k_out=k_out, W=W, M=M, P=P, R=R, N_=N_, T_=T_, T_low=T_low, scratch=scratch,
                               served=served, scale=scale, n=n, first=first, t0=t0, length=length,
                               i_h=i_h, H=H, HV=HV, K=K, BT=BT, BK=BK, ONE=ONE, TWO_WRITES=TWO_WRITES,
                               ERASE_RATE=ERASE_RATE, BACKWARD=BACKWARD, HAS_LOW=HAS_LOW, PRECISION=PRECISION,
                               MERGE=MERGE)


@triton.jit
def grads_from_reference(q, k, v, a, b, beta, do, x, dy, G, states, dstates, dq, dk, dv, da, db, dbeta, dg,
                         served, scale, n, first, t0, length, i_h, H, HV, K: tl.constexpr, V: tl.constexpr,
                         BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TWO_WRITES: tl.constexpr,
                         ERASE_RATE: tl.constexpr, PRECISION: tl.constexpr):
    """Compute and store the gradients of one chunk and head, if it fits one decay reference.

    ``grads_of_chunk`` in ``backward.py`` describes the inputs and outputs.

    served: 1 for chunks that fit one decay reference, else 0.
    """
    i_qk = i_h // (HV // H)
    rows = tl.arange(0, BT)
    below = rows[:, None] > rows[None, :]
    diagonal = rows[:, None] == rows[None, :]
    last = tl.minimum(BT, length - t0) - 1
    slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
    if tl.load(served + slot) > 0:
        b_beta = rows.to(tl.float32)  # a placeholder, never read if beta does not replace it
        if not TWO_WRITES and not ERASE_RATE:
            b_beta = beta_of(beta, first, t0, length, i_h, HV, BT)
        b_dbeta = tl.zeros([BT], dtype=tl.float32)
        dP = tl.zeros([BT, BT], dtype=tl.float32)
        dR = tl.zeros([BT, BT], dtype=tl.float32)
        for v0 in tl.range(0, V, BV, disable_licm=TWO_WRITES):
            b_x = tile(x, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            b_do = tile(do, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV).to(b_x.dtype)
            dP += tl.dot(b_do, tl.trans(b_x), input_precision=PRECISION)
            if TWO_WRITES:
                b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
                dR += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        qb = tl.sum(tl.where(diagonal, dP, 0.0), 1) * scale
        qk = tl.sum(tl.where(diagonal, dR, 0.0), 1) * scale
        b_P = tl.where(below, dP * scale, 0.0).to(v.dtype.element_ty)
        b_R = tl.where(below, dR * scale, 0.0).to(v.dtype.element_ty)
        dL = tl.zeros([BT, BT], dtype=tl.float32)
        dN = tl.zeros([BT, BT], dtype=tl.float32)
        for v0 in tl.range(0, V, BV, disable_licm=TWO_WRITES):
            b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            b_x = tile(x, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            b_y = tile(dy, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            dL += tl.dot(b_y, tl.trans(b_x), input_precision=PRECISION)
            if TWO_WRITES:
                dN += tl.dot(b_y, tl.trans(b_v), input_precision=PRECISION)
            elif ERASE_RATE:
                put(dv, b_y, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            else:
                wide = b_y.to(tl.float32)
                b_dbeta += tl.sum(wide * b_v.to(tl.float32), 1)
                put(dv, wide * b_beta[:, None], first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        if TWO_WRITES:
            # There is no decay between adjacent tokens, so these pairs add nothing to the gate's gradient. They
            # are computed separately, because otherwise their terms would cancel only in exact arithmetic.
            above = rows[:, None] == rows[None, :] + 1  # for each row, the column of the previous token
            a_from_b = tl.sum(tl.where(above, dL, 0.0), 1)
            b_from_a = tl.sum(tl.where(above, dL, 0.0), 0)
            a_from_k = tl.sum(tl.where(above, dN, 0.0), 1)
            k_from_a = tl.sum(tl.where(above, dN, 0.0), 0)
            below = rows[:, None] > rows[None, :] + 1
        b_L = tl.where(below, dL, 0.0).to(v.dtype.element_ty)
        b_N = tl.where(below, dN, 0.0).to(v.dtype.element_ty)
        for k0 in tl.range(0, K, BK, disable_licm=True):
            # Gradients of the rows that read: q and a.
            b_dq = tl.zeros([BT, BK], dtype=tl.float32)
            b_da = tl.zeros([BT, BK], dtype=tl.float32)
            across = tl.zeros([BK], dtype=tl.float32)
            for v0 in tl.range(0, V, BV, disable_licm=TWO_WRITES):
                at, whole = state_offsets(slot, k0, v0, K, V, BK, BV, False)
                h = tl.load(states + at, mask=whole, other=0.0)
                dh = tl.load(dstates + at, mask=whole, other=0.0)
                b_do = tile(do, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV).to(h.dtype)
                b_y = tile(dy, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
                b_dq += tl.dot(b_do, tl.trans(h), input_precision=PRECISION)
                b_da += tl.dot(b_y, tl.trans(h), input_precision=PRECISION)
                across += tl.sum(h.to(tl.float32) * dh.to(tl.float32), 1)
            reading, written, entered, left, kept = decays_of_sums(
                G, last, first, t0, length, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, EARLIER=False)
            b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
            b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
            b_b = tile(b, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK) if TWO_WRITES else b_k
            X_b = (b_b * written).to(b_q.dtype)
            b_dq *= entered * scale
            # Terms of the gate's gradient: ``here`` counts at a row, ``there`` before it. The term of a pair
            # is added at the row that reads and subtracted at the row that writes, as the same product of
            # the same rounded numbers.
            here = b_q.to(tl.float32) * b_dq
            X_q = (b_q * reading).to(b_q.dtype)
            y = tl.dot(b_P, X_b, input_precision=PRECISION)
            if TWO_WRITES:
                X_k = (b_k * written).to(b_q.dtype)
                y += tl.dot(b_R, X_k, input_precision=PRECISION)
                b_dq += qk[:, None] * b_k.to(tl.float32)
            here += X_q.to(tl.float32) * y
            b_dq += y * reading + qb[:, None] * b_b.to(tl.float32)
            put(dq, b_dq, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            if TWO_WRITES:
                reading, written, entered, left, kept = decays_of_sums(
                    G, last, first, t0, length, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, EARLIER=True)
                b_a = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            else:
                b_a = b_k * -rate_of(
                    a, b_beta, first, t0, length, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, ERASE_RATE=ERASE_RATE)
            b_da *= entered
            there = b_a * b_da
            X_a = (b_a * reading).to(b_q.dtype)
            y = tl.dot(b_L, X_b, input_precision=PRECISION)
            if TWO_WRITES:
                y += tl.dot(b_N, X_k, input_precision=PRECISION)
                b_da += a_from_b[:, None] * rows_beside(
                    b, -1, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                b_da += a_from_k[:, None] * rows_beside(
                    k, -1, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
            there += X_a.to(tl.float32) * y
            b_da += y * reading
            b_dg = tl.zeros([BT, BK], dtype=tl.float32) + (kept * across)[None, :]
            if TWO_WRITES:
                put(da, b_da, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                b_dg += others_summed(there, True)  # a reads the state before the decay of its token
            else:
                here += there
                if ERASE_RATE:
                    put(da, -b_k.to(tl.float32) * b_da, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                else:
                    b_dbeta -= tl.sum(b_k.to(tl.float32) * b_da, 1)
                b_da *= -rate_of(
                    a, b_beta, first, t0, length, i_h, HV, K=K, k0=k0, BT=BT, BK=BK, ERASE_RATE=ERASE_RATE)
            # Gradients of the rows that write: b and k.
            b_db = tl.zeros([BT, BK], dtype=tl.float32)
            b_dk = tl.zeros([BT, BK], dtype=tl.float32)
            for v0 in tl.range(0, V, BV, disable_licm=TWO_WRITES):
                at, whole = state_offsets(slot, k0, v0, K, V, BK, BV, False)
                dh = tl.load(dstates + at, mask=whole, other=0.0)
                b_x = tile(x, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
                b_db += tl.dot(b_x, tl.trans(dh), input_precision=PRECISION)
                if TWO_WRITES:
                    b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
                    b_dk += tl.dot(b_v, tl.trans(dh), input_precision=PRECISION)
            if TWO_WRITES:  # loaded again, because they would fill the registers meanwhile
                b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
                b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
                b_b = tile(b, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            b_db *= written * left[None, :]
            sent = b_b.to(tl.float32) * b_db
            y = tl.dot(tl.trans(b_P), X_q, input_precision=PRECISION)
            y += tl.dot(tl.trans(b_L), X_a, input_precision=PRECISION)
            here -= X_b.to(tl.float32) * y
            b_db += y * written + qb[:, None] * b_q.to(tl.float32)
            if TWO_WRITES:
                next_a = rows_beside(a, 1, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                b_db += b_from_a[:, None] * next_a
                put(db, b_db, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
                b_dk *= written * left[None, :]
                sent += b_k.to(tl.float32) * b_dk
                y = tl.dot(tl.trans(b_R), X_q, input_precision=PRECISION)
                y += tl.dot(tl.trans(b_N), X_a, input_precision=PRECISION)
                here -= X_k.to(tl.float32) * y
                b_dk += y * written + qk[:, None] * b_q.to(tl.float32) + k_from_a[:, None] * next_a
                put(dk, b_dk, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            else:
                put(dk, b_db + b_da, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            b_dg += tl.cumsum(here, 0, reverse=True) + others_summed(sent, False)
            put(dg, b_dg, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        if not TWO_WRITES and not ERASE_RATE:
            tl.store(dbeta + (first + t0 + rows) * HV + i_h, b_dbeta, mask=t0 + rows < length)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def dplr_grads_one(
    q, k, v, a, b, beta, do, x, dy, G, states, dstates, dq, dk, dv, da, db, dbeta, dg, served, bounds, scale,
    T, N, H, HV, S, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TWO_WRITES: tl.constexpr, ERASE_RATE: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the gradients of the chunks that fit one decay reference.

    In these chunks no channel forgets more than 120 bits, so decays can be taken relative to a single point.
    ``dplr_grads_rest`` computes all other chunks. ``grads_of_chunk`` in ``backward.py`` describes the inputs
    and outputs.

    served: 1 for chunks that fit, as stored by ``dplr_prepare_one`` or ``dplr_sums``, else 0.

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
    """
    program = tl.program_id(0)
    i_h = program % HV
    n, first, length, t0 = chunk_of(program // HV, bounds, T, N, S, BT, VARLEN)
    if t0 < length:
        grads_from_reference(
            q=q, k=k, v=v, a=a, b=b, beta=beta, do=do, x=x, dy=dy, G=G, states=states, dstates=dstates,
            dq=dq, dk=dk, dv=dv, da=da, db=db, dbeta=dbeta, dg=dg, served=served, scale=scale, n=n,
            first=first, t0=t0, length=length, i_h=i_h, H=H, HV=HV, K=K, V=V, BT=BT, BK=BK, BV=BV,
            TWO_WRITES=TWO_WRITES, ERASE_RATE=ERASE_RATE, PRECISION=PRECISION)
