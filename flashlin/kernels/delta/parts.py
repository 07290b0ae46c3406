"""The first step of split sequences in the delta families; see kernels/sequence_split.py.

For each segment, one kernel computes ``alone``, the state that the segment would end with if it started from
zero, and its transfer matrix. The transfer matrix [K, K] is the final state for the identity as initial state
and v = 0, so the same scan computes it from columns of the identity. Backward uses the transposed matrix.
Then the matrix must be as exact as the reverse scan, which compensates rounding errors (HALF). On Hopper,
``overlapping_alone.py`` may compute both, and segments may have windows (``dplr/windows.py``).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.kernels.batch import Batch
from flashlin.kernels.configs import FACTS
from flashlin.kernels.delta.steps import rows_of, sums_read, written
from flashlin.kernels.dplr.windows import above, factor, find_windows, squares_of, store_facts
from flashlin.kernels.sequence_split import added, by_transfers, identity_strip, part_of
from flashlin.kernels.tile_ops import decays, state_offsets, tile


@triton.jit(do_not_specialize=["T", "N", "R", "L"])
def delta_alone(
    k, p, v, A, A_low, betas, G, alone, transfer, undivided, bounds, T, N, H, HV, R, L, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    EARLIER: tl.constexpr, HAS_H0: tl.constexpr, HAS_DHT: tl.constexpr, V_FIRST: tl.constexpr,
    HALF: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Write ``alone`` and the transfer matrix of each segment, and set ``undivided`` to zero.

    alone: the state that a segment would end with if it started from zero. The kernel skips the results that
    no later launch reads. One program computes BV columns of one of the two results for one head.

    k: [rows, H, K].
    p: [rows, H, K], or None.
    v: [rows, HV, V].
    A, A_low: [rows, HV, BT].
    betas, G: [HV, R], fp32.
    alone: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K], fp32.
    transfer: [segments, HV, K, K], fp32.
    undivided: [N, HV], int32.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    STRIPS: tl.constexpr = NV + (K + BV - 1) // BV
    program = tl.program_id(0)
    strip = program % STRIPS
    v0 = strip * BV
    own = program // STRIPS
    i_h = own % HV
    i_qk = i_h // (HV // H)
    n, i_part, first, length, last = part_of(own // HV, bounds, T, N, L, VARLEN)
    if (i_part == 0) & (strip == 0):
        tl.store(undivided + n * HV + i_h, 0)
    h, length, v_length = identity_strip(strip, NV, i_part, length, last, BK, BV, HAS_H0, HAS_DHT)
    for t0 in range(0, length, BT):
        b_k = tile(k, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        b_p = b_k
        if EARLIER:
            b_p = tile(p, first, t0, length, i_qk, H, D=K, d0=0, BT=BT, BD=BK)
        b_v = tile(v, first, t0, v_length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_A = tile(A, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_beta = rows_of(betas, first, t0, length, i_h, R, BT)
        D, total = decays(G, G, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY)
        read = sums_read(G, D, first, t0, length, i_h, R, BT=BT, BLOCK=BT, DECAY=DECAY, EARLIER=EARLIER)
        b_low = b_A
        if HALF:
            b_low = tile(A_low, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_w, _ = written(h, b_p, b_k, b_v, b_A, b_beta, read, D, total, b_low=b_low, DECAY=DECAY, HALF=HALF,
                         PRECISION=PRECISION)
        if DECAY != 0:
            b_w *= tl.exp2(total - D)[:, None]
            h *= tl.exp2(total)
        h = added(h, tl.trans(b_k), b_w.to(b_k.dtype), PRECISION)
    if strip < NV:
        at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(alone + at, h, mask=inside & (length > 0))
    else:
        at, inside = state_offsets(own, 0, (strip - NV) * BV, K, K, BK, BV, False)
        tl.store(transfer + at, h, mask=inside & (length > 0))


@triton.jit(do_not_specialize=["T", "R", "L", "S", "stride", "known_stride", "scale"])
def delta_facts(
    y, x, betas, G, kk, facts, known, scale, T, H, HV, R, L, S, stride, known_stride, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, FACTS: tl.constexpr, BACK: tl.constexpr,
):
    """Store numbers that bound how each chunk changes states or, with BACK, the gradients of states.

    ``dplr/windows.py`` derives the bounds. One program computes one chunk of one head, of dense sequences.
    There, n_t is a decay times s_t. With BACK, the kernel uses the product of all s_t of the chunk for every
    token. This is never too small, because s_t is at least 1. The product follows from the first number,
    which forward has stored, so the kernel does not read k. It does not read v of the last segment, or q and
    do of the first one, because these segments need no window.

    y: v or, with BACK, do, [rows, HV, V].
    x: q, [rows, H, K], only with BACK.
    betas, G: [HV, R], fp32.
    kk: squared norms of k, [H, R], fp32, only without BACK.
    facts: [HV, FACTS, chunks], fp32, with ``stride`` between the numbers of a chunk.
    known: with BACK, the facts of forward, with ``known_stride`` between the numbers of a chunk.
    L: tokens of a segment. S: chunks of a sequence.
    """
    program = tl.program_id(0)
    i_h = program % HV
    chunk = program // HV
    t0 = chunk % S * BT
    first = (chunk // S).to(tl.int64) * T + t0
    length = tl.minimum(T - t0, BT)
    rows = tl.arange(0, BT)
    inside = rows < length
    line = G + i_h.to(tl.int64) * R + first + rows
    sums = tl.load(line, mask=inside, other=0.0)  # G is summed within chunks
    i_qk = i_h // (HV // H)
    if BACK:
        needed = tl.where(t0 >= L, length, 0)
    else:
        needed = tl.where(t0 // L < (T - 1) // L, length, 0)
    yy = squares_of(y, first, needed, i_h, HV, D=V, BT=BT, BD=BK)
    at = facts + i_h.to(tl.int64) * (FACTS * stride) + chunk
    if BACK:
        known += i_h.to(tl.int64) * (FACTS * known_stride) + chunk
        for i in tl.static_range(3):
            tl.store(at + i * stride, tl.load(known + i * known_stride))
        growth = tl.load(known) - tl.sum(tl.where(rows == length - 1, sums, 0.0), 0)
        through = sums + tl.where(growth < 0.0, 0.0, growth)  # NaN stays NaN
        xx = squares_of(x, first, needed, i_qk, H, D=K, BT=BT, BD=BK)
        share = above(xx, yy) * tl.abs(scale)
        tl.store(at + 3 * stride, tl.sum(share * factor(through), 0))
        tl.store(at + 4 * stride + rows * 0, tl.sqrt(xx) * tl.sqrt(yy) * tl.abs(scale) * tl.exp2(sums),
                 mask=rows == 0)
    else:
        b_beta = rows_of(betas, first, 0, length, i_h, R, BT)
        highest = sums - tl.load(line - 1, mask=inside & (rows > 0), other=0.0)
        xx = tl.load(kk + i_qk.to(tl.int64) * R + first + rows, mask=inside, other=0.0)
        store_facts(at, stride, highest, xx, -xx * b_beta, xx * b_beta * b_beta, yy * b_beta * b_beta, xx, yy,
                    length=length, BT=BT, READS=False)


def enter_segments(batch: Batch, part: dict[str, Any], constants: dict[str, Any], has_dht: bool = False,
                   back: bool = False) -> None:
    """Compute the initial states of all segments, and store them in part, as ``by_transfers`` does.

    Also store ``part["windows"]`` and, if back is True, ``part["windows_back"]``. Both are None if the plan
    does not launch ``dplr_windows``.

    part: the arguments that launches share, see ``Batch.parts``. If there are windows, backward reads
        ``part["facts"]`` of forward.
    constants: arguments of ``delta_alone``.
    has_dht: True if ``back_by_transfers`` follows and the final states have gradients.
    back: True in backward.
    """
    plan, kernel = batch.plan, delta_alone
    part.update(windows=None, windows_back=None)
    if plan.has("dplr_windows"):
        x, y, known = None, part["v"], part["facts"]
        if back:
            x, y, part["facts"] = part["q"], part["do"], torch.empty_like(known)
        start(plan.launch("delta_facts"), delta_facts, part["N"] * part["S"] * batch.HV, dict(
            x=x, y=y, known=known if back else None, K=batch.K, V=batch.V, FACTS=FACTS, BACK=back,
            stride=part["facts"].stride(1), known_stride=known.stride(1)), part)
        find_windows(plan, part, 0, back)
    if plan.has("delta_overlapped_alone"):
        from flashlin.kernels.delta.overlapping_alone import delta_overlapped_alone
        kernel = delta_overlapped_alone
        constants = {name: constants[name] for name in ("V", "DECAY", "V_FIRST", "HALF")}
    by_transfers(batch, part, kernel, constants, has_dht)
