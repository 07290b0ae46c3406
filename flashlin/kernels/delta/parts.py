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
from flashlin.kernels.delta.steps import rows_of, sums_read, written
from flashlin.kernels.dplr.windows import FACTS, find_windows, squares_of, store_facts
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


@triton.jit(do_not_specialize=["rows", "R"])
def delta_norms(x, y, xx, yy, rows, H, HV, R, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                BK: tl.constexpr):
    """Write the squared norms of BT rows of one head of x to xx, or of y to yy.

    x: [rows, H, K].
    y: [rows, HV, V].
    xx, yy: [HV, R], fp32; only H lines of xx are used.
    """
    program = tl.program_id(0)
    line = program % (H + HV)
    first = (program // (H + HV)).to(tl.int64) * BT
    length = tl.minimum(rows - first, BT)
    own = tl.arange(0, BT)
    if line < H:
        squares = squares_of(x, first, length, line, H, D=K, BT=BT, BD=BK)
        tl.store(xx + line.to(tl.int64) * R + first + own, squares, mask=own < length)
    else:
        squares = squares_of(y, first, length, line - H, HV, D=V, BT=BT, BD=BK)
        tl.store(yy + (line - H).to(tl.int64) * R + first + own, squares, mask=own < length)


@triton.jit(do_not_specialize=["T", "R", "S", "scale"])
def delta_facts(
    kk, vv, qq, oo, betas, G, facts, scale, T, H, HV, R, S, BT: tl.constexpr, FACTS: tl.constexpr,
):
    """Store numbers that bound how each chunk changes states and, given qq, the gradients of states.

    ``dplr/windows.py`` derives the bounds. One program computes one chunk of one head, of dense sequences.

    kk, vv, qq, oo: [HV, R], fp32: squared norms of k, v, q and do; qq and oo are None in forward.
    betas, G: [HV, R], fp32.
    facts: [HV, FACTS, chunks], fp32.
    """
    program = tl.program_id(0)
    i_h = program % HV
    chunk = program // HV
    t0 = chunk % S * BT
    rows = tl.arange(0, BT)
    inside = t0 + rows < T
    line = i_h.to(tl.int64) * R + (chunk // S).to(tl.int64) * T + t0 + rows
    shared = (i_h // (HV // H) - i_h).to(tl.int64) * R + line
    b_beta = tl.load(betas + line, mask=inside, other=0.0)
    highest = tl.load(G + line, mask=inside, other=0.0)  # G is summed within chunks
    highest -= tl.load(G + line - 1, mask=inside & (rows > 0), other=0.0)
    b_kk = tl.load(kk + shared, mask=inside, other=0.0)
    ww = tl.load(vv + line, mask=inside, other=0.0) * b_beta * b_beta
    b_qq, b_oo = b_kk, ww
    READS: tl.constexpr = qq is not None
    if qq is not None:
        b_qq = tl.load(qq + shared, mask=inside, other=0.0) * (scale * scale)
        b_oo = tl.load(oo + line, mask=inside, other=0.0)
    stride = tl.num_programs(0) // HV
    at = facts + i_h.to(tl.int64) * (FACTS * stride) + chunk
    store_facts(at, stride, highest, b_kk, -b_kk * b_beta, b_kk * b_beta * b_beta, ww, b_qq, b_oo,
                length=tl.minimum(T - t0, BT), BT=BT, READS=READS)


def enter_segments(batch: Batch, part: dict[str, Any], constants: dict[str, Any], has_dht: bool = False,
                   back: bool = False) -> None:
    """Compute the initial states of all segments, and store them in part, as ``by_transfers`` does.

    Also store ``part["windows"]`` and, if back is True, ``part["windows_back"]``. Both are None if the plan
    does not launch ``dplr_windows``.

    part: the arguments that launches share, see ``Batch.parts``.
    constants: arguments of ``delta_alone``.
    has_dht: True if ``back_by_transfers`` follows and the final states have gradients.
    back: True in backward.
    """
    plan, kernel = batch.plan, delta_alone
    part.update(windows=None, windows_back=None)
    if plan.has("dplr_windows"):
        norms, chunks = plan.launch("delta_norms"), part["N"] * part["S"]
        programs = -(-part["rows"] // norms.block("BT")) * (batch.H + batch.HV)
        x, y, xx, yy = (part[name] for name in ("k", "v", "kk", "vv"))
        part.update(qq=None, oo=None)
        if back:  # forward has kept the norms of k and v
            x, y = part["q"], part["do"]
            xx, yy = torch.empty(2, batch.HV, part["R"], dtype=torch.float32, device=batch.device)
            part.update(qq=xx, oo=yy)
        start(norms, delta_norms, programs, dict(x=x, y=y, xx=xx, yy=yy, K=batch.K, V=batch.V), part)
        part["facts"] = torch.empty(batch.HV, FACTS, chunks, dtype=torch.float32, device=batch.device)
        start(plan.launch("delta_facts"), delta_facts, chunks * batch.HV, dict(FACTS=FACTS), part)
        find_windows(plan, part, 0, back)
    if plan.has("delta_overlapped_alone"):
        from flashlin.kernels.delta.overlapping_alone import delta_overlapped_alone
        kernel = delta_overlapped_alone
        constants = {name: constants[name] for name in ("V", "DECAY", "V_FIRST", "HALF")}
    by_transfers(batch, part, kernel, constants, has_dht)
