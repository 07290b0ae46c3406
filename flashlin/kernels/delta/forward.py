"""Forward of the delta families: the inverse of each chunk, all chunks at once, then one fused scan. Tensors in, tensors out.

With the decay G_i = g_1 + ... + g_i inside a chunk and the state h entering it (row i of a matrix is token i), the recurrence
u_i = beta_i (v_i - S'^T k_i) is a triangular system:
    u = A y,   y_i = beta_i (v_i - e^{G_i} k_i h),   A = (I + M)^-1,   M_ij = beta_i e^{G_i - G_j} (k_i . k_j) for j < i, else 0
    o_i = scale (e^{G_i} q_i h + sum_{j <= i} e^{G_i - G_j} (q_i . k_j) u_j)          h' = e^{G_L} h + sum_j e^{G_L - G_j} k_j^T u_j
The inverse does not depend on h, so a kernel with a program per chunk writes it, and the scan, which owns the state as in simple_gla, is
left with products. Source: Yang et al. 2024 (arXiv 2406.06484; 2412.06464 with the gate).
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.problem import Plan
from flashlin.kernels.configs import BLOCK
from flashlin.kernels.pieces import (
    NO_DECAY,
    TOKEN_DECAY,
    decays,
    fills_gaps,
    first_slot,
    parts,
    precision,
    put,
    scaled_decay,
    sequence_of,
    sliced,
    state_offsets,
    tile,
    within,
    zero_gaps,
)
from flashlin.kernels.scans import operand_bytes


@triton.jit
def diagonal_inverses(M, scratch, BT: tl.constexpr):
    """Block-diagonal inverse of I + M for M [BT, BT] strictly lower triangular, in blocks of 16 rows: substitution in float32, all blocks at
    once. M's blocks go through scratch [BT, 16], since only memory lets every column of the inverse read the same row of M without an
    exchange between threads at each of the 15 steps."""
    rows = tl.arange(0, BT)
    same = (rows // 16)[:, None] == (rows // 16)[None, :]
    block = scratch + rows[:, None] * 16 + (rows % 16)[None, :]
    tl.store(block, M, mask=same)
    tl.debug_barrier()
    j = tl.arange(0, 16)
    top = rows // 16 * 256
    X = tl.where(j[:, None] == (rows % 16)[None, :], 1.0, 0.0)  # column c of this is column c % 16 of block c // 16
    for i in tl.static_range(1, 16):  # unrolled, so that no step waits for its row of M
        m = tl.load(scratch + top[None, :] + i * 16 + j[:, None])
        X -= tl.where(j[:, None] == i, tl.sum(m * X, 0)[None, :], 0.0)
    tl.debug_barrier()
    tl.store(scratch + top[None, :] + j[:, None] * 16 + (rows % 16)[None, :], X)
    tl.debug_barrier()
    return tl.load(block, mask=same, other=0.0)


@triton.jit
def top_half(x):
    """float32 cut to the bits that bf16 has. (Rounding to bf16 and back would be converted one number at a time, which is slow.)"""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b for float32 tiles. "split": each as the sum of two bf16 numbers, which keeps 16 bits at the price of three fast products: tf32's 11
    are too few here, since in coherent rows their errors add up instead of averaging out."""
    if PRECISION == "split":
        a_top = top_half(a)
        b_top = top_half(b)
        a_high = a_top.to(tl.bfloat16)
        b_high = b_top.to(tl.bfloat16)
        a_low = (a - a_top).to(tl.bfloat16)
        b_low = (b - b_top).to(tl.bfloat16)
        small = tl.dot(a_high, b_low, tl.dot(a_low, b_high))
        return tl.dot(a_high, b_high, small)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def merged(X, M, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + M)^-1 out of its diagonal blocks' inverses: pairs of blocks, then pairs of pairs. Exact algebra whose terms stay as small as the
    inverse is. (Powers of M do not: for keys that resemble each other they grow like binomials, while the inverse has entries of about 1.)"""
    rows = tl.arange(0, BT)
    if BT >= 32:
        pair = (rows // 32)[:, None] == (rows // 32)[None, :]
        corner = tl.where(pair & ((rows // 16)[:, None] != (rows // 16)[None, :]), M, 0.0)
        X -= product(product(X, corner, PRECISION), X, PRECISION)
        if BT >= 64:
            X -= product(product(X, tl.where(pair, 0.0, M), PRECISION), X, PRECISION)
    return X


@triton.jit
def inverse_of_chunk(k, beta, g, A, A_low, betas, G, scratch, n, first, t0, length, i_h, H, HV, R, K: tl.constexpr, BT: tl.constexpr,
                     BK: tl.constexpr, DECAY: tl.constexpr, HAS_LOW: tl.constexpr, PRECISION: tl.constexpr, MERGE: tl.constexpr):
    rows = tl.arange(0, BT)
    inside = t0 + rows < length
    at = (first + t0 + rows) * HV + i_h
    line = i_h.to(tl.int64) * R + first + t0 + rows
    b_beta = tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(betas + line, b_beta, mask=inside)
    if DECAY == 2:
        D = tl.cumsum(tl.load(g + at, mask=inside, other=0.0).to(tl.float32), 0) * 1.4426950408889634
        tl.store(G + line, D, mask=inside)
    products = tl.zeros([BT, BT], dtype=tl.float32)
    for k0 in range(0, K, BK):
        b_k = tile(k, first, t0, length, i_h // (HV // H), H, K, k0, BT, BK)
        products += tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    below = rows[:, None] > rows[None, :]
    if DECAY == 0:
        M = tl.where(below, products * b_beta[:, None], 0.0)
    else:
        M = products * b_beta[:, None] * tl.exp2(tl.where(below, D[:, None] - D[None, :], float("-inf")))
    slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
    X = diagonal_inverses(M, scratch + slot.to(tl.int64) * (BT * 16), BT)
    X = merged(X, M, BT, MERGE)
    put(A, X, first, t0, length, i_h, HV, BT, 0, BT, BT)
    if HAS_LOW:
        put(A_low, X - X.to(A.dtype.element_ty).to(tl.float32), first, t0, length, i_h, HV, BT, 0, BT, BT)


@triton.jit(do_not_specialize=["T", "N", "R", "S"])
def delta_inverse(k, beta, g, A, A_low, betas, G, scratch, bounds, T, N, H, HV, R, S, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                  DECAY: tl.constexpr, HAS_LOW: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, MERGE: tl.constexpr):
    """A [rows, HV, BT], and for backward what its rounding lost; for the scans betas and G [HV, R] of float32, laid out so that a chunk's are
    one line (G: g / ln 2 summed within the chunk). scratch [slots, HV, BT, 16]. S programs share a sequence."""
    program = tl.program_id(0)
    i_h = program % HV
    share = program // HV % S
    n = program // HV // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if VARLEN:
        for t0 in range(share * BT, length, S * BT):
            inverse_of_chunk(k, beta, g, A, A_low, betas, G, scratch, n, first, t0, length, i_h, H, HV, R, K, BT, BK, DECAY, HAS_LOW,
                             PRECISION, MERGE)
    else:  # one chunk each; a loop that runs once would still keep every mask in registers
        inverse_of_chunk(k, beta, g, A, A_low, betas, G, scratch, n, first, share * BT, length, i_h, H, HV, R, K, BT, BK, DECAY, HAS_LOW,
                         PRECISION, MERGE)


@triton.jit
def rows_of(line, first, t0, length, i_h, R, BT: tl.constexpr):
    """[BT] of a line [HV, R], zeros past the end."""
    rows = tl.arange(0, BT)
    return tl.load(line + i_h.to(tl.int64) * R + first + t0 + rows, mask=t0 + rows < length, other=0.0)


@triton.jit(do_not_specialize=["T", "N", "R", "scale"])
def delta_scan(q, k, v, A, betas, G, h0, o, ht, bounds, scale, T, N, H, HV, R, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
               BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, HAS_H0: tl.constexpr, HAS_HT: tl.constexpr, V_FIRST: tl.constexpr,
               VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr):
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    nh = program // NV
    i_h = nh % HV
    i_qk = i_h // (HV // H)
    n = nh // HV
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:
        zero_gaps(o, bounds, n, T, N, i_h, HV, V, v0, BT, BV)
    at, inside = state_offsets(nh, 0, v0, K, V, BK, BV, V_FIRST)
    if HAS_H0:
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    rows = tl.arange(0, BT)
    causal = rows[:, None] >= rows[None, :]
    for t0 in range(0, length, BT):
        b_k = tile(k, first, t0, length, i_qk, H, K, 0, BT, BK)
        b_v = tile(v, first, t0, length, i_h, HV, V, v0, BT, BV)
        b_A = tile(A, first, t0, length, i_h, HV, BT, 0, BT, BT)
        b_q = tile(q, first, t0, length, i_qk, H, K, 0, BT, BK)
        b_beta = rows_of(betas, first, t0, length, i_h, R, BT)
        D, total = decays(G, G, first, t0, length, i_h, R, BT, BT, DECAY)
        b_h = h.to(b_k.dtype)
        kh = tl.dot(b_k, b_h, input_precision=PRECISION)
        if DECAY == 0:
            y = (b_v - kh) * b_beta[:, None]
        else:
            y = (b_v - kh * tl.exp2(D)[:, None]) * b_beta[:, None]
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
        put(o, b_o, first, t0, length, i_h, HV, V, v0, BT, BV)
    if HAS_HT:
        tl.store(ht + at, h, mask=inside)


@triton.jit(do_not_specialize=["T", "N", "R"])
def delta_states(k, v, A, betas, G, h0, u, states, bounds, T, N, H, HV, R, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                 BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, HAS_H0: tl.constexpr, V_FIRST: tl.constexpr,
                 VARLEN: tl.constexpr, PRECISION: tl.constexpr):
    """The scan again for backward: u [rows, HV, V], and states [slots, HV, K, V], the state entering each chunk. (The scan's own loop
    with two more flags would cost it registers that it has not got.)"""
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    nh = program // NV
    i_h = nh % HV
    i_qk = i_h // (HV // H)
    n = nh // HV
    first, length = sequence_of(n, bounds, T, VARLEN)
    at, inside = state_offsets(nh, 0, v0, K, V, BK, BV, V_FIRST)
    if HAS_H0:
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    for t0 in range(0, length, BT):
        b_k = tile(k, first, t0, length, i_qk, H, K, 0, BT, BK)
        b_v = tile(v, first, t0, length, i_h, HV, V, v0, BT, BV)
        b_A = tile(A, first, t0, length, i_h, HV, BT, 0, BT, BT)
        b_beta = rows_of(betas, first, t0, length, i_h, R, BT)
        D, total = decays(G, G, first, t0, length, i_h, R, BT, BT, DECAY)
        b_h = h.to(b_k.dtype)
        slot = (first_slot(n, first, BT) + t0 // BT) * HV + i_h
        to, whole = state_offsets(slot, 0, v0, K, V, BK, BV, False)
        tl.store(states + to, b_h, mask=whole)
        kh = tl.dot(b_k, b_h, input_precision=PRECISION)
        if DECAY == 0:
            y = (b_v - kh) * b_beta[:, None]
        else:
            y = (b_v - kh * tl.exp2(D)[:, None]) * b_beta[:, None]
            h *= tl.exp2(total)
        b_u = tl.dot(b_A, y.to(b_A.dtype), input_precision=PRECISION)
        put(u, b_u, first, t0, length, i_h, HV, V, v0, BT, BV)
        if DECAY != 0:
            b_u *= tl.exp2(total - D)[:, None]
        h += tl.dot(tl.trans(b_k), b_u.to(b_k.dtype), input_precision=PRECISION)


def run(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g: torch.Tensor | None, h0: torch.Tensor | None,
        bounds: torch.Tensor | None, scale: float, has_ht: bool, v_first: bool,
        out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(o, final state or None), then what backward wants again: A [B, T, HV, 64] and, of 16 bits, what its
    rounding lost, and lines [2, HV, B * T] of beta and summed g.

    q, k [B, T, H, K], v [B, T, HV, V], contiguous, one dtype; beta, g [B, T, HV]; h0 [N, HV, K, V] or, with v_first, [N, HV, V, K];
    bounds [N + 1], rising, within 0 .. T. Rows outside bounds are zeros.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N, rows = (B if bounds is None else bounds.numel() - 1), B * T
    split = parts(plan, N)
    inverting, scanning = plan.launch("delta_inverse"), plan.launch("delta_scan")
    BT = scanning.block("BT")
    o = (torch.empty if fills_gaps(split, bounds) else torch.zeros)(B, T, HV, V, dtype=out_dtype, device=q.device)
    ht = torch.empty((N, HV, V, K) if v_first else (N, HV, K, V), dtype=torch.float32, device=q.device) if has_ht else None
    A = torch.empty(B, T, HV, BLOCK, dtype=q.dtype, device=q.device)  # rows of BT, packed: a compiler's fake tensors know no BT
    A_low = torch.empty_like(A) if keeps_low(plan, q) else None
    lines = torch.empty(2, HV, rows, dtype=torch.float32, device=q.device)
    if N == 0 or HV == 0:  # no program would run to write them
        return o.zero_(), ht, A, A_low, lines
    constants = dict(K=K, VARLEN=bounds is not None, PRECISION=precision(plan), DECAY=NO_DECAY if g is None else TOKEN_DECAY)
    # Three blocks on a multiprocessor instead of two, for hardly any spills (benchmarks/kernels.py takes other limits).
    registers = dict(maxnreg=168) if plan.target.capability == (9, 0) else {}
    for part in split:
        n = part.stop - part.start
        q_, k_, v_, beta_, g_, o_, A_, low_ = (within(x, part, bounds) for x in (q, k, v, beta, g, o, A, A_low))
        h0_, ht_, bounds_, (betas, G) = sliced(h0, part), sliced(ht, part), edges_of(bounds, part), columns(lines, part, T, bounds)
        own_rows = rows if bounds is not None else n * T
        shares = max(1, -(-own_rows // (BT * n)))
        scratch = torch.empty(own_rows // BT + n + 1, HV, BT, 16, dtype=torch.float32, device=q.device)
        start(inverting, delta_inverse, n * shares * HV, (k_, beta_, g_, A_, low_, betas, G, scratch, bounds_, T, n, H, HV, rows, shares),
              dict(constants, HAS_LOW=A_low is not None, MERGE=merging(plan), **registers))
        start(scanning, delta_scan, n * HV * -(-V // scanning.block("BV")),
              (q_, k_, v_, A_, betas, G, h0_, o_, ht_, bounds_, scale, T, n, H, HV, rows),
              dict(constants, V=V, HAS_H0=h0 is not None, HAS_HT=has_ht, V_FIRST=v_first, GAPS=bounds is not None and len(split) == 1))
    return o, ht, A, A_low, lines


def keeps_low(plan: Plan, q: torch.Tensor) -> bool:
    return plan.problem.needs_grad and q.dtype != torch.float32


def edges_of(bounds: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return sliced(bounds, slice(part.start, part.stop + 1))


def columns(lines: torch.Tensor, part: slice, T: int, bounds: torch.Tensor | None) -> torch.Tensor:
    """The part's columns of lines [2, HV, rows]; their rows stay as far apart as they are."""
    return lines if bounds is not None else lines[..., part.start * T:part.stop * T]


def merging(plan: Plan) -> str:
    """How the inverse's blocks are multiplied: see product. Without bf16 products, as float32."""
    full = precision(plan)
    return "split" if full != "ieee" and operand_bytes(plan.problem) == 2 else full
