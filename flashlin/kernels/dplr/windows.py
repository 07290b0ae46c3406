"""Windows of split sequences: final states of segments from their last chunks, if these forget all before.

``kernels/sequence_split.py`` carries states from segment to segment by transfer matrices. These matrices take
longer than the states themselves. If the last chunks of a segment, its window, forget what came before them,
the final state is computed from the window alone, from a zero state. No transfer matrix is needed.

Token t multiplies the state by (I - k_t a_t^T) Diag(e^{g_t}) and then adds k_t w_t^T. Here a_t is k_t times
its rate, and w_t is the written value. The norm of the matrix is at most n_t:

    n_t = s_t max_c e^{g_tc}
    s_t^2 = (m + sqrt(m^2 - 4 d)) / 2
    d = (1 - a^T k)^2
    m = 1 + d + |a|^2 |k|^2 - (a^T k)^2

s_t is the largest singular value of I - k a^T. With one rate for all channels, it is max(1, |1 - a^T k|).
Thus everything before the window changes the final state by a matrix whose norm is at most

    sum over tokens j before the window of |k_j| |w_j| n_{j+1} ... n_last, plus |h0| n_1 ... n_last

A window must keep this bound below 2^-25 of |k| |w| of the last token, which adds its product to the final
state without a decay. In the norm of the state, the error is then no larger than the rounding error of this
addition in float32. The factor 2 covers the rounding of the bound itself. If one channel decays in no token,
n_t is 1 or more. Then the segment has no window, unless earlier tokens add almost nothing. NaN and infinity
before a window also prevent it.

The gradients of states are bounded in the same way, from the last token to the first. The reverse scan adds
scale q_j do_j^T at token j, and windows are at the start of segments. Everything that reaches the gradient of
the first state passes the matrix of the first token. So both sides of the comparison contain n_1.
``delta_facts`` uses a weaker bound: each token counts s_t of all tokens of its chunk, and the right side
lacks s_1. As s_t is at least 1, this can only make windows rarer.

The GPU decides for each head and segment, from the same numbers in the same order in every replay.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import enter, start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.configs import FACTS
from flashlin.kernels.sequence_split import part_of, parts_of
from flashlin.kernels.tile_ops import tile


@triton.jit
def squares_of(x, first, length, i_h, H, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Return the squared norm of each row of a chunk of x [rows, H, D], [BT]."""
    squares = tl.zeros([BT], dtype=tl.float32)
    for d0 in tl.static_range(0, D, BD):  # unrolled, so that all loads start together
        b_x = tile(x, first, 0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD).to(tl.float32)
        squares += tl.sum(b_x * b_x, 1)
    return squares


@triton.jit
def above(xx, yy):
    """Return a bound of |x| |y|, given sums of squares in which small numbers may count as zero."""
    return tl.sqrt(xx + 1e-35) * tl.sqrt(yy + 1e-35)


@triton.jit
def factor(bits):
    """Return 2^bits, or more if this would be smaller than the smallest normal number. NaN stays NaN."""
    return tl.exp2(tl.where(bits < -126.0, -126.0, bits))


@triton.jit
def store_facts(facts, stride, highest, kk, ka, aa, ww, qq, oo, length, BT: tl.constexpr,
                READS: tl.constexpr):
    """Store numbers that bound how a chunk changes states, see the module. The sign of a is reversed here.

    The numbers are the log2 of n_1 ... n_L; the bound of what the chunk adds to the state after it, and
    |k| |w| of its last token; with READS, the bound of what it adds to the gradient of the state before it,
    and the share of its first token.

    facts: FACTS numbers of the chunk, with ``stride`` between them.
    highest: [BT]: the largest log2 decay of each token.
    kk, ka, aa, ww: [BT]: sums over channels of k^2, k a, a^2 and w^2, where a reads the state.
    qq, oo: [BT]: the same of (scale q)^2 and do^2.
    """
    rows = tl.arange(0, BT)
    d = (1.0 + ka) * (1.0 + ka)
    m = 1.0 + d + tl.maximum(aa * kk - ka * ka, 0.0)
    root = tl.sqrt(tl.maximum(m * m - 4.0 * d, 0.0))
    bits = highest + 0.5 * tl.log2(tl.where(m < 1e18, (m + root) * 0.5, m))  # m * m must not overflow
    bits = tl.where(rows < length, bits, 0.0)
    through = tl.cumsum(bits, 0)
    total = tl.sum(bits, 0)
    tl.store(facts, total)
    tl.store(facts + stride, tl.sum(above(kk, ww) * factor(total - through), 0))
    tl.store(facts + 2 * stride + rows * 0, tl.sqrt(kk) * tl.sqrt(ww), mask=rows == length - 1)
    if READS:
        tl.store(facts + 3 * stride, tl.sum(above(qq, oo) * factor(through), 0))
        tl.store(facts + 4 * stride + rows * 0, tl.sqrt(qq) * tl.sqrt(oo) * tl.exp2(through), mask=rows == 0)


