"""Backward kernels of gated linear attention and RWKV-6.

A scan recomputes the states, a reverse scan computes their gradients, and a third kernel computes all chunks
at once. There are no atomics, and no partial sums except for RWKV-6's bonus.

In the notation of ``forward.py``, dh is the gradient of the state that leaves a chunk, and ds_ij = scale
(do_i . v_j) for j <= i:

    dv_j = sum_{i >= j} A_ij do_i + (k_j e^{G_L - G_j}) dh
    dh' = Diag(e^{G_L}) dh + scale sum_i (q_i e^{G_i})^T do_i
    dq_i = scale e^{G_i} (do_i h^T) + sum_j ds_ij k_j e^{G_i - G_j}
    dk_j = e^{G_L - G_j} (v_j dh^T) + sum_i ds_ij q_i e^{G_i - G_j}

The sums over pairs are computed level by level like the scores. In a level, each row of X is either an i or a
j. Let Z be the level's pairs of ds, made symmetric. Then each row of Y = Z X is a sum over the rows of the
other half. It is a term of dq for rows that are an i, and of dk for rows that are a j.

The gate g_t scales everything that passes from before token t to token t or later, separately in each
channel. Per channel, let

    x_i = row i of the elementwise product of X and Y
    f_i = q_i . (the first term of dq_i)
    c_j = k_j . (the first term of dk_j)

A pair (i, j) contributes the same number to x_i and to x_j. It is added at i and subtracted at j, so it
counts only for gates between its tokens:

    dg_t = sum_{i >= t} (f_i + sum over levels of (x_i if i is in a second half, else -x_i))
           + sum_{j < t} c_j + e^{G_L} <h, dh>

Pairs i = j do not decay and are left out. Each chunk starts again with <h, dh>, so rounding errors do not add
up along the sequence.

For RWKV-6 (EARLIER), G_{i-1} replaces G_i in all factors of q_i and dq_i. The diagonal adds ds_ii u k_i to
dq_i, ds_ii u q_i to dk_i, and sum_i ds_ii q_i k_i to du. A pair decays by the tokens strictly between its two
tokens, so the gate g_t affects the reading of token i only if t < i:

    dg_t = sum_{i > t} (f_i + x_i where i reads) - sum_{j >= t} (x_j where j is read)
           + sum_{j < t} c_j + e^{G_L} <h, dh>

Here pairs of adjacent tokens do not decay. Like the diagonal, they are computed outside of the levels. Within
the levels their terms in dg would cancel only on paper, and their rounding errors would exceed the result if
every decay is strong.
"""

import torch
import triton
import triton.language as tl

from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, precision
from flashlin.kernels.chunked import STATE_ALONE, Scalars
from flashlin.kernels.gla.decays import bonus_of, rows_beside, summed_after, summed_before, sums_at, sums_read
from flashlin.kernels.gla.forward import decay_to_meeting, halves, prepare, start_chunks
from flashlin.kernels.gla.inputs import Inputs
from flashlin.kernels.gla.one_reference import gla_grads_one
from flashlin.kernels.gla.parts import any_left, gla_alone, sum_of_chunk
from flashlin.kernels.sequence_split import by_decays, part_of
from flashlin.kernels.tile_ops import first_slot, put, sequence_of, state_offsets, tile, zero_gaps


@triton.jit(do_not_specialize=["T", "N", "L"])
def gla_states(
    k_out, v, G, h0, states, bounds, T, N, H, L, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, HAS_H0: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Recompute the state that enters each chunk and store it into ``states``.

    One program computes BV columns of one head's state. The operands come from ``gla_scores``.

    k_out: [rows, H, K].
    v: [rows, H, V].
    G: [rows, H, K], fp32: decays summed within each chunk.
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
        b_k = tile(k_out, first, t0, length, i_h, H, D=K, d0=0, BT=BT, BD=BK)
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        total = sum_of_chunk(G, tl.minimum(BT, length - t0) - 1, first, t0, i_h, H, K, 0, BK)
        slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
        to, whole = state_offsets(slot, 0, v0, K, V, BK, BV, False)
        tl.store(states + to, h.to(states.dtype.element_ty), mask=whole)
        h *= tl.exp2(total)[:, None]
        h += tl.dot(tl.trans(b_k), b_v, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "N", "L", "scale"])
