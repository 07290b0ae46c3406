"""The first step for split sequences of the delta families with a decay for each key channel.

For each segment it computes the final state from a zero initial state, and the transfer: a K x K matrix that
maps the initial state to its contribution to the final state. ``kernels/sequence_split.py`` and
``kernels/delta/parts.py`` describe the method.
"""

import triton
import triton.language as tl

from flashlin.kernels.gla.parts import sum_of_chunk
from flashlin.kernels.sequence_split import added, identity_strip, part_of
from flashlin.kernels.tile_ops import state_offsets, tile


@triton.jit(do_not_specialize=["T", "N", "L"])
def dplr_alone(
    b_out, k_out, W, M, v, G, alone, transfer, undivided, windows, windows_back, bounds, T, N, HV, L,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TWO_WRITES: tl.constexpr, HAS_H0: tl.constexpr, HAS_DHT: tl.constexpr, V_FIRST: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the final state of each segment from a zero initial state, and its transfer matrix.

    The state is not computed for the last segment of a sequence. The transfer is not computed for the first
    segment without HAS_H0, and not for the last one without HAS_DHT. One program computes BV columns of one
    head's state or transfer. The operands come from ``dplr_prepare``.

    alone: receives the final states of segments that start from zero.
    transfer: receives the K x K matrices that map initial states to their contribution to final states.
    undivided: [N, HV], set to 0 here. A later kernel sets it to 1 for heads that are not split after all.
    windows: from ``dplr_windows``. A segment with a window starts at the window and needs no transfer. At 0
        the whole segment is scanned. At -1 the head is not split, so nothing is scanned.
    windows_back: the same for the reverse scan. In backward, a segment has a transfer if one of them is 0.

    b_out, k_out, W: [rows, HV, K].
    M: [rows, HV, BT].
    v: [rows, HV, V].
    G: [rows, HV, K], fp32: decays summed within each chunk.
    alone: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K], fp32.
    transfer: [segments, HV, K, K], fp32.
    undivided: [N, HV], int32.
    windows, windows_back: [segments, HV], int32, or None.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    STRIPS: tl.constexpr = NV + (K + BV - 1) // BV
    program = tl.program_id(0)
    strip = program % STRIPS
    v0 = strip * BV
    own = program // STRIPS
    i_h = own % HV
    n, i_part, first, length, last = part_of(own // HV, bounds, T, N, L, VARLEN)
    if (i_part == 0) & (strip == 0):
        tl.store(undivided + n * HV + i_h, 0)
    h, length, v_length = identity_strip(strip, NV, i_part, length, last, BK, BV, HAS_H0, HAS_DHT)
    if windows is not None:
        window = tl.load(windows + own)
        unused = (window != 0) | last
        if windows_back is not None:
            unused = unused & ((tl.load(windows_back + own) != 0) | (i_part == 0))
        if strip < NV:
            before = tl.where(window == 0, 0, length - tl.minimum(length, tl.maximum(window, 0) * BT))
            first += before
            length -= before
            v_length -= before
        else:
            length = tl.where(unused, 0, length)
    for t0 in range(0, length, BT):
        b_W = tile(W, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        b_M = tile(M, first, t0, length, i_h, HV, D=BT, d0=0, BT=BT, BD=BT)
        b_v = tile(v, first, t0, v_length, i_h, HV, D=V, d0=v0, BT=BT, BD=BV)
        b_b = tile(b_out, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
        total = sum_of_chunk(G, tl.minimum(BT, length - t0) - 1, first, t0, i_h, HV, K, 0, BK)
        b_x = tl.dot(b_M, b_v, input_precision=PRECISION)
        b_x += tl.dot(b_W, h.to(b_W.dtype), input_precision=PRECISION)
        h *= tl.exp2(total)[:, None]
        h = added(h, tl.trans(b_b), b_x.to(b_W.dtype), PRECISION)
        if TWO_WRITES:
            b_k = tile(k_out, first, t0, length, i_h, HV, D=K, d0=0, BT=BT, BD=BK)
            h += tl.dot(tl.trans(b_k), b_v, input_precision=PRECISION)
    if strip < NV:
        at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(alone + at, h, mask=inside & (length > 0))
    else:
        at, inside = state_offsets(own, 0, (strip - NV) * BV, K, K, BK, BV, False)
        tl.store(transfer + at, h, mask=inside & (length > 0))
