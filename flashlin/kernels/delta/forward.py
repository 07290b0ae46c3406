"""Forward kernels of the delta families: an inverse for each chunk, in parallel, then one fused scan.

Let G_i = g_1 + ... + g_i be the cumulative log decay inside a chunk, and h the state before the chunk. Row i
of a matrix is token i. Then the recurrence u_i = beta_i (v_i - S'^T k_i) is a triangular system:

    u = A y
    y_i = beta_i (v_i - e^{G_i} k_i h)
    A = (I + M)^-1
    M_ij = beta_i e^{G_i - G_j} (k_i . k_j) for j < i, else 0
    o_i = scale (e^{G_i} q_i h + sum_{j <= i} e^{G_i - G_j} (q_i . k_j) u_j)
    h' = e^{G_L} h + sum_j e^{G_L - G_j} k_j^T u_j

With EARLIER (Comba), p replaces the k of the prediction, and reads the state before its own token's decay:

    y_i = beta_i (v_i - e^{G_{i-1}} p_i h)
    M_ij = beta_i e^{G_{i-1} - G_j} (p_i . k_j)

The inverse A does not depend on h, so a kernel with one program per chunk computes it. The scan keeps the
state in registers, as in simple_gla, and only multiplies. Source: Yang et al. 2024 (arXiv 2406.06484;
2412.06464 with the gate), Hu et al. 2025 (arXiv 2506.02475) for p.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.compat.traits import OVERLAPPED
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, precision, summed
from flashlin.kernels.chunked import Scalars
from flashlin.kernels.configs import BLOCK, FACTS
from flashlin.kernels.delta.inputs import Inputs
from flashlin.kernels.delta.packed import chunk_rows, put_tails, tails_of
from flashlin.kernels.delta.parts import enter_segments
from flashlin.kernels.delta.steps import rows_of, sums_read, written
from flashlin.kernels.sequence_split import own_part
from flashlin.kernels.tile_ops import (
    LOG2_E,
    decays,
    first_slot,
    put,
    scaled_decay,
    sequence_of,
    state_offsets,
    tile,
    zero_gaps,
)
from flashlin.kernels.triangular_inverse import lower_blocks, merge, merging, product, substitute


@triton.jit(do_not_specialize=["R"])
def delta_lines(beta, g, betas, G, HV, R, BT: tl.constexpr, BH: tl.constexpr, DECAY: tl.constexpr):
    """Write beta in float32 to betas and, if DECAY is 2, the sums of gates to G, like gate_cumsum.

    Sequences are dense and have whole chunks only. One program computes one chunk of BH heads.

    beta, g: [rows, HV]; g may be None.
    betas, G: [HV, R], fp32.
    """
    NH = (HV + BH - 1) // BH
    program = tl.program_id(0)
    heads = program % NH * BH + tl.arange(0, BH)[None, :]
    rows = (program // NH).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    at = rows * HV + heads
    to = heads.to(tl.int64) * R + rows
    tl.store(betas + to, tl.load(beta + at, mask=heads < HV, other=0.0).to(tl.float32), mask=heads < HV)
    if DECAY == 2:
        x = tl.load(g + at, mask=heads < HV, other=0.0).to(tl.float32) * LOG2_E
        tl.store(G + to, tl.cumsum(tl.where(x < -126.0, -126.0, x), 0), mask=heads < HV)


@triton.jit
def beta_rows(beta, betas, first, t0, length, i_h, HV, R, BT: tl.constexpr):
    """Load BT values of beta [rows, HV] of one head, and store them in betas [HV, R] in float32.

    beta: [rows, HV].
    betas: [HV, R], fp32.
    """
    rows = tl.arange(0, BT)
    inside = t0 + rows < length
    b_beta = tl.load(beta + (first + t0 + rows) * HV + i_h, mask=inside, other=0.0).to(tl.float32)
    tl.store(betas + i_h.to(tl.int64) * R + first + t0 + rows, b_beta, mask=inside)
    return b_beta


@triton.jit
def system(products, b_beta, D_row, D_column, keep, DECAY: tl.constexpr):
    """Return the matrix M of the triangular system (see the module).

    products: the products k_i . k_j of the keys (p_i . k_j for Comba). D_row, D_column: log2 decays of rows
    and columns. Elements outside ``keep`` are zero. They are masked before exp2, because exp2 of their
    differences of decays would overflow.
    """
    if DECAY == 0:
        return tl.where(keep, products * b_beta[:, None], 0.0)
    else:
        return products * b_beta[:, None] * tl.exp2(tl.where(keep, D_row[:, None] - D_column[None, :],
                                                             float("-inf")))


@triton.jit
def put_both(A, A_low, X, first, t0, length, i_h, HV, BT: tl.constexpr, column: tl.constexpr,
             SIDE: tl.constexpr, HAS_LOW: tl.constexpr):
    """Store X [SIDE, SIDE] as a tile of A that begins at token t0 and the given column.

    With HAS_LOW, store the error of rounding X to A's dtype in A_low.
    """
    put(A, X, first, t0, length, i_h, HV, D=BT, d0=column, BT=SIDE, BD=SIDE)
    if HAS_LOW:
        put(A_low, X - X.to(A.dtype.element_ty).to(tl.float32), first, t0, length, i_h, HV, D=BT, d0=column,
            BT=SIDE, BD=SIDE)


@triton.jit
def inverse_of_chunk(k, p, beta, G, A, A_low, betas, scratch, n, first, t0, length, i_h, H, HV, R,
                     K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr,
                     EARLIER: tl.constexpr, HAS_LOW: tl.constexpr, PRECISION: tl.constexpr,
                     MERGE: tl.constexpr):
    """Compute and store the inverse (I + M)^-1 of one chunk and head.

    It works in tiles of 32 x 32. A chunk of 64 tokens has the upper diagonal tile a, the lower diagonal tile
    b, and the tile c in the rows of b and the columns of a. With tiles this small, one warp per program is
    enough, and it never waits for other warps.
    """
    SIDE: tl.constexpr = 32 if BT > 32 else BT
    PAIR: tl.constexpr = BT > SIDE
    t1 = t0 + SIDE
    i_k = i_h // (HV // H)
    a = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    b = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    c = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for k0 in range(0, K, BK):
        k_a = tile(k, first, t0, length, i_k, H, D=K, d0=k0, BT=SIDE, BD=BK)
        p_a = k_a
        if EARLIER:
            p_a = tile(p, first, t0, length, i_k, H, D=K, d0=k0, BT=SIDE, BD=BK)
        a += tl.dot(p_a, tl.trans(k_a), input_precision=PRECISION)
        if PAIR:
            k_b = tile(k, first, t1, length, i_k, H, D=K, d0=k0, BT=SIDE, BD=BK)
            p_b = k_b
            if EARLIER:
                p_b = tile(p, first, t1, length, i_k, H, D=K, d0=k0, BT=SIDE, BD=BK)
            b += tl.dot(p_b, tl.trans(k_b), input_precision=PRECISION)
            c += tl.dot(p_b, tl.trans(k_a), input_precision=PRECISION)
    rows = tl.arange(0, SIDE)
    below = rows[:, None] > rows[None, :]
    slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
    own = scratch + slot.to(tl.int64) * (BT * 24)
    beta_a = beta_rows(beta, betas, first, t0, length, i_h, HV, R, SIDE)
    D_a = beta_a
    if DECAY == 2:
        D_a = rows_of(G, first, t0, length, i_h, R, SIDE)
    read_a = sums_read(G, D_a, first, t0, length, i_h, R, BT=SIDE, BLOCK=BT, DECAY=DECAY, EARLIER=EARLIER)
    a = system(a, beta_a, read_a, D_a, below & (t0 + rows < length)[:, None], DECAY)
    at_a, lower = lower_blocks(own, 0, BT, SIDE)
    tl.store(at_a, a, mask=lower)
    if PAIR:
        beta_b = beta_rows(beta, betas, first, t1, length, i_h, HV, R, SIDE)
        D_b = beta_b
        if DECAY == 2:
            D_b = rows_of(G, first, t1, length, i_h, R, SIDE)
        read_b = sums_read(G, D_b, first, t1, length, i_h, R, BT=SIDE, BLOCK=BT, DECAY=DECAY, EARLIER=EARLIER)
        here = (t1 + rows < length)[:, None]
        b = system(b, beta_b, read_b, D_b, below & here, DECAY)
        c = system(c, beta_b, read_b, D_a, here, DECAY)
        at_b, lower = lower_blocks(own, 1, BT, SIDE)
        tl.store(at_b, b, mask=lower)
    tl.debug_barrier()
    substitute(own, BT)
    tl.debug_barrier()
    for half in range(BT // 32):  # not unrolled, to compile faster
        merge(own, half, BT, MERGE)
    tl.debug_barrier()
    a = tl.load(at_a, mask=lower, other=0.0)
    put_both(A, A_low, a, first, t0, length, i_h, HV, BT=BT, column=0, SIDE=SIDE, HAS_LOW=HAS_LOW)
    if PAIR:
        put_both(A, A_low, tl.zeros([SIDE, SIDE], dtype=tl.float32), first, t0, length, i_h, HV, BT=BT,
                 column=SIDE, SIDE=SIDE, HAS_LOW=HAS_LOW)
        if t1 < length:  # LLVM needs over twice the time for one block of code of both tile rows
            b = tl.load(at_b, mask=lower, other=0.0)
            put_both(A, A_low, b, first, t1, length, i_h, HV, BT=BT, column=SIDE, SIDE=SIDE, HAS_LOW=HAS_LOW)
            c = -product(product(b, c, MERGE), a, MERGE)
            put_both(A, A_low, c, first, t1, length, i_h, HV, BT=BT, column=0, SIDE=SIDE, HAS_LOW=HAS_LOW)


@triton.jit(do_not_specialize=["T", "N", "R", "S"])
def delta_inverse(
    k, p, beta, G, A, A_low, betas, scratch, bounds, T, N, H, HV, R, S, K: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, DECAY: tl.constexpr, EARLIER: tl.constexpr, HAS_LOW: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, MERGE: tl.constexpr,
):
    """Write the inverse A = (I + M)^-1 of every chunk and head, for the scans; forward.py defines M.

    A is [rows, HV, BT]. With HAS_LOW, also write its rounding error A_low, for backward. Also write betas
    [HV, R], beta in float32, in which the values of a chunk are contiguous. scratch: [slots, HV, BT, 24],
    with one slot per chunk. S programs divide the chunks of a sequence.

    k: [rows, H, K].
    p: [rows, H, K], or None.
    beta: [rows, HV].
    G: [HV, R], fp32.
    A, A_low: [rows, HV, BT].
    betas: [HV, R], fp32.
    scratch: [slots, HV, BT, 24], fp32.
    bounds: [N + 1] or None.
    """
    program = tl.program_id(0)
    i_h = program % HV
    share = program // HV % S
    n = program // HV // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            inverse_of_chunk(k, p, beta, G, A, A_low, betas, scratch, n, first=first, t0=t0, length=length,
                             i_h=i_h, H=H, HV=HV, R=R, K=K, BT=BT, BK=BK, DECAY=DECAY, EARLIER=EARLIER,
                             HAS_LOW=HAS_LOW, PRECISION=PRECISION, MERGE=MERGE)
    else:  # one chunk for each program; even a loop of one step would keep all masks in registers
        inverse_of_chunk(k=k, p=p, beta=beta, G=G, A=A, A_low=A_low, betas=betas, scratch=scratch, n=n,
                         first=first, t0=share * BT, length=length, i_h=i_h, H=H, HV=HV, R=R, K=K, BT=BT,
                         BK=BK, DECAY=DECAY, EARLIER=EARLIER, HAS_LOW=HAS_LOW, PRECISION=PRECISION,
                         MERGE=MERGE)


@triton.jit(do_not_specialize=["T", "N", "R", "L", "scale"])
def delta_scan(
    q, k, p, v, A, betas, G, h0, o, ht, undivided, bounds, scale, T, N, H, HV, R, L, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    EARLIER: tl.constexpr, HAS_H0: tl.constexpr, HAS_HT: tl.constexpr, V_FIRST: tl.constexpr,
    VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Run the forward scan of a delta rule: write the outputs o [rows, HV, V] and the final states ht.

    One program computes BV columns of the state of one head, and keeps them in registers from chunk to chunk.

    q, k: [rows, H, K].
    p: [rows, H, K], or None.
    v: [rows, HV, V].
    A: [rows, HV, BT].
    betas, G: [HV, R], fp32.
    h0: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K].
    o: [rows, HV, V].
    ht: [N, HV, K, V] or, with V_FIRST, [N, HV, V, K], fp32.
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
                                                       VARLEN=VARLEN, REVERSE=False)
    if GAPS:
        if i_part == 0:
            zero_gaps(o, bounds, n, T, N, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_H0:
        at, inside = state_offsets(entered * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    rows = tl.arange(0, BT)
    causal = rows[:, None] >= rows[None, :]
    for t0 in range(0, length, BT):
        b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        b_p = b_k
        if EARLIER:
            b_p = tile(p, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_A = tile(A, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_q = tile(q, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        b_beta = rows_of(betas, first, t0, length, i_h, R, BT)
        D, total = decays(G, G, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY)
        read = sums_read(G, D, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY, EARLIER=EARLIER)
        b_h = h.to(b_k.dtype)
        ph = tl.dot(b_p, b_h, input_precision=PRECISION)
        if DECAY == 0:
            y = (b_v - ph) * b_beta[:, None]
        else:
            y = (b_v - ph * tl.exp2(read)[:, None]) * b_beta[:, None]
        u = tl.dot(b_A, y.to(b_A.dtype), input_precision=PRECISION)
        b_u = u.to(b_v.dtype)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_o = tl.dot(b_q, b_h, input_precision=PRECISION)
        if DECAY == 0:
            s = tl.where(causal, s * scale, 0.0)
            b_o *= scale
            b_w = b_u
        else:
            s *= scaled_decay(D, D, causal, scale)
            b_o *= (tl.exp2(D) * scale)[:, None]
            b_w = (u * tl.exp2(total - D)[:, None]).to(b_v.dtype)
            h *= tl.exp2(total)
        b_o += tl.dot(s.to(b_u.dtype), b_u, input_precision=PRECISION)
        h += tl.dot(tl.trans(b_k), b_w, input_precision=PRECISION)
        put(o, b_o, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_HT:
        at, inside = state_offsets(n * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(ht + at, h, mask=inside & last)


@triton.jit(do_not_specialize=["T", "N", "R", "L"])
def delta_states(
    k, p, v, A, betas, G, h0, u, states, undivided, bounds, T, N, H, HV, R, L, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    EARLIER: tl.constexpr, HAS_H0: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Recompute u and the state before each chunk, for backward.

    u: [rows, HV, V]. states: [slots, HV, K, V], with one slot per chunk. It is a separate kernel because two
    more flags in delta_scan would need registers that it does not have.

    k: [rows, H, K].
    p: [rows, H, K], or None.
    v: [rows, HV, V].
    A: [rows, HV, BT].
    betas, G: [HV, R], fp32.
    h0: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K].
    u: [rows, HV, V].
    states: [slots, HV, K, V], one for each chunk.
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
                                                       VARLEN=VARLEN, REVERSE=False)
    if HAS_H0:
        at, inside = state_offsets(entered * HV + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    for t0 in range(0, length, BT):
        b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        b_p = b_k
        if EARLIER:
            b_p = tile(p, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        b_v = tile(v, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_A = tile(A, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_beta = rows_of(betas, first, t0, length, i_h, R, BT)
        D, total = decays(G, G, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY)
        read = sums_read(G, D, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY, EARLIER=EARLIER)
        slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
        to, whole = state_offsets(slot, 0, v0, K, V, BK, BV, False)
        tl.store(states + to, h.to(b_k.dtype), mask=whole)
        b_u, h = written(h, b_p, b_k, b_v, b_A, b_beta, read, D, total, b_low=b_A, DECAY=DECAY, HALF=False,
                         PRECISION=PRECISION)
        put(u, b_u, first, t0, length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)


def launch_forward(plan: Plan, x: Inputs, how: Scalars) -> tuple[
        torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor,
        torch.Tensor | None]:
    """Run the forward launches of a plan; return (o, ht, A, A_low, lines, facts).

    o: outputs [B, T, HV, V]. ht: final states or None. The others are kept for backward:
    A: [B, T, HV, 64], the inverse of each chunk. With chunks of BT < 64 tokens, a row has BT elements.
    A_low: the rounding error of A if it has 16 bits and gradients are needed, else None.
    lines: [2, HV, B * T], float32: beta, and the cumulative sums of g.
    facts: what ``delta_facts`` stores if segments have windows and gradients are needed, else None.
    """
    batch = Batch(plan, x)
    HV, V = batch.HV, batch.V
    scanning = plan.launch("delta_overlapped", "delta_scan")
    inverting = plan.launch("delta_overlapped_inverse", "delta_inverse")
    o, ht = batch.outputs(how.out_dtype, how.has_ht, how.state_v_first)
    # The kernels store rows of BT elements here. BT is unknown when torch.compile traces with fake tensors.
    A = torch.empty(batch.B, batch.T, HV, BLOCK, dtype=x.q.dtype, device=batch.device)
    A_low = torch.empty_like(A) if plan.problem.needs_grad and x.q.dtype != torch.float32 else None
    lines = torch.empty(2, HV, batch.B * batch.T, dtype=torch.float32, device=batch.device)
    facts = kk = None
    if plan.has("dplr_windows"):
        kk = lines.new_empty(batch.H, lines.shape[2])
        facts = lines.new_empty(HV, FACTS, batch.B * -(-batch.T // BLOCK))
    if batch.packed and OVERLAPPED in scanning.traits:
        return o, packed_forward(batch, x, how, o, A, A_low, lines), A, A_low, lines, None
    constants = dict(K=batch.K, VARLEN=batch.packed, PRECISION=precision(plan), DECAY=batch.decay,
                     EARLIER=x.p is not None)
    scanned = dict(constants, V=V, V_FIRST=how.state_v_first)
    for part in batch.parts(scanning, A=A, A_low=A_low, o=o, ht=ht, scale=how.scale, R=lines.shape[2]):
        put_columns(part, lines, facts, kk)
        n = part["N"]
        if OVERLAPPED in inverting.traits:
            from flashlin.kernels.delta.overlapping_inverse import delta_overlapped_inverse
            lining = plan.launch("delta_lines")
            strips = -(-HV // lining.block("BH"))
            start(lining, delta_lines, n * part["S"] * strips, dict(DECAY=batch.decay), part)
            start(inverting, delta_overlapped_inverse, n * part["S"] * HV, dict(
                DECAY=batch.decay, shared=HV // batch.H), part)
        elif batch.T:
            summed(plan, part["g"], part["bounds"], n, part["G"])
            scratch = torch.empty(part["slots"], HV, scanning.block("BT"), 24, dtype=torch.float32,
                                  device=batch.device)
            start(inverting, delta_inverse, n * part["S"] * HV, dict(
                constants, scratch=scratch, HAS_LOW=A_low is not None, MERGE=merging(plan)), part)
        enter_segments(batch, part, dict(scanned, HALF=False))
        ends = dict(HAS_H0=part["h0"] is not None, HAS_HT=how.has_ht)
        if OVERLAPPED in scanning.traits:
            from flashlin.kernels.delta.overlapping import delta_overlapped
            own = {name: scanned[name] for name in ("V", "DECAY", "V_FIRST")}
            batch.scan(delta_overlapped, dict(own, **ends, states=None, whole=batch.T, entries=0), part)
        else:
            batch.scan(delta_scan, dict(scanned, **ends, GAPS=batch.gaps), part)
    return o, ht, A, A_low, lines, facts if plan.problem.needs_grad else None


def packed_forward(batch: Batch, x: Inputs, how: Scalars, o: torch.Tensor, A: torch.Tensor,
                   A_low: torch.Tensor | None, lines: torch.Tensor) -> torch.Tensor | None:
    """Run the forward of packed sequences in Gluon (``packed.py``), and return the final states or None.

    o, A, A_low, lines: the buffers that ``launch_forward`` returns.
    """
    from flashlin.kernels.delta.overlapping_inverse import delta_overlapped_inverse
    plan, HV, bounds = batch.plan, batch.HV, x.bounds
    assert bounds is not None
    inverting = plan.launch("delta_overlapped_inverse")
    BT = inverting.block("BT")
    chunks, middle = batch.T // BT, states_between(batch, how)
    lines[0].copy_(x.beta[0].T)
    for part in batch.parts(inverting, A=A, A_low=A_low, o=o, ht=middle, scale=how.scale, R=lines.shape[2],
                            betas=lines[0], G=lines[1], kk=None, states=None, whole=batch.T, entries=chunks):
        summed(plan, x.g, bounds, batch.N, lines[1])
        part["chunk_rows"] = chunk_rows(plan, bounds, batch.T)
        start(inverting, delta_overlapped_inverse, chunks * HV, dict(
            DECAY=batch.decay, shared=HV // batch.H), {**part, "N": 1, "T": chunks * BT})
        enter_segments(batch, part, dict(
            K=batch.K, V=batch.V, VARLEN=True, PRECISION=precision(plan), DECAY=batch.decay, EARLIER=False,
            V_FIRST=how.state_v_first, HALF=False))
        packed_scan(batch, how, part)
    tails = Inputs(**tails_of(plan, x, "q", "k", "v", "beta", "g"), p=None, h0=middle, bounds=None)
    tail, ht, *_ = launch_forward(plan, tails, how)
    put_tails(plan, o, tail, bounds)
    return ht


def states_between(batch: Batch, how: Scalars) -> torch.Tensor:
    """Return a buffer for the states between the whole chunks and the tails, see ``Batch.outputs``."""
    sides = (batch.V, batch.K) if how.state_v_first else (batch.K, batch.V)
    return torch.empty(batch.N, batch.HV, *sides, dtype=torch.float32, device=batch.device)


def packed_scan(batch: Batch, how: Scalars, part: dict[str, Any]) -> None:
    """Launch the forward scan of the whole chunks of packed sequences.

    part: the arguments of the launch, except for constants.
    """
    from flashlin.kernels.delta.overlapping import delta_overlapped
    batch.scan(delta_overlapped, dict(V=batch.V, DECAY=batch.decay, V_FIRST=how.state_v_first, HAS_HT=True,
                                      HAS_H0=part["h0"] is not None), part)


def put_columns(part: dict[str, Any], lines: torch.Tensor, facts: torch.Tensor | None,
                kk: torch.Tensor | None = None) -> None:
    """Put the columns of lines, facts and kk that belong to a slice of the batch into part, as views.

    part: the values of ``Batch.parts`` for the slice. Packed sequences use all columns.
    lines, facts: see ``launch_forward``. kk: squared norms of k, [H, B * T], float32, or None.
    """
    if part["bounds"] is None:
        begin, end = part["part"].start, part["part"].stop
        lines = lines[..., begin * part["T"]:end * part["T"]]
        if facts is not None:
            facts = facts[..., begin * part["S"]:end * part["S"]]
        if kk is not None:
            kk = kk[:, begin * part["T"]:end * part["T"]]
    part.update(betas=lines[0], G=lines[1], facts=facts, kk=kk, chunk_rows=None)
