"""Backward of the scalar-decay family: three scans, each split so that nothing is a partial sum.
Deterministic: no atomics.

dq needs the state and dk its gradient, both contracted over V: those two split K. dv contracts over K: it
splits V. With the notation of forward.py and dh the gradient of the state leaving a chunk, ds_ij = scale
e^{G_i - G_j} (do_i . v_j) for j <= i:
    dq_i = scale e^{G_i} do_i h^T + sum_j ds_ij k_j
    dk_j = e^{G_L - G_j} v_j dh^T + sum_i ds_ij q_i
    dv_j = e^{G_L - G_j} k_j dh + sum_i scale e^{G_i - G_j} (q_i . k_j) do_i
    dh' = e^{G_L} dh + scale sum_i e^{G_i} q_i^T do_i
The gate: g_t scales whatever passes from before t to t or later. Of the chunk that holds t, with a_i = q_i .
dq_i, b_j = k_j . (the second term of dk_j) and c_j = k_j . (its first term, what token j leaves to later
chunks):
    dg_t = sum_{i >= t} (a_i - b_i) + sum_{j < t} c_j + e^{G_L} <h, dh>
Nothing here is the difference of two large sums: pairs i = j, which cancel on paper but not in floating point
and under strong decays dwarf everything else, are left out of a and b; and every chunk starts anew from <h,
dh>, so rounding does not add up along the sequence. For that the dq scan stores the state entering each
chunk.
"""

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.problem import Plan
from flashlin.kernels.chunked import Scalars
from flashlin.kernels.configs import BLOCK
from flashlin.kernels.pieces import (
    Batch,
    decay_of,
    decays,
    first_slot,
    precision,
    put,
    scaled_decay,
    sequence_of,
    state_offsets,
    summed,
    tile,
    zero_forgotten,
    zero_gaps,
)
from flashlin.kernels.simple_gla.inputs import Inputs
from flashlin.kernels.simple_gla.parts import simple_gla_alone
from flashlin.kernels.splitting import by_decays, part_of