@triton.jit
def window_of(facts, state, own, bounds, T, N, HV, L, stride, otherwise, SIZE: tl.constexpr, BT: tl.constexpr,
              NEAR: tl.constexpr, FACTS: tl.constexpr, VARLEN: tl.constexpr, REVERSE: tl.constexpr):
    """Return the window of one segment and head, as a number of chunks, or ``otherwise`` if it has none.

    The module describes the bound. Here the decays of chunks count only within NEAR chunks of the segment's
    end. What earlier chunks add is bounded as if no decay followed until there.

    state: h0 or, with REVERSE, dht, see ``dplr_windows``.
    own: the number of the segment, times HV, plus the head.
    REVERSE: find the window at the start of the segment, for gradients.
    """
    i_h = own % HV
    n, i_part, first, length, last = part_of(own // HV, bounds, T, N, L, VARLEN)
    chunk, chunks = parts_of(n, bounds, T, BT, VARLEN)
    many = (length + BT - 1) // BT
    begin = i_part * (L // BT)
    near = tl.arange(0, NEAR)
    if REVERSE:
        at = begin + near
        far, end = begin + NEAR, chunks
    else:
        at = begin + many - 1 - near
        far, end = 0, begin + many - NEAR
    ADDED: tl.constexpr = 3 if REVERSE else 1
    inside = (at >= 0) & (at < chunks)
    facts += i_h.to(tl.int64) * (FACTS * stride) + chunk
    bits = tl.load(facts + at, mask=inside, other=0.0)
    added = tl.load(facts + ADDED * stride + at, mask=inside, other=0.0)
    alone = tl.load(facts + (ADDED + 1) * stride + at, mask=inside & (near == 0), other=0.0)
    alone = tl.sum(alone, 0)
    before = 0.0
    if state is not None:
        base = state + (n.to(tl.int64) * HV + i_h) * SIZE
        for i in range(0, SIZE, 4096):
            i_s = i + tl.arange(0, 4096)
            x = tl.load(base + i_s, mask=i_s < SIZE, other=0.0).to(tl.float32)
            before += tl.sum(x * x, 0)
    before = tl.sqrt(before)
    growth = 0.0
    for i in range(far, end, 2048):
        others = i + tl.arange(0, 2048)
        growth += tl.sum(tl.maximum(tl.load(facts + others, mask=others < end, other=0.0), 0.0), 0)
        before += tl.sum(tl.load(facts + ADDED * stride + others, mask=others < end, other=0.0), 0)
    past = tl.cumsum(added * factor(tl.cumsum(bits, 0) - bits), 0, reverse=True)
    past += before * factor(growth + tl.sum(bits, 0))
    alone = tl.where((alone > 0.0) & (alone < float("inf")), alone, -1.0)  # never enough
    enough = (past * 33554432.0 <= alone) & (near <= many)
    window = tl.min(tl.where(enough, near, NEAR), 0)
    return tl.where(window < NEAR, window, otherwise)


@triton.jit(do_not_specialize=["T", "N", "L", "stride", "otherwise"])
def dplr_windows(facts, h0, dht, found, bounds, T, N, HV, L, stride, otherwise, SIZE: tl.constexpr,
                 BT: tl.constexpr, NEAR: tl.constexpr, FACTS: tl.constexpr, VARLEN: tl.constexpr,
                 BACK: tl.constexpr):
    """Find the window of each segment and head (``window_of``) and, with BACK, those of the gradients.

    otherwise: 0 if a segment without a window then needs its transfer, -1 if its head is then not split.

    facts: [HV, FACTS, stride], fp32: numbers of chunks.
    h0, dht: [N, HV, K, V], or None: states and gradients that enter the sequences.
    found: [segments, HV] or, with BACK, [2, segments, HV], int32.
    bounds: [N + 1] or None.
    SIZE: K * V.
    """
    program = tl.program_id(0)
    count = tl.num_programs(0)
    if BACK:
        count = count // 2
    if program < count:
        window = window_of(facts, h0, own=program, bounds=bounds, T=T, N=N, HV=HV, L=L, stride=stride,
                           otherwise=otherwise, SIZE=SIZE, BT=BT, NEAR=NEAR, FACTS=FACTS, VARLEN=VARLEN,
                           REVERSE=False)
    else:
        own = program - count
        window = window_of(facts, dht, own=own, bounds=bounds, T=T, N=N, HV=HV, L=L,
                           stride=stride, otherwise=otherwise, SIZE=SIZE, BT=BT, NEAR=NEAR, FACTS=FACTS,
                           VARLEN=VARLEN, REVERSE=True)
    tl.store(found + program, window)


def find_windows(plan: Plan, x: dict[str, Any], few: int, reverse: bool = False) -> None:
    """Put the windows of all segments and heads into x, as ``windows``, if the plan has them.

    few: in sequences of at most so many segments, a head that has a segment without a window is not split.
    reverse: also put the windows at the start of segments, for gradients, as ``windows_back``.
    """
    if plan.has("dplr_windows"):
        otherwise = -1 if x["T"] <= few * x["L"] else 0
        if x["h0"] is not None:
            enter()  # h0 may still be on its way from another rank
        (_, _, HV, V), K = x["v"].shape, x["q"].shape[3]
        found = torch.empty(1 + reverse, x["parts"], HV, dtype=torch.int32, device=x["v"].device)
        start(plan.launch("dplr_windows"), dplr_windows, found.numel(), dict(
            found=found, stride=x["facts"].stride(1), otherwise=otherwise, SIZE=K * V, FACTS=FACTS,
            VARLEN=x["bounds"] is not None, BACK=reverse), {"dht": None, **x})
        x["windows"] = found[0]
        if reverse:
            x["windows_back"] = found[1]
