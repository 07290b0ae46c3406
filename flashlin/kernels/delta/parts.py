"""The first step of split sequences in the delta families; see kernels/sequence_split.py.

For each segment, one kernel computes ``alone``, the state that the segment would end with if it started from
zero, and its transfer matrix. The transfer matrix [K, K] is the final state for the identity as initial state
and v = 0, so the same scan computes it from columns of the identity. Backward uses the transposed matrix.
Then the matrix must be as exact as the reverse scan, which compensates rounding errors (HALF).
"""

import triton
import triton.language as tl

from flashlin.kernels.delta.steps import rows_of, sums_read, written
from flashlin.kernels.sequence_split import added, identity_strip, part_of
from flashlin.kernels.tile_ops import decays, state_offsets, tile


@triton.jit(do_not_specialize=["T", "N", "R", "L"])
def delta_alone(
    k,  # [rows, H, K]
    p,  # [rows, H, K], or None
    v,  # [rows, HV, V]
    A, A_low,  # [rows, HV, BT]
    betas, G,  # [HV, R], fp32
    alone,  # [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K], fp32
    transfer,  # [segments, HV, K, K], fp32
    undivided,  # [N, HV], int32
    bounds,  # [N + 1] or None
    T, N, H, HV, R, L,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, EARLIER: tl.constexpr, HAS_H0: tl.constexpr, HAS_DHT: tl.constexpr,
    V_FIRST: tl.constexpr, HALF: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Write ``alone`` and the transfer matrix of each segment, and set ``undivided`` to zero.

    alone: the state that a segment would end with if it started from zero. The kernel skips the results that
    no later launch reads. One program computes BV columns of one of the two results for one head.
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
