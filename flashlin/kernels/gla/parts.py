"""The first step for split sequences of gated linear attention and RWKV-6: each segment's state from zero.

``kernels/sequence_split.py`` describes all steps.
"""

import triton
import triton.language as tl

from flashlin.kernels.sequence_split import part_of
from flashlin.kernels.tile_ops import state_offsets, tile


@triton.jit
def any_left(served, slot, share, length, shares, i_h, H, BT: tl.constexpr):
    """Return True if one of the chunks of a program is left, which means that its entry in ``served`` is 0.

    A program has at most 64 chunks. All are read at once, because a program that finds no chunk would
    otherwise wait for each entry.

    served: [slots, H], int32, with entries 0 and 1; those of the sequence begin at ``slot``.
    share, shares: the program has the chunks share, share + shares and so on, of ``length`` tokens.
    """
    each = share + shares * tl.arange(0, 64)
    entries = tl.load(served + (slot + each) * H + i_h, mask=each * BT < length, other=1)
    return tl.min(entries, 0) == 0


@triton.jit
def sum_of_chunk(G, last, first, t0, i_h, H, K: tl.constexpr, k0, BK: tl.constexpr):
    """Load the sum of a chunk's decays per channel, [BK], from column k0 of head i_h.

    G: decays summed within each chunk, [rows, H, K].
    last: the chunk's last row inside the sequence, whose entry is the sum.
    """
    columns = k0 + tl.arange(0, BK)
    return tl.load(G + ((first + t0 + last) * H + i_h) * K + columns, mask=columns < K, other=0.0)


@triton.jit(do_not_specialize=["T", "N", "L", "scale"])
def gla_alone(
    x, y, G, alone, kept, bounds, scale, T, N, H, L, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the final state of each segment from a zero initial state, and the segment's total decay.

    With REVERSE the kernel walks backwards. It computes the gradient that each segment would pass to the
    segment before it if no gradient entered from later segments. Segments whose result is never used are
    skipped: a sequence's last segment or, with REVERSE, its first.

    x, y: k_out and v or, with REVERSE, q_in and do (see ``gla_scores``).
    alone: receives the states or gradients.
    kept: receives the sum of the segment's log2 decays for each channel.

    x: [rows, H, K]: k_out, with REVERSE q_in.
    y: [rows, H, V]: v, with REVERSE do.
    G: [rows, H, K], fp32: decays summed within each chunk.
    alone: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K], fp32.
    kept: [segments, H, K], fp32.
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
    passed = tl.zeros([BK], dtype=tl.float32)
    chunks = (length + BT - 1) // BT
    for i_c in range(chunks):
        if REVERSE:
            t0 = (chunks - 1 - i_c) * BT
        else:
            t0 = i_c * BT
        b_x = tile(x, first, t0, length, i_h, H, D=K, d0=0, BT=BT, BD=BK)
        b_y = tile(y, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV).to(b_x.dtype)
        if REVERSE:
            b_y = (b_y * scale).to(b_x.dtype)
        total = sum_of_chunk(G, tl.minimum(BT, length - t0) - 1, first, t0, i_h, H, K, 0, BK)
        h *= tl.exp2(total)[:, None]
        h += tl.dot(tl.trans(b_x), b_y, input_precision=PRECISION)
        passed += total
    at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
    tl.store(alone + at, h, mask=inside & (length > 0))
    if v0 == 0:
        columns = tl.arange(0, BK)
        tl.store(kept + own.to(tl.int64) * K + columns, passed, mask=(columns < K) & (length > 0))