@triton.jit(do_not_specialize=["T", "N", "R", "L", "scale"])
def simple_gla_dq(
    k,  # [rows, H // GROUP, K]
    v,  # [rows, H, V]
    do,  # [rows, H, V]
    q,  # [rows, H // GROUP, K]
    G,  # [H, R], fp32
    gamma,  # [H]
    h0,  # [parts, H, K, V] or, with V_FIRST, [parts, H, V, K]
    dq,  # [rows, H, K]
    a,  # [NK, H, R], fp32
    states,  # [slots, H, K, V], one for each chunk
    bounds,  # [N + 1] or None
    scale,
    T,  # tokens of a sequence
    N,  # sequences
    H,  # heads
    R,  # elements of a line
    L,  # tokens of a part
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_H0: tl.constexpr,
    HAS_DG: tl.constexpr,
    V_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
    GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, and for the gate: a [NK, H, R] = q . dq without the diagonal, states [slots, H, K, V] = h entering
    each chunk. Of a group of GROUP heads with one q and k each head has a dq and a dk of its own, which torch
    adds up."""
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
    if HAS_DG:
        causal = rows[:, None] > rows[None, :]
    else:
        causal = rows[:, None] >= rows[None, :]
    for t0 in range(0, length, BT):
        b_k = tile(k, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=k0, BT=BT, BD=BK)
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=0, BT=BT, BD=BV)
        b_do = tile(do, first, t0, length, i_h, H, D=V, d0=0, BT=BT, BD=BV).to(b_v.dtype)
        D, total = decays(G, gamma, first, t0, length, i_h, R, BT=BT, BLOCK=BLOCK, DECAY=DECAY)
        if HAS_DG:
            slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
            to, whole = state_offsets(slot, k0, 0, K, V, BK, BV, False)
            tl.store(states + to, h.to(states.dtype.element_ty), mask=whole)
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
        if HAS_DG:
            b_q = tile(
                q, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            tl.store(a + (i_k * H + i_h).to(tl.int64) * R + first + t0 + rows, tl.sum(b_q * b_dq, 1),
                     mask=t0 + rows < length)
            diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], p, 0.0), 1)
            b_dq += (diagonal * scale)[:, None] * b_k.to(tl.float32)
        put(dq, b_dq, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)


@triton.jit(do_not_specialize=["T", "N", "R", "slots", "L", "scale"])
def simple_gla_dk(
    q,  # [rows, H // GROUP, K]
    v,  # [rows, H, V]
    do,  # [rows, H, V]
    k,  # [rows, H // GROUP, K]
    G,  # [H, R], fp32
    gamma,  # [H]
    dht,  # [parts, H, K, V] or, with V_FIRST, [parts, H, V, K]
    dk,  # [rows, H, K]
    dh0,  # [N, H, K, V] or, with V_FIRST, [N, H, V, K]
    b,  # [NK, H, R], fp32
    c,  # [NK, H, R], fp32
    through,  # [NK, slots, H], fp32
    states,  # [slots, H, K, V], one for each chunk
    bounds,  # [N + 1] or None
    scale,
    T,  # tokens of a sequence
    N,  # sequences
    H,  # heads
    R,  # elements of a line
    slots,  # slots of chunks
    L,  # tokens of a part
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_DHT: tl.constexpr,
    HAS_DH0: tl.constexpr,
    HAS_DG: tl.constexpr,
    V_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
    GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dh0, walking the chunks backwards. For the gate: b, c [NK, H, R], and through [NK, slots, H] =
    e^{G_L} <h, dh>."""
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
    if HAS_DG:
        later = rows[:, None] < rows[None, :]
    else:
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
        if HAS_DG:
            slot = (first_slot(n, first, BT) + t0 // BT) * H + i_h
            to, whole = state_offsets(slot, k0, 0, K, V, BK, BV, False)
            h = tl.load(states + to, mask=whole, other=0.0).to(tl.float32)
            tl.store(through + i_k * slots * H + slot, tl.exp2(total) * tl.sum(tl.sum(h * dh, 1), 0))
            b_k = tile(
                k, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=k0, BT=BT, BD=BK).to(tl.float32)
            line = (i_k * H + i_h).to(tl.int64) * R + first + t0 + rows
            tl.store(b + line, tl.sum(b_k * b_dk, 1), mask=t0 + rows < length)
            tl.store(c + line, tl.sum(b_k * onwards, 1), mask=t0 + rows < length)
            diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], p, 0.0), 1)
            b_dk += (diagonal * scale)[:, None] * b_q.to(tl.float32)
        b_dk += onwards
        if DECAY != 0:
            dh *= tl.exp2(total)
        dh += tl.dot(tl.trans(b_w), b_do, input_precision=PRECISION)
        put(dk, b_dk, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)
    if HAS_DH0:
        at, inside = state_offsets(n * H + i_h, k0, 0, K, V, BK, BV, V_FIRST)
        tl.store(dh0 + at, dh, mask=inside & (i_part == 0))


