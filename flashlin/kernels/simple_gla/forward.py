"""Forward of the scalar-decay family: one fused scan over chunks, and one token-by-token kernel. Tensors in, tensors out.

With the decay G_i = g_1 + ... + g_i inside a chunk and the state h entering it (row i of a matrix is token i):
    o_i = scale (e^{G_i} q_i h + sum_{j <= i} e^{G_i - G_j} (q_i . k_j) v_j)          h' = e^{G_L} h + sum_j e^{G_L - G_j} k_j^T v_j
A program owns one sequence, one head and BV columns of the state, which stays in registers while it walks the chunks; outputs are
written on the way, so nothing but q, k, v and o moves. Differences of G are masked before exp, so no factor exceeds a decay.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.problem import Plan
from flashlin.kernels.configs import BLOCK

# How a kernel gets its decay, as a constexpr.
NO_DECAY, HEAD_DECAY, TOKEN_DECAY = 0, 1, 2


@triton.jit
def sequence_of(n, bounds, T, VARLEN: tl.constexpr):
    """First row and length of sequence n; rows are counted through the whole [B * T] batch."""
    if VARLEN:
        first = tl.load(bounds + n).to(tl.int64)
        length = (tl.load(bounds + n + 1).to(tl.int64) - first).to(tl.int32)
    else:
        first = n.to(tl.int64) * T
        length = T
    return first, length


@triton.jit(do_not_specialize=["T", "N", "R", "S"])
def simple_gla_cumsum(g, G, bounds, T, N, H, R, S, BT: tl.constexpr, BH: tl.constexpr, VARLEN: tl.constexpr):
    """G [H, R]: g / ln 2 summed within blocks of BT tokens of each sequence. S programs share a sequence. Laid out so that the scans load a
    chunk's decays as one line, straight into the layouts they need, instead of exchanging them between warps in every chunk."""
    NH = (H + BH - 1) // BH
    program = tl.program_id(0)
    heads = program % NH * BH + tl.arange(0, BH)
    share = program // NH % S
    first, length = sequence_of(program // NH // S, bounds, T, VARLEN)
    rows = tl.arange(0, BT)
    for t0 in range(share * BT, length, S * BT):
        mask = (t0 + rows < length)[:, None] & (heads < H)[None, :]
        x = tl.load(g + (first + t0 + rows)[:, None] * H + heads[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(G + heads.to(tl.int64)[None, :] * R + (first + t0 + rows)[:, None], tl.cumsum(x, 0) * 1.4426950408889634, mask=mask)


@triton.jit
def decays(G, gamma, first, t0, length, i_h, R, BT: tl.constexpr, BLOCK: tl.constexpr, DECAY: tl.constexpr):
    """G_i of the chunk's tokens, and G_L, to base 2. Rows past the end add nothing, so they hold G_L."""
    rows = tl.arange(0, BT)
    if DECAY == 2:
        line = G + i_h.to(tl.int64) * R + first + t0
        inside = t0 + rows < length
        total = tl.load(line + tl.minimum(BT, length - t0) - 1)
        cumulated = tl.where(inside, tl.load(line + rows, mask=inside, other=0.0), total)
        if BT < BLOCK:  # the sums began at the block's start, not at the chunk's
            before = tl.load(line - 1, mask=t0 % BLOCK != 0, other=0.0)
            cumulated -= before
            total -= before
    elif DECAY == 1:
        rate = tl.load(gamma + i_h).to(tl.float32) * 1.4426950408889634
        n = tl.minimum(length - t0, BT)
        cumulated = rate * tl.minimum(rows + 1, n).to(tl.float32)
        total = rate * n.to(tl.float32)
    else:
        cumulated = tl.zeros([BT], dtype=tl.float32)
        total = 0.0
    return cumulated, total


@triton.jit
def scaled_decay(D_row, D_column, causal, scale):
    """scale 2^{D_i - D_j}, zero where not causal: masked before exp2, because there the difference is positive and overflows. scale >= 0
    goes into the exponent, which costs one addition a row instead of a product an element."""
    return tl.exp2(tl.where(causal, (D_row + tl.log2(scale))[:, None] - D_column[None, :], float("-inf")))


@triton.jit
def tile(x, first, t0, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr, BD: tl.constexpr):
    """[BT, BD] of a [rows, H, D] tensor, zeros outside."""
    rows = tl.arange(0, BT)
    cols = d0 + tl.arange(0, BD)
    offsets = rows[:, None] * (H * D) + cols[None, :]
    mask = (t0 + rows < length)[:, None]
    if D % BD != 0:
        mask = mask & (cols < D)[None, :]
    return tl.load(x + ((first + t0) * H + i_h) * D + offsets, mask=mask, other=0.0)


@triton.jit
def put(x, value, first, t0, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr, BD: tl.constexpr):
    """Store [BT, BD] into a [rows, H, D] tensor."""
    rows = tl.arange(0, BT)
    cols = d0 + tl.arange(0, BD)
    offsets = rows[:, None] * (H * D) + cols[None, :]
    mask = (t0 + rows < length)[:, None]
    if D % BD != 0:
        mask = mask & (cols < D)[None, :]
    tl.store(x + ((first + t0) * H + i_h) * D + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def zero_rows(x, first, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr, BD: tl.constexpr):
    for t0 in range(0, length, BT):
        put(x, tl.zeros([BT, BD], dtype=tl.float32), first, t0, length, i_h, H, D, d0, BT, BD)


@triton.jit
def zero_gaps(x, bounds, n, T, N, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr, BD: tl.constexpr):
    """Rows before the first and after the last sequence belong to nobody: zeros, never what the memory held."""
    if n == 0:
        zero_rows(x, n.to(tl.int64), tl.load(bounds).to(tl.int32), i_h, H, D, d0, BT, BD)
    if n == N - 1:
        last = tl.load(bounds + N).to(tl.int64)
        zero_rows(x, last, (T - last).to(tl.int32), i_h, H, D, d0, BT, BD)


@triton.jit
def state_offsets(nh, k0, v0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr):
    """Offsets and mask of a [BK, BV] tile of state nh, stored [K, V] or, with V_FIRST, [V, K]."""
    k = k0 + tl.arange(0, BK)
    v = v0 + tl.arange(0, BV)
    if V_FIRST:
        offsets = k[:, None] + v[None, :] * K
    else:
        offsets = k[:, None] * V + v[None, :]
    return nh.to(tl.int64) * (K * V) + offsets, (k < K)[:, None] & (v < V)[None, :]


@triton.jit(do_not_specialize=["T", "N", "R", "scale"])
def simple_gla_scan(q, k, v, G, gamma, h0, o, ht, bounds, scale, T, N, H, R, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                    BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, HAS_H0: tl.constexpr, HAS_HT: tl.constexpr,
                    V_FIRST: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr):
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    nh = program // NV
    i_h = nh % H
    n = nh // H
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:
        zero_gaps(o, bounds, n, T, N, i_h, H, V, v0, BT, BV)
    at, inside = state_offsets(nh, 0, v0, K, V, BK, BV, V_FIRST)
    if HAS_H0:
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    rows = tl.arange(0, BT)
    causal = rows[:, None] >= rows[None, :]
    for t0 in range(0, length, BT):
        b_q = tile(q, first, t0, length, i_h, H, K, 0, BT, BK)
        b_k = tile(k, first, t0, length, i_h, H, K, 0, BT, BK)
        b_v = tile(v, first, t0, length, i_h, H, V, v0, BT, BV)
        D, total = decays(G, gamma, first, t0, length, i_h, R, BT, BLOCK, DECAY)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_o = tl.dot(b_q, h.to(b_q.dtype), input_precision=PRECISION)
        if DECAY == 0:
            s = tl.where(causal, s * scale, 0.0)
            b_o *= scale
            b_w = b_v
        else:
            s *= scaled_decay(D, D, causal, scale)
            b_o *= (tl.exp2(D) * scale)[:, None]
            b_w = (b_v * tl.exp2(total - D)[:, None]).to(b_v.dtype)  # the narrower side: less to move
            h *= tl.exp2(total)
        b_o += tl.dot(s.to(b_v.dtype), b_v, input_precision=PRECISION)
        h += tl.dot(tl.trans(b_k), b_w, input_precision=PRECISION)
        put(o, b_o, first, t0, length, i_h, H, V, v0, BT, BV)
    if HAS_HT:
        tl.store(ht + at, h, mask=inside)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def simple_gla_step(q, k, v, g, gamma, h0, o, ht, bounds, scale, T, N, H, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                    BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, HAS_H0: tl.constexpr, HAS_HT: tl.constexpr,
                    V_FIRST: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr):
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    nh = program // NV
    i_h = nh % H
    n = nh // H
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:
        zero_gaps(o, bounds, n, T, N, i_h, H, V, v0, BT, BV)
    at, inside = state_offsets(nh, 0, v0, K, V, BK, BV, V_FIRST)
    if HAS_H0:
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    in_k = tl.arange(0, BK)
    in_v = v0 + tl.arange(0, BV)
    for t in range(length):
        row = (first + t) * H + i_h
        b_q = tl.load(q + row * K + in_k, mask=in_k < K, other=0.0).to(tl.float32) * scale
        b_k = tl.load(k + row * K + in_k, mask=in_k < K, other=0.0).to(tl.float32)
        b_v = tl.load(v + row * V + in_v, mask=in_v < V, other=0.0).to(tl.float32)
        if DECAY == 2:
            h *= tl.exp(tl.load(g + row).to(tl.float32))
        elif DECAY == 1:
            h *= tl.exp(tl.load(gamma + i_h).to(tl.float32))
        h += b_k[:, None] * b_v[None, :]
        tl.store(o + row * V + in_v, tl.sum(h * b_q[:, None], 0).to(o.dtype.element_ty), mask=in_v < V)
    if HAS_HT:
        tl.store(ht + at, h, mask=inside)


def run(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gamma: torch.Tensor | None,
        h0: torch.Tensor | None, bounds: torch.Tensor | None, scale: float, has_ht: bool, v_first: bool,
        out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final state or None). q, k [B, T, H, K], v [B, T, H, V], contiguous, one dtype; g [B, T, H]; gamma [H]; h0 [N, H, K, V] or,
    with v_first, [N, H, V, K]; bounds [N + 1], rising, within 0 .. T. Rows outside bounds are zeros. Starts the plan's launches."""
    B, T, H, K = q.shape
    V, N = v.shape[-1], (B if bounds is None else bounds.numel() - 1)
    split = parts(plan, N)
    o = (torch.empty if fills_gaps(split, bounds) else torch.zeros)(B, T, H, V, dtype=out_dtype, device=q.device)
    ht = torch.empty((N, H, V, K) if v_first else (N, H, K, V), dtype=torch.float32, device=q.device) if has_ht else None
    if N == 0 or H == 0:  # no program would run to write them
        return o.zero_(), ht
    constants = dict(K=K, V=V, DECAY=decay_of(g, gamma), HAS_H0=h0 is not None, HAS_HT=has_ht, V_FIRST=v_first,
                     VARLEN=bounds is not None, GAPS=bounds is not None and len(split) == 1)
    for part in split:
        n = part.stop - part.start
        q_, k_, v_, g_, o_ = (within(x, part, bounds) for x in (q, k, v, g, o))
        h0_, ht_, bounds_ = sliced(h0, part), sliced(ht, part), sliced(bounds, slice(part.start, part.stop + 1))
        if plan.problem.mode == "fused_recurrent":
            launch = plan.launch("simple_gla_step")
            start(launch, simple_gla_step, n * H * -(-V // launch.block("BV")),
                  (q_, k_, v_, g_, gamma, h0_, o_, ht_, bounds_, scale, T, n, H), constants)
        else:
            launch = plan.launch("simple_gla_scan")
            start(launch, simple_gla_scan, n * H * -(-V // launch.block("BV")),
                  (q_, k_, v_, summed(plan, g_, bounds_, n), gamma, h0_, o_, ht_, bounds_, scale, T, n, H, B * T if bounds is not None else n * T),
                  dict(constants, BLOCK=BLOCK, PRECISION=precision(plan)))
    return o, ht


def summed(plan: Plan, g: torch.Tensor | None, bounds: torch.Tensor | None, N: int) -> torch.Tensor | None:
    """[H, rows] float32: the decays summed within blocks, as the scans want them. N: sequences in this launch."""
    if g is None:
        return None
    B, T, H = g.shape
    launch = plan.launch("simple_gla_cumsum")
    G = torch.empty(H, B * T, dtype=torch.float32, device=g.device)
    shares = max(1, -(-B * T // (BLOCK * max(N, 1))))
    start(launch, simple_gla_cumsum, N * shares * -(-H // launch.block("BH")), (g, G, bounds, T, N, H, B * T, shares),
          dict(VARLEN=bounds is not None))
    return G


def decay_of(g: torch.Tensor | None, gamma: torch.Tensor | None) -> int:
    return TOKEN_DECAY if g is not None else HEAD_DECAY if gamma is not None else NO_DECAY


def parts(plan: Plan, N: int) -> list[slice]:
    """The sequences of each launch: all of them, or the plan's batch_part at a time."""
    size = plan.problem.batch_part or max(N, 1)
    return [slice(n, min(n + size, N)) for n in range(0, N, size)]


def fills_gaps(split: list[slice], bounds: torch.Tensor | None) -> bool:
    """Whether the kernels write every row. One launch of packed sequences zeroes the rows outside them itself; a part of several
    cannot, since to it the other parts' rows are outside."""
    return bounds is None or len(split) == 1


def within(x: torch.Tensor | None, part: slice, bounds: torch.Tensor | None) -> torch.Tensor | None:
    """Rows of a part: a view of the batch; packed sequences keep the whole row, their bounds are what is split."""
    return x if bounds is not None else sliced(x, part)


def sliced(x: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """x[part], without making a view where that is all of x."""
    return x if x is None or part.stop - part.start == x.shape[0] else x[part]


def precision(plan: Plan) -> str:
    """How fp32 operands are multiplied: three tf32 products (1e-5) from sm_80 on, true fp32 before; plain tf32 only if torch allows it."""
    if plan.target.backend != "cuda" or plan.target.capability < (8, 0):
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
