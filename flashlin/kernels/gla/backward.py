"""Backward of gated linear attention and RWKV-6: a scan that rebuilds states, a reverse scan for their
gradients, then all chunks at once. No atomics, and no partial sums but those of RWKV-6's bonus.

With the notation of forward.py, dh the gradient of the state leaving a chunk and ds_ij = scale (do_i . v_j)
for j <= i:
    dv_j = sum_{i >= j} A_ij do_i + (k_j e^{G_L - G_j}) dh
    dh' = Diag(e^{G_L}) dh + scale sum_i (q_i e^{G_i})^T do_i
    dq_i = scale e^{G_i} (do_i h^T) + sum_j ds_ij k_j e^{G_i - G_j}
    dk_j = e^{G_L - G_j} (v_j dh^T) + sum_i ds_ij q_i e^{G_i - G_j}
The sums over pairs go level by level like the scores: in a level rows of X are either an i or a j, so
with Z the level's pairs of ds, made symmetric, Y = Z X holds what each row gets from the other half, dq
of the rows that are an i and dk of those that are a j. The gate: g_t scales whatever passes from before t
to t or later, in each channel by itself. With x_i the row i of X Y (the same number for both ends of a
pair, where a pair is counted at i and taken off at j), f_i = q_i . (the first term of dq_i) and c_j = k_j
. (that of dk_j), all per channel:
    dg_t = sum_{i >= t} (f_i + sum of levels (x_i where i is in a second half, -x_i where it is in a first))
           + sum_{j < t} c_j + e^{G_L} <h, dh>
Pairs i = j do not decay and take no part. Every chunk starts anew from <h, dh>, so rounding does not add up
along the sequence.

RWKV-6 (EARLIER): G_{i-1} takes the place of G_i wherever it goes with q_i, and the diagonal adds ds_ii u k_i
to dq_i, ds_ii u q_i to dk_i and sum_i ds_ii q_i k_i to du. A pair then decays by the tokens between its two,
so at i the gate counts from i - 1 on:
    dg_t = sum_{i > t} (f_i + x_i where i reads) - sum_{j >= t} (x_j where j is read)
           + sum_{j < t} c_j + e^{G_L} <h, dh>
Here neighbours are what does not decay, and stand apart from the levels like the diagonal: in them they would
cancel on paper only, and where every decay is strong drown what is left.
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
from flashlin.kernels.gla.parts import gla_alone, sum_of_chunk
from flashlin.kernels.sequence_split import by_decays, part_of
from flashlin.kernels.tile_ops import first_slot, put, sequence_of, state_offsets, tile, zero_gaps


@triton.jit(do_not_specialize=["T", "N", "L"])
def gla_states(
    k_out,  # [rows, H, K]
    v,  # [rows, H, V]
    G,  # [rows, H, K], fp32: sums of a chunk's decays
    h0,  # [parts, H, K, V] or, with V_FIRST, [parts, H, V, K]
    states,  # [slots, H, K, V], one for each chunk
    bounds,  # [N + 1] or None
    T, N, H, L,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_H0: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """states [slots, H, K, V]: the state entering each chunk."""
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
    q_in, k_out,  # [rows, H, K]
    do,  # [rows, H, V]
    A,  # [rows, H, BT]
    G,  # [rows, H, K], fp32: sums of a chunk's decays
    dht,  # [parts, H, K, V] or, with V_FIRST, [parts, H, V, K]
    dv,  # [rows, H, V]
    dh0,  # [N, H, K, V] or, with V_FIRST, [N, H, V, K]
    dstates,  # [slots, H, K, V], one for each chunk
    bounds,  # [N + 1] or None
    scale,
    T, N, H, L,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_DHT: tl.constexpr, HAS_DH0: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
    GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """dv, dh0, and dstates [slots, H, K, V] = the gradient of the state leaving each chunk."""
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
def grads_of_chunk(
    q, k,  # [rows, H, K]
    v,  # [rows, H, V]
    u,  # [H, K] or None
    do,  # [rows, H, V]
    G,  # [rows, H, K], fp32: sums of a chunk's decays
    states, dstates,  # [slots, H, K, V], one for each chunk
    dq, dk,  # [rows, H, K]
    dg,  # [rows, H, K], fp32
    du,  # [slots, H, K], fp32, or None
    scale,
    n, first, t0, length, i_h, H,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EARLIER: tl.constexpr, PRECISION: tl.constexpr,
):
    """dq, dk, dg [BT, K] of one chunk and head and, with EARLIER, its share du [K] of the bonus's gradient,
    stored."""
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
        for k0 in range(0, K, BK):  # a loop of its own: in the next one these sums spill
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
            decay = decay_to_meeting(
                b_G=b_G, G=G, half=half, level=level, last=last, first=first,
                t0=t0, i_h=i_h, H=H, K=K, k0=k0, BK=BK, EARLIER=EARLIER)
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
    q, k,  # [rows, H, K]
    v,  # [rows, H, V]
    u,  # [H, K] or None
    do,  # [rows, H, V]
    G,  # [rows, H, K], fp32: sums of a chunk's decays
    states, dstates,  # [slots, H, K, V], one for each chunk
    dq, dk,  # [rows, H, K]
    dg,  # [rows, H, K], fp32
    du,  # [slots, H, K], fp32, or None
    bounds,  # [N + 1] or None
    scale,
    T, N, H, S,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EARLIER: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """dq, dk and dg [rows, H, K] of a chunk; with EARLIER, too, what it adds to the bonus's gradient: du
    [slots, H, K]. S programs share a sequence."""
    program = tl.program_id(0)
    i_h = program % H
    share = program // H % S
    n = program // H // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:  # known when compiling, unlike what follows: "and" would not skip the rest
        if share == 0:
            for k0 in range(0, K, BK):
                zero_gaps(dq, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dk, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
                zero_gaps(dg, bounds, n, T, N, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            grads_of_chunk(
                q=q, k=k, v=v, u=u, do=do, G=G, states=states, dstates=dstates, dq=dq, dk=dk, dg=dg, du=du,
                scale=scale, n=n, first=first, t0=t0, length=length, i_h=i_h, H=H,
                K=K, V=V, BT=BT, BK=BK, BV=BV, EARLIER=EARLIER, PRECISION=PRECISION)
    else:  # one chunk each; a loop that runs once would still keep every mask in registers
        grads_of_chunk(
            q=q, k=k, v=v, u=u, do=do, G=G, states=states, dstates=dstates, dq=dq, dk=dk, dg=dg, du=du,
            scale=scale, n=n, first=first, t0=share * BT, length=length, i_h=i_h, H=H,
            K=K, V=V, BT=BT, BK=BK, BV=BV, EARLIER=EARLIER, PRECISION=PRECISION)


@triton.jit(do_not_specialize=["T", "N", "shares", "scale"])
def gla_grads_rest(
    q, k,  # [rows, H, K]
    v,  # [rows, H, V]
    u,  # [H, K] or None
    do,  # [rows, H, V]
    G,  # [rows, H, K], fp32: sums of a chunk's decays
    states, dstates,  # [slots, H, K, V], one for each chunk
    dq, dk,  # [rows, H, K]
    dg,  # [rows, H, K], fp32
    du,  # [slots, H, K], fp32, or None
    served,  # [slots, H], int32
    bounds,  # [N + 1] or None
    scale,
    T, N, H,
    shares,  # programs to a sequence
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EARLIER: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """``gla_grads`` of the chunks that ``gla_grads_one`` has left, and zeros in the rows of no sequence."""
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
    for t0 in range(share * BT, length, shares * BT):
        if tl.load(served + (first_slot(n, first, BT) + t0 // BT) * H + i_h) == 0:
            grads_of_chunk(
                q=q, k=k, v=v, u=u, do=do, G=G, states=states, dstates=dstates, dq=dq, dk=dk, dg=dg, du=du,
                scale=scale, n=n, first=first, t0=t0, length=length, i_h=i_h, H=H, K=K, V=V, BT=BT, BK=BK,
                BV=BV, EARLIER=EARLIER, PRECISION=PRECISION)


def launch_backward(plan: Plan, x: Inputs, how: Scalars, do: torch.Tensor, dht: torch.Tensor | None,
        needs: frozenset[str]) -> dict[str, torch.Tensor | None]:
    """The gradients by name, for launch_forward's tensors; do [B, T, H, V], dht like its final state. Those
    of g, u and h0 are fp32."""
    batch, whole = Batch(plan, x), needs != STATE_ALONE
    H, K, V = batch.HV, batch.K, batch.V
    finishing = plan.launch("gla_grads_one", "gla_grads")
    grads, du = batch.gradients(needs, "q", "k", "v", "g"), None if x.u is None else torch.zeros_like(x.u)
    constants = dict(K=K, V=V, VARLEN=batch.packed, PRECISION=precision(plan))
    scanned = dict(constants, V_FIRST=how.state_v_first)
    for part in batch.parts(finishing, **grads, do=do, dht=dht, scale=how.scale):
        part.update(q_in=part["dq"], k_out=part["dk"])  # read for the last time before those are written
        prepare(plan, part)
        slots = part["slots"]
        by_decays(batch, part, gla_alone, scanned, ("k_out", "v"), vector=True)
        by_decays(batch, part, gla_alone, scanned, ("q_in", "do"), reverse=True, vector=True)
        for name in ("states", "dstates"):
            part[name] = torch.empty(slots, H, K, V, dtype=x.v.dtype, device=batch.device)
        # zeros, because sequences leave slots between them
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