@triton.jit(do_not_specialize=["T", "N", "R", "L", "scale"])
def simple_gla_dv(
    q,  # [rows, H // GROUP, K]
    k,  # [rows, H // GROUP, K]
    do,  # [rows, H, V]
    G,  # [H, R], fp32
    gamma,  # [H]
    dht,  # [parts, H, K, V] or, with V_FIRST, [parts, H, V, K]
    dv,  # [rows, H, V]
    bounds,  # [N + 1] or None
    scale,
    T,  # tokens of a sequence
    N,  # sequences
    H,  # heads
    R,  # elements of a line
    L,  # tokens of a part
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_DHT: tl.constexpr,
    V_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
    GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dv [rows, H, V], walking the chunks backwards with BV columns of the gradient of one head's state."""
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
        s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        b_dv = tl.dot(b_k, dh.to(b_k.dtype), input_precision=PRECISION)
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


@triton.jit(do_not_specialize=["T", "N", "R", "slots", "S"])
def simple_gla_dg(
    a,  # [NK, H, R], fp32
    b,  # [NK, H, R], fp32
    c,  # [NK, H, R], fp32
    through,  # [NK, slots, H], fp32
    dg,  # [rows, H], fp32
    bounds,  # [N + 1] or None
    T,  # tokens of a sequence
    N,  # sequences
    H,  # heads
    R,  # elements of a line
    slots,  # slots of chunks
    S,  # programs to a sequence
    BT: tl.constexpr,
    NK: tl.constexpr,
    VARLEN: tl.constexpr,
    GAPS: tl.constexpr,
):
    """dg [rows, H] out of the scans' parts, chunk by chunk. S programs share a sequence."""
    program = tl.program_id(0)
    i_h = program % H
    share = program // H % S
    n = program // H // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:  # known when compiling, unlike what follows: "and" would not skip the rest
        if share == 0:
            zero_gaps(dg, bounds, n, T, N, i_h, H, D=1, d0=0, BT=BT, BD=1)
    rows = tl.arange(0, BT)
    for t0 in range(share * BT, length, S * BT):
        inside = t0 + rows < length
        here = tl.zeros([BT], dtype=tl.float32)
        left = tl.zeros([BT], dtype=tl.float32)
        across = 0.0
        for i_k in range(NK):
            line = (i_k * H + i_h).to(tl.int64) * R + first + t0 + rows
            here += tl.load(a + line, mask=inside, other=0.0) - tl.load(b + line, mask=inside, other=0.0)
            left += tl.load(c + line, mask=inside, other=0.0)
            across += tl.load(through + i_k * slots * H + (first_slot(n, first, BT) + t0 // BT) * H + i_h)
        b_dg = tl.sum(tl.where(rows[:, None] >= rows[None, :], here[:, None], left[:, None]), 0) + across
        tl.store(dg + (first + t0 + rows) * H + i_h, b_dg, mask=inside)


def run(plan: Plan, x: Inputs, how: Scalars, do: torch.Tensor, dht: torch.Tensor | None,
        needs: frozenset[str]) -> dict[str, torch.Tensor | None]:
    """The gradients by name, None for what is not there, for forward.run's tensors; do [B, T, H, V], dht like
    its final state. Those of g and h0 are fp32."""
    batch = Batch(plan, x)
    H, K, V = batch.HV, batch.K, batch.V
    for_dq, for_dk, for_dv = (plan.launch(f"simple_gla_{name}") for name in ("dq", "dk", "dv"))
    dq, dk, dv = (batch.new(columns, dtype=x.q.dtype) for columns in (K, K, V))
    dg = batch.new(dtype=torch.float32) if x.g is not None and "g" in needs else None
    dh0 = batch.initial_gradient(needs)
    NK = -(-K // for_dk.block("BK"))
    constants = dict(VARLEN=batch.packed, K=K, V=V, DECAY=decay_of(x.g, x.gamma), V_FIRST=how.state_v_first,
                     GROUP=H // max(batch.H, 1), BLOCK=BLOCK, PRECISION=precision(plan))
    # do as the kernels multiply it, also where o is float32
    for part in batch.parts(for_dk.block("BT"), dq=dq, dk=dk, dv=dv, dg=dg, dh0=dh0, do=do.to(x.v.dtype),
                            dht=dht, scale=how.scale, H=H):
        n, rows, slots, numbered = part["N"], part["rows"], part["slots"], part["parts"] * H
        part.update(R=rows, G=summed(plan, part["g"], part["bounds"], n),
                    **dict.fromkeys(("a", "b", "c", "through", "states")))
        part["h0"] = by_decays(plan, batch, part, simple_gla_alone, constants, ("k", "v"))
        part["dht"] = by_decays(plan, batch, part, simple_gla_alone, constants, ("q", "do"), reverse=True)
        if dg is not None:
            for name in ("a", "b", "c"):
                part[name] = torch.empty(NK, H, rows, dtype=torch.float32, device=batch.device)
            part["through"] = torch.empty(NK, slots, H, dtype=torch.float32, device=batch.device)
            part["states"] = torch.empty(slots, H, K, V, dtype=x.q.dtype, device=batch.device)
        start(for_dq, simple_gla_dq, numbered * NK,
              dict(constants, GAPS=batch.gaps, HAS_H0=part["h0"] is not None, HAS_DG=dg is not None), part)
        start(for_dk, simple_gla_dk, numbered * NK, dict(
            constants, GAPS=batch.gaps, HAS_DHT=part["dht"] is not None, HAS_DH0=dh0 is not None,
            HAS_DG=dg is not None), part)
        start(for_dv, simple_gla_dv, numbered * -(-V // for_dv.block("BV")),
              dict(constants, GAPS=batch.gaps, HAS_DHT=part["dht"] is not None), part)
        if dg is not None:
            start(plan.launch("simple_gla_dg"), simple_gla_dg, n * H * part["S"],
                  dict(NK=NK, VARLEN=batch.packed, GAPS=batch.gaps), part)
    zero_forgotten(dg, x.g)
    return dict(q=batch.of_groups(dq), k=batch.of_groups(dk), v=dv, g=dg, gamma=None, h0=dh0)
