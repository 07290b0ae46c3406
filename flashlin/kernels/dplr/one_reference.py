"""Kimi Delta Attention and Gated DeltaNet 2 by one decay reference: what chunks need, and the gradients they
give.

Scores by halving (forward.py) take six products. Of a chunk none of whose channels forgets more than 120 bits
one reference serves all pairs (kernels/gla/forward.py), in two products, and two for what rounding loses. So
each step has two kernels: the first does the chunks that one reference serves and leaves word of them, the
second, ``dplr_prepare_rest`` and ``dplr_grads_rest``, halves the others. In one kernel the two ways took
registers from each other: a tenth less time forward, none with backward (benchmarks/NOTES.md).
"""

import triton
import triton.language as tl

from flashlin.kernels.gla.backward import summed_before
from flashlin.kernels.gla.forward import (
    decay_from_reference,
    decay_to_reference,
    one_serves,
    sums_at,
    two_of,
)
from flashlin.kernels.gla.parts import sum_of_chunk
from flashlin.kernels.inverse import inverse, product
from flashlin.kernels.pieces import beta_of, first_slot, put, sequence_of, state_offsets, tile


@triton.jit
def served_by_one(
    G,  # [rows, HV, K], fp32: sums of a chunk's decays
    last,  # the chunk's last row
    first,  # the sequence's first row
    t0,  # the chunk's first token
    i_h,  # the head
    HV,  # heads of v
    K: tl.constexpr,
    BK: tl.constexpr,
):
    """Whether one reference serves every channel of a chunk: 1 or 0."""
    served = 1
    for k0 in range(0, K, BK):
        begin = sum_of_chunk(G, 0, first, t0, i_h, HV, K, k0, BK)
        total = sum_of_chunk(G, last, first, t0, i_h, HV, K, k0, BK)
        served = tl.where(one_serves(begin, total), served, 0)
    return served