def gla_reverse(
    q_in, k_out, do, A, G, dht, dv, dh0, dstates, bounds, scale, T, N, H, L, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HAS_DHT: tl.constexpr, HAS_DH0: tl.constexpr,
    V_FIRST: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dv, dh0 and the gradient of the state that leaves each chunk, by a reverse scan.

    One program computes BV columns of one head's state. The operands come from ``gla_scores``.

    dstates: receives the gradients of the states that leave the chunks.
    dht: gradients of the states that leave the sequences or segments.

    q_in, k_out: [rows, H, K].
    do: [rows, H, V].
    A: [rows, H, BT].
    G: [rows, H, K], fp32: decays summed within each chunk.
    dht: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K].
    dv: [rows, H, V].
    dh0: [N, H, K, V] or, with V_FIRST, [N, H, V, K].
    dstates: [slots, H, K, V], one entry per chunk.
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
    if HAS_DHT:
        at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        dh = tl.load(dht + at, mask=inside, other=0.0).to(tl.float32)
    else:
        dh = tl.zeros([BK, BV], dtype=tl.float32)
    chunks = (length + BT - 1) // BT
    for i_c in range(chunks):
        t0 = (chunks - 1 - i_c) * BT
        b_q = tile(q_in, first, t0, length, i_h, H, D=K, d0=0, BT=BT, BD=BK)
        b_k = tile(k_out, first, t0, length, i_h, H, D=K, d0=0, BT=BT, BD=BK)
        b_A = tile(A, first, t0, length, i_h, H, D=BT, d0=0, BT=BT, BD=BT)
        b_do = tile(do, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV).to(b_q.dtype)
        total = sum_of_chunk(G, tl.minimum(BT, length - t0) - 1, first, t0, i_h, H, K, 0, BK)
        b_dh = dh.to(b_k.dtype)
        slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
        to, whole = state_offsets(slot, 0, v0, K, V, BK, BV, False)
        tl.store(dstates + to, b_dh, mask=whole)
        b_dv = tl.dot(b_k, b_dh, input_precision=PRECISION)
        b_dv += tl.dot(tl.trans(b_A), b_do, input_precision=PRECISION)
        put(dv, b_dv, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        dh *= tl.exp2(total)[:, None]
        dh += tl.dot(tl.trans(b_q), (b_do * scale).to(b_do.dtype), input_precision=PRECISION)
    if HAS_DH0:
        at, inside = state_offsets(n * H + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(dh0 + at, dh, mask=inside & (i_part == 0))


@triton.jit
def grads_of_chunk(q, k, v, u, do, G, states, dstates, dq, dk, dg, du, scale, n, first, t0, length, i_h, H,
                   K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                   EARLIER: tl.constexpr, PRECISION: tl.constexpr):
    """Compute and store dq, dk and dg [BT, K] of one chunk and head, by halving (see ``forward.py``).

    With EARLIER (RWKV-6) it also stores the chunk's part of the gradient of the bonus u, du [K].

    states: the states that enter the chunks.
    dstates: the gradients of the states that leave the chunks.
    """
    LEVELS: tl.constexpr = 6 if BT == 64 else 5 if BT == 32 else 4
    rows = tl.arange(0, BT)
    last = tl.minimum(BT, length - t0) - 1
    slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
    p = tl.zeros([BT, BT], dtype=tl.float32)
    for v0 in range(0, V, BV):
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        b_do = tile(do, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV).to(b_v.dtype)
        p += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    p *= scale
    diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], p, 0.0), 1)
    both = tl.where(rows[:, None] > rows[None, :], p, tl.trans(p))
    if EARLIER:
        is_above, is_below = rows[:, None] == rows[None, :] + 1, rows[:, None] + 1 == rows[None, :]
        above, below = tl.sum(tl.where(is_above, both, 0.0), 1), tl.sum(tl.where(is_below, both, 0.0), 1)
        both = tl.where(is_above | is_below, 0.0, both)
        for k0 in range(0, K, BK):  # a separate loop, because these sums would spill in the next one
            b_q = tile(q, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            b_k = tile(k, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            columns = k0 + tl.arange(0, BK)
            tl.store(du + slot * K + columns, tl.sum(b_q * b_k * diagonal[:, None], 0), mask=columns < K)
    ds = both.to(v.dtype.element_ty)
    for k0 in range(0, K, BK):
        b_q = tile(q, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        b_k = tile(k, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        b_G = sums_at(G, tl.minimum(rows, last), first, t0, i_h, H, K, k0, BK)
        total = sum_of_chunk(G, last, first, t0, i_h, H, K, k0, BK)
        wide_q = b_q.to(tl.float32)
        wide_k = b_k.to(tl.float32)
        here = tl.zeros([BT, BK], dtype=tl.float32)
        b_dq = diagonal[:, None] * wide_k
        b_dk = diagonal[:, None] * wide_q
        if EARLIER:
            bonus = bonus_of(u, i_h, K, k0, BK)
            b_dq = b_dq * bonus + above[:, None] * rows_beside(
                k, -1, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
            b_dk = b_dk * bonus + below[:, None] * rows_beside(
                q, 1, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        read = tl.zeros([BT, BK], dtype=tl.float32)
        for level in range(LEVELS):
            half = halves(level, BT)
            second = (half % 2 == 1)[:, None]
            decay = decay_to_meeting(b_G, G, half, level, last, first, t0, i_h, H, K=K, k0=k0, BK=BK,
                                     EARLIER=EARLIER)
            b_X = (tl.where(second, b_q, b_k) * decay).to(b_q.dtype)
            b_Z = tl.where((half ^ 1)[:, None] == half[None, :], ds, 0.0).to(b_q.dtype)
            y = tl.dot(b_Z, b_X, input_precision=PRECISION)
            x = b_X.to(tl.float32) * y
            y *= decay
            here += tl.where(second, x, -x)
            if EARLIER:
                read += tl.where(second, 0.0, x)
            b_dq += tl.where(second, y, 0.0)
            b_dk += tl.where(second, 0.0, y)
        from_h = tl.zeros([BT, BK], dtype=tl.float32)
        to_h = tl.zeros([BT, BK], dtype=tl.float32)
        across = tl.zeros([BK], dtype=tl.float32)
        for v0 in range(0, V, BV):
            at, whole = state_offsets(slot, k0, v0, K, V, BK, BV, False)
            h = tl.load(states + at, mask=whole, other=0.0)
            dh = tl.load(dstates + at, mask=whole, other=0.0)
            b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
            b_do = tile(do, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV).to(b_v.dtype)
            from_h += tl.dot(b_do, tl.trans(h), input_precision=PRECISION)
            to_h += tl.dot(b_v, tl.trans(dh), input_precision=PRECISION)
            across += tl.sum(h.to(tl.float32) * dh.to(tl.float32), 1)
        from_h *= tl.exp2(sums_read(
            b_G, G, last, first, t0, i_h, H, K=K, k0=k0, BT=BT, BK=BK, EARLIER=EARLIER)) * scale
        to_h *= tl.exp2(total[None, :] - b_G)
        put(dq, b_dq + from_h, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        put(dk, b_dk + to_h, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        here += wide_q * from_h
        if EARLIER:
            b_dg = summed_after(here, dg, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK) - read
        else:
            b_dg = tl.cumsum(here, 0, reverse=True)
        b_dg += (tl.exp2(total) * across)[None, :]
        b_dg += summed_before(wide_k * to_h, dg, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
        put(dg, b_dg, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)


@triton.jit(do_not_specialize=["T", "N", "S", "scale"])
def gla_grads(
    q, k, v, u, do, G, states, dstates, dq, dk, dg, du, bounds, scale, T, N, H, S, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, EARLIER: tl.constexpr,
    VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dq, dk and dg of all chunks by halving, with one program per chunk and head.

    In a packed batch, S programs divide the chunks of a sequence.

    states: the states that enter the chunks.
    dstates: the gradients of the states that leave the chunks.
    du: with EARLIER (RWKV-6), receives each chunk's part of the gradient of the bonus u.

    q, k: [rows, H, K].
    v: [rows, H, V].
    u: [H, K] or None.
    do: [rows, H, V].
    G: [rows, H, K], fp32: decays summed within each chunk.
    states, dstates: [slots, H, K, V], one entry per chunk.
    dq, dk: [rows, H, K].
    dg: [rows, H, K], fp32.
    du: [slots, H, K], fp32, or None.
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
                zero_gaps(dg, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            grads_of_chunk(q=q, k=k, v=v, u=u, do=do, G=G, states=states, dstates=dstates, dq=dq, dk=dk,
                           dg=dg, du=du, scale=scale, n=n, first=first, t0=t0, length=length, i_h=i_h, H=H,
                           K=K, V=V, BT=BT, BK=BK, BV=BV, EARLIER=EARLIER, PRECISION=PRECISION)
    else:  # one chunk per program; a loop that runs once would still keep every mask in registers
        grads_of_chunk(q=q, k=k, v=v, u=u, do=do, G=G, states=states, dstates=dstates, dq=dq, dk=dk, dg=dg,
                       du=du, scale=scale, n=n, first=first, t0=share * BT, length=length, i_h=i_h, H=H, K=K,
                       V=V, BT=BT, BK=BK, BV=BV, EARLIER=EARLIER, PRECISION=PRECISION)


@triton.jit(do_not_specialize=["T", "N", "shares", "scale"])
def gla_grads_rest(
    q, k, v, u, do, G, states, dstates, dq, dk, dg, du, served, bounds, scale, T, N, H, shares,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EARLIER: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dq, dk and dg of the chunks that do not fit one decay reference, by halving.

    In these chunks some channel forgets more than 120 bits, so decays cannot be taken relative to a single
    point. ``gla_grads_one`` has computed all other chunks. Rows outside of all sequences get zeros.

    states: the states that enter the chunks.
    dstates: the gradients of the states that leave the chunks.
    du: with EARLIER (RWKV-6), receives each chunk's part of the gradient of the bonus u.
    served: 1 for chunks that fit one decay reference, else 0.

    q, k: [rows, H, K].
    v: [rows, H, V].
    u: [H, K] or None.
    do: [rows, H, V].
    G: [rows, H, K], fp32: decays summed within each chunk.
    states, dstates: [slots, H, K, V], one entry per chunk.
    dq, dk: [rows, H, K].
    dg: [rows, H, K], fp32.
    du: [slots, H, K], fp32, or None.
    served: [slots, H], int32.
    bounds: [N + 1] or None.
    shares: programs per sequence.
    """
    program = tl.program_id(0)
    i_h = program % H
    share = program // H % shares
    n = program // H // shares
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:
        if share == 0:
            for k0 in range(0, K, BK):
                zero_gaps(dq, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dk, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dg, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
    slot, end = first_slot(n, first, BT), length
    if not VARLEN:
        end = tl.where(any_left(served, slot, share, length, shares, i_h, H, BT), length, 0)
    for t0 in tl.range(share * BT, end, shares * BT, disable_licm=True):  # or masks would fill the registers
        if tl.load(served + (slot + t0 // BT) * H + i_h) == 0:
            grads_of_chunk(q=q, k=k, v=v, u=u, do=do, G=G, states=states, dstates=dstates, dq=dq, dk=dk,
                           dg=dg, du=du, scale=scale, n=n, first=first, t0=t0, length=length, i_h=i_h, H=H,
                           K=K, V=V, BT=BT, BK=BK, BV=BV, EARLIER=EARLIER, PRECISION=PRECISION)


def launch_backward(plan: Plan, x: Inputs, how: Scalars, do: torch.Tensor, dht: torch.Tensor | None,
        needs: frozenset[str]) -> dict[str, torch.Tensor | None]:
    """Run the backward launches and return the gradients, keyed by input name.

    The gradients of g, u and h0 are fp32.

    how: the scalars of the call.
    do: gradient of o, [B, T, H, V].
    dht: gradient of the final states, with their layout, or None.
    needs: names of the inputs whose gradients are needed.
    """
    batch, whole = Batch(plan, x), needs != STATE_ALONE
    H, K, V = batch.HV, batch.K, batch.V
    finishing = plan.launch("gla_grads_one", "gla_grads")
    grads, du = batch.gradients(needs, "q", "k", "v", "g"), None if x.u is None else torch.zeros_like(x.u)
    constants = dict(K=K, V=V, VARLEN=batch.packed, PRECISION=precision(plan))
    scanned = dict(constants, V_FIRST=how.state_v_first)
    for part in batch.parts(finishing, **grads, do=do, dht=dht, scale=how.scale):
        # q_in and k_out share memory with dq and dk, since their last reader runs before those are written.
        part.update(q_in=part["dq"], k_out=part["dk"])
        prepare(plan, part)
        slots = part["slots"]
        by_decays(batch, part, gla_alone, scanned, ("k_out", "v"), vector=True)
        by_decays(batch, part, gla_alone, scanned, ("q_in", "do"), reverse=True, vector=True)
        for name in ("states", "dstates"):
            part[name] = torch.empty(slots, H, K, V, dtype=x.v.dtype, device=batch.device)
        # Filled with zeros, because not all slots belong to a chunk.
        shares = None if x.u is None else torch.zeros(slots, H, K, dtype=torch.float32, device=batch.device)
        if whole:
            batch.scan(gla_states, dict(scanned, HAS_H0=part["h0"] is not None), part)
        batch.scan(gla_reverse, dict(scanned, HAS_DHT=part["dht"] is not None,
                                     HAS_DH0=part["dh0"] is not None, GAPS=batch.gaps), part)
        if whole:
            start_chunks(plan, (gla_grads, gla_grads_one, gla_grads_rest),
                         dict(constants, du=shares, EARLIER=x.u is not None), part, GAPS=batch.gaps)
        if du is not None and shares is not None:
            du += shares.sum(0)
    return {**batch.by_tensor(grads), "u": du}
