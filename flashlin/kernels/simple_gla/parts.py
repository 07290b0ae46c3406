"""The first step for split sequences of the scalar-decay family: each segment's state from zero.

``kernels/sequence_split.py`` describes all steps.
"""

import triton
import triton.language as tl

from flashlin.kernels.sequence_split import part_of
from flashlin.kernels.tile_ops import decays, state_offsets, tile


@triton.jit(do_not_specialize=["T", "N", "R", "L", "scale"])
def simple_gla_alone(
    x, y, G, gamma, alone, kept, bounds, scale, T, N, H, R, L, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr,
    V_FIRST: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the final state of each segment from a zero initial state, and the segment's total decay.

    With REVERSE the kernel walks backwards. It computes the gradient that each segment would pass to the
    segment before it if no gradient entered from later segments. Segments whose result is never used are
    skipped: a sequence's last segment or, with REVERSE, its first.

    x, y: k and v or, with REVERSE, q and do.
    alone: receives the states or gradients.
    kept: receives the sum of the segment's log2 decays.

    x: [rows, H // GROUP, K]: k, with REVERSE q.
    y: [rows, H, V]: v, with REVERSE do.
    G: [H, R], fp32.
    gamma: [H].
    alone: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K], fp32.
    kept: [segments, H], fp32.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    own = program // NV
    i_h = own % H
    n, i_part, first, length, last = part_of(own // H, bounds, T, N, L, VARLEN)
    if REVERSE:
        length = tl.where(i_part > 0, length, 0)
    else:
        length = tl.where(last, 0, length)
    h = tl.zeros([BK, BV], dtype=tl.float32)
    passed = 0.0
    chunks = (length + BT - 1) // BT
    for i_c in range(chunks):
        if REVERSE:
            t0 = (chunks - 1 - i_c) * BT
        else:
            t0 = i_c * BT
        b_x = tile(x, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=0, BT=BT, BD=BK)
        b_y = tile(y, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        D, total = decays(G, gamma, first, t0, length, i_h, R, BT=BT, BLOCK=BLOCK, DECAY=DECAY)
        if REVERSE:
            b_w = b_y * (tl.exp2(D) * scale)[:, None]
        else:
            b_w = b_y * tl.exp2(total - D)[:, None]
        h *= tl.exp2(total)
        h += tl.dot(tl.trans(b_x), b_w.to(b_x.dtype), input_precision=PRECISION)
        passed += total
    at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
    tl.store(alone + at, h, mask=inside & (length > 0))
    if v0 == 0:
        tl.store(kept + own, passed, mask=length > 0)