@triton.jit
def prepare_from_reference(
    q,  # [rows, H, K]
    k,  # [rows, H, K]
    a,  # [rows, HV, K]
    beta,  # [rows, HV]
    G,  # [rows, HV, K], fp32: sums of a chunk's decays
    q_in,  # [rows, HV, K]
    a_in,  # [rows, HV, K]
    b_out,  # [rows, HV, K]
    W,  # [rows, HV, K]
    M,  # [rows, HV, BT]
    P,  # [rows, HV, BT]
    T_,  # [rows, HV, BT]
    T_low,  # [rows, HV, BT]
    scratch,  # [slots, HV, BT, 16], fp32
    served,  # [slots, HV], int32
    scale,
    n,  # the chunk's sequence
    first,  # the sequence's first row
    t0,  # the chunk's first token
    length,  # the sequence's length
    i_h,  # the head
    H,  # heads of q and k
    HV,  # heads of v
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    ONE: tl.constexpr,
    ERASE: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):
    """As ``prepare_chunk``, where one reference serves the chunk; and whether it does, stored. Without ONE,
    for tests, it is said to serve none."""
    i_qk = i_h // (HV // H)
    rows = tl.arange(0, BT)
    last = tl.minimum(BT, length - t0) - 1
    slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
    serves = served_by_one(G, last, first, t0, i_h, HV, K, BK) if ONE else 0
    tl.store(served + slot, serves)
    if serves > 0:
        if not ERASE:
            b_beta = beta_of(beta, first, t0, length, i_h, HV, BT)
        read = tl.zeros([BT, BT], dtype=tl.float32)
        pulled = tl.zeros([BT, BT], dtype=tl.float32)
        qk = tl.zeros([BT], dtype=tl.float32)
        for k0 in range(0, K, BK):
            b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
            b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
            b_G = sums_at(G, tl.minimum(rows, last), first, t0, i_h, HV, K, k0, BK)
            total = sum_of_chunk(G, last, first, t0, i_h, HV, K, k0, BK)
            middle = (sum_of_chunk(G, 0, first, t0, i_h, HV, K, k0, BK) + total) * 0.5
            qk += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
            reading = decay_from_reference(b_G, middle, False)
            X_q = b_q * reading
            X_a = b_k * reading  # but for -beta, which comes later, or with ERASE the sign
            if ERASE:
                X_a *= tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            X_k = b_k * decay_to_reference(b_G, middle)
            entered = tl.exp2(middle)[None, :]
            put(q_in, X_q * (entered * scale), first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            put(b_out, X_k * tl.exp2(total - middle)[None, :], first, t0, length, i_h, HV,
                D=K, d0=k0, BT=BT, BD=BK)
            if BACKWARD:
                if ERASE:
                    entered = -entered
                else:
                    entered = entered * -b_beta[:, None]
                put(a_in, X_a * entered, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            X_q = X_q.to(b_q.dtype)
            X_a = X_a.to(b_q.dtype)
            whole, rest = two_of(X_k, b_q.dtype)
            read += tl.dot(X_q, tl.trans(whole), input_precision=PRECISION)
            pulled += tl.dot(X_a, tl.trans(whole), input_precision=PRECISION)
            if b_q.dtype == tl.bfloat16:
                read += tl.dot(X_q, tl.trans(rest))
                pulled += tl.dot(X_a, tl.trans(rest))
        read = tl.where(rows[:, None] > rows[None, :], read, tl.where(
            rows[:, None] == rows[None, :], qk[:, None], 0.0))
        put(P, read * scale, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        if not ERASE:
            pulled *= b_beta[:, None]
        pulled = tl.where(rows[:, None] > rows[None, :], pulled, 0.0)
        X = inverse(pulled, scratch + slot.to(tl.int64) * (BT * 16), BT, MERGE)
        if ERASE:
            put(M, X, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        else:
            put(M, X * b_beta[None, :], first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        if BACKWARD:
            put(T_, X, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
            if HAS_LOW:
                put(
                    T_low, X - X.to(T_.dtype.element_ty).to(tl.float32), first, t0, length, i_h, HV,
                    D=BT, d0=0, BT=BT, BD=BT)
        for k0 in range(0, K, BK):
            b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            b_G = sums_at(G, tl.minimum(rows, last), first, t0, i_h, HV, K, k0, BK)
            if ERASE:
                rate = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            else:
                rate = b_beta[:, None]
            put(W, product(X, b_k * tl.exp2(b_G) * -rate, MERGE), first, t0, length, i_h, HV,
                D=K, d0=k0, BT=BT, BD=BK)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def dplr_prepare_one(
    q,  # [rows, H, K]
    k,  # [rows, H, K]
    a,  # [rows, HV, K]
    beta,  # [rows, HV]
    G,  # [rows, HV, K], fp32: sums of a chunk's decays
    q_in,  # [rows, HV, K]
    a_in,  # [rows, HV, K]
    b_out,  # [rows, HV, K]
    W,  # [rows, HV, K]
    M,  # [rows, HV, BT]
    P,  # [rows, HV, BT]
    T_,  # [rows, HV, BT]
    T_low,  # [rows, HV, BT]
    scratch,  # [slots, HV, BT, 16], fp32
    served,  # [slots, HV], int32
    bounds,  # [N + 1] or None
    scale,
    T,  # tokens of a sequence
    N,  # sequences
    H,  # heads of q and k
    HV,  # heads of v
    S,  # programs to a sequence
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    ONE: tl.constexpr,
    ERASE: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_LOW: tl.constexpr,
    VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):
    """As ``dplr_prepare``, of the chunks that one reference serves. served [slots, HV]: which those are."""
    program = tl.program_id(0)
    i_h = program % HV
    share = program // HV % S
    n = program // HV // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            prepare_from_reference(
                q=q, k=k, a=a, beta=beta, G=G, q_in=q_in, a_in=a_in, b_out=b_out, W=W, M=M, P=P, T_=T_,
                T_low=T_low, scratch=scratch, served=served, scale=scale, n=n, first=first, t0=t0,
                length=length, i_h=i_h, H=H, HV=HV, K=K, BT=BT, BK=BK, ONE=ONE, ERASE=ERASE,
                BACKWARD=BACKWARD, HAS_LOW=HAS_LOW, PRECISION=PRECISION, MERGE=MERGE)
    else:  # one chunk each; a loop that runs once would still keep every mask in registers
        prepare_from_reference(
            q=q, k=k, a=a, beta=beta, G=G, q_in=q_in, a_in=a_in, b_out=b_out, W=W, M=M, P=P, T_=T_,
            T_low=T_low, scratch=scratch, served=served, scale=scale, n=n, first=first, t0=share * BT,
            length=length, i_h=i_h, H=H, HV=HV, K=K, BT=BT, BK=BK, ONE=ONE, ERASE=ERASE,
            BACKWARD=BACKWARD, HAS_LOW=HAS_LOW, PRECISION=PRECISION, MERGE=MERGE)


@triton.jit
def grads_from_reference(
    q,  # [rows, H, K]
    k,  # [rows, H, K]
    v,  # [rows, HV, V]
    a,  # [rows, HV, K]
    beta,  # [rows, HV]
    do,  # [rows, HV, V]
    x,  # [rows, HV, V]
    dy,  # [rows, HV, V]
    G,  # [rows, HV, K], fp32: sums of a chunk's decays
    states,  # [slots, HV, K, V], one for each chunk
    dstates,  # [slots, HV, K, V], one for each chunk
    dq,  # [rows, HV, K]
    dk,  # [rows, HV, K]
    dv,  # [rows, HV, V]
    da,  # [rows, HV, K]
    dbeta,  # [rows, HV], fp32
    dg,  # [rows, HV, K], fp32
    served,  # [slots, HV], int32
    scale,
    n,  # the chunk's sequence
    first,  # the sequence's first row
    t0,  # the chunk's first token
    length,  # the sequence's length
    i_h,  # the head
    H,  # heads of q and k
    HV,  # heads of v
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ERASE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As ``grads_of_chunk``, where one reference serves the chunk."""
    i_qk = i_h // (HV // H)
    rows = tl.arange(0, BT)
    last = tl.minimum(BT, length - t0) - 1
    slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
    if tl.load(served + slot) > 0:
        if not ERASE:
            b_beta = beta_of(beta, first, t0, length, i_h, HV, BT)
            b_dbeta = tl.zeros([BT], dtype=tl.float32)
        dP = tl.zeros([BT, BT], dtype=tl.float32)
        dL = tl.zeros([BT, BT], dtype=tl.float32)
        for v0 in range(0, V, BV):
            b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            b_do = tile(do, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV).to(b_v.dtype)
            b_x = tile(x, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            b_y = tile(dy, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            dP += tl.dot(b_do, tl.trans(b_x), input_precision=PRECISION)
            dL += tl.dot(b_y, tl.trans(b_x), input_precision=PRECISION)
            if ERASE:
                put(dv, b_y, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
            else:
                wide = b_y.to(tl.float32)
                b_dbeta += tl.sum(wide * b_v.to(tl.float32), 1)
                put(dv, wide * b_beta[:, None], first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        qk = tl.sum(tl.where(rows[:, None] == rows[None, :], dP, 0.0), 1) * scale
        b_P = tl.where(rows[:, None] > rows[None, :], dP * scale, 0.0).to(v.dtype.element_ty)
        b_L = tl.where(rows[:, None] > rows[None, :], dL, 0.0).to(v.dtype.element_ty)
        for k0 in range(0, K, BK):
            b_dq = tl.zeros([BT, BK], dtype=tl.float32)
            b_da = tl.zeros([BT, BK], dtype=tl.float32)
            b_dk = tl.zeros([BT, BK], dtype=tl.float32)
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
                b_dk += tl.dot(b_x, tl.trans(dh), input_precision=PRECISION)
                across += tl.sum(h.to(tl.float32) * dh.to(tl.float32), 1)
            b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
            b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=k0, BT=BT, BD=BK)
            b_G = sums_at(G, tl.minimum(rows, last), first, t0, i_h, HV, K, k0, BK)
            total = sum_of_chunk(G, last, first, t0, i_h, HV, K, k0, BK)
            middle = (sum_of_chunk(G, 0, first, t0, i_h, HV, K, k0, BK) + total) * 0.5
            reading = decay_from_reference(b_G, middle, False)
            written = decay_to_reference(b_G, middle)
            # what the states give, and what of it passes the decays
            b_dq *= reading * (tl.exp2(middle) * scale)[None, :]
            b_da *= reading * tl.exp2(middle)[None, :]
            b_dk *= written * tl.exp2(total - middle)[None, :]
            wide_k = b_k.to(tl.float32)
            b_dg = summed_before(wide_k * b_dk, dg, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            if ERASE:
                rate = tile(a, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            else:
                rate = b_beta[:, None]
            here = b_q.to(tl.float32) * b_dq - rate * wide_k * b_da
            b_dq += qk[:, None] * wide_k
            b_dk += qk[:, None] * b_q.to(tl.float32)
            # what pairs give: counted at the row that reads, taken off at the one that is written
            X_k = (b_k * written).to(b_q.dtype)
            X_q = (b_q * reading).to(b_q.dtype)
            y = tl.dot(b_P, X_k, input_precision=PRECISION)
            here += X_q.to(tl.float32) * y
            b_dq += y * reading
            put(dq, b_dq, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            X_a = (b_k * reading * -rate).to(b_q.dtype)
            y = tl.dot(b_L, X_k, input_precision=PRECISION)
            here += X_a.to(tl.float32) * y
            b_da += y * reading
            y = tl.dot(tl.trans(b_P), X_q, input_precision=PRECISION)
            y += tl.dot(tl.trans(b_L), X_a, input_precision=PRECISION)
            here -= X_k.to(tl.float32) * y
            b_dk += y * written
            put(dk, b_dk - rate * b_da, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            if ERASE:
                put(da, -wide_k * b_da, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
            else:
                b_dbeta -= tl.sum(wide_k * b_da, 1)
            b_dg += (tl.exp2(total) * across)[None, :] + tl.cumsum(here, 0, reverse=True)
            put(dg, b_dg, first, t0, length, i_h, HV, D=K, d0=k0, BT=BT, BD=BK)
        if not ERASE:
            tl.store(dbeta + (first + t0 + rows) * HV + i_h, b_dbeta, mask=t0 + rows < length)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def dplr_grads_one(
    q,  # [rows, H, K]
    k,  # [rows, H, K]
    v,  # [rows, HV, V]
    a,  # [rows, HV, K]
    beta,  # [rows, HV]
    do,  # [rows, HV, V]
    x,  # [rows, HV, V]
    dy,  # [rows, HV, V]
    G,  # [rows, HV, K], fp32: sums of a chunk's decays
    states,  # [slots, HV, K, V], one for each chunk
    dstates,  # [slots, HV, K, V], one for each chunk
    dq,  # [rows, HV, K]
    dk,  # [rows, HV, K]
    dv,  # [rows, HV, V]
    da,  # [rows, HV, K]
    dbeta,  # [rows, HV], fp32
    dg,  # [rows, HV, K], fp32
    served,  # [slots, HV], int32
    bounds,  # [N + 1] or None
    scale,
    T,  # tokens of a sequence
    N,  # sequences
    H,  # heads of q and k
    HV,  # heads of v
    S,  # programs to a sequence
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ERASE: tl.constexpr,
    VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As ``dplr_grads``, of the chunks that one reference serves."""
    program = tl.program_id(0)
    i_h = program % HV
    share = program // HV % S
    n = program // HV // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            grads_from_reference(
                q=q, k=k, v=v, a=a, beta=beta, do=do, x=x, dy=dy, G=G, states=states, dstates=dstates,
                dq=dq, dk=dk, dv=dv, da=da, dbeta=dbeta, dg=dg, served=served, scale=scale, n=n, first=first,
                t0=t0, length=length, i_h=i_h, H=H, HV=HV, K=K, V=V, BT=BT, BK=BK, BV=BV, ERASE=ERASE,
                PRECISION=PRECISION)
    else:  # one chunk each; a loop that runs once would still keep every mask in registers
        grads_from_reference(
            q=q, k=k, v=v, a=a, beta=beta, do=do, x=x, dy=dy, G=G, states=states, dstates=dstates,
            dq=dq, dk=dk, dv=dv, da=da, dbeta=dbeta, dg=dg, served=served, scale=scale, n=n, first=first,
            t0=share * BT, length=length, i_h=i_h, H=H, HV=HV, K=K, V=V, BT=BT, BK=BK, BV=BV, ERASE=ERASE,
            PRECISION=PRECISION)
