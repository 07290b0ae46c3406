"""How far the rows of a chunk decay, for families with a decay for each key channel: sums of decays and,
where one reference serves a chunk, what stands at its rows; rows beside a row, and sums up to it."""

import triton
import triton.language as tl

from flashlin.kernels.gla.parts import sum_of_chunk
from flashlin.kernels.tile_ops import LOG2_E, put, tile


@triton.jit
def sums_at(
    G,  # [rows, H, K], fp32: sums of a chunk's decays
    rows,  # [rows of the chunk]
    first, t0, i_h, H,
    K: tl.constexpr,
    k0,
    BK: tl.constexpr,
):
    """[rows, BK]: G of these rows of the chunk, all of them inside the sequence."""
    columns = k0 + tl.arange(0, BK)
    offsets = rows[:, None] * (H * K) + columns[None, :]
    if K % BK != 0:
        return tl.load(G + ((first + t0) * H + i_h) * K + offsets, mask=(columns < K)[None, :], other=0.0)
    else:
        return tl.load(G + ((first + t0) * H + i_h) * K + offsets)


@triton.jit
def sums_read(
    b_G,  # [BT, BK]
    G,  # [rows, H, K], fp32: sums of a chunk's decays
    last, first, t0, i_h, H,
    K: tl.constexpr,
    k0,
    BT: tl.constexpr, BK: tl.constexpr, EARLIER: tl.constexpr,
):
    """[BT, BK]: how far the state that enters the chunk has decayed when each row reads it: b_G or, with
    EARLIER, that of the row above."""
    if EARLIER:
        rows = tl.arange(0, BT)
        above = sums_at(G, tl.minimum(tl.maximum(rows - 1, 0), last), first, t0, i_h, H, K, k0, BK)
        return tl.where((rows > 0)[:, None], above, 0.0)
    else:
        return b_G


@triton.jit
def bonus_of(u, i_h, K: tl.constexpr, k0, BK: tl.constexpr):
    """[1, BK] of u [H, K]."""
    columns = k0 + tl.arange(0, BK)
    return tl.load(u + i_h * K + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def rows_beside(
    x,  # [rows, H, D]
    by: tl.constexpr,  # rows further
    first, t0, length, i_h, H,
    D: tl.constexpr,
    d0,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """[BT, BD] of a [rows, H, D] tensor, in each row what belongs to row t + by of the chunk, zeros where the
    chunk has none."""
    rows = tl.arange(0, BT)
    columns = d0 + tl.arange(0, BD)
    inside = (rows + by >= 0) & (rows + by < BT) & (t0 + rows + by < length)
    offsets = rows[:, None] * (H * D) + columns[None, :]
    return tl.load(x + ((first + t0 + by) * H + i_h) * D + offsets,
                   mask=inside[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def moved(
    x,  # [BT, BD]
    by: tl.constexpr,  # rows further
    scratch,  # [rows, H, D]
    first, t0, length, i_h, H,
    D: tl.constexpr,
    d0,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """[BT, BD]: row t + by of x in row t, by way of scratch [rows, H, D]."""
    put(scratch, x, first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD)
    tl.debug_barrier()
    found = rows_beside(scratch, by, first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD)
    tl.debug_barrier()  # before anybody writes there again
    return found


@triton.jit
def summed_before(
    x,  # [BT, BD]
    scratch,  # [rows, H, D]
    first, t0, length, i_h, H,
    D: tl.constexpr,
    d0,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """[BT, BD]: x_1 + ... + x_{t-1} for each row t. Not the running sum less x_t, which may be far larger
    than what remains."""
    return tl.cumsum(moved(x, -1, scratch, first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD), 0)


@triton.jit
def summed_after(
    x,  # [BT, BD]
    scratch,  # [rows, H, D]
    first, t0, length, i_h, H,
    D: tl.constexpr,
    d0,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """[BT, BD]: x_{t+1} + ... + x_L for each row t."""
    return tl.cumsum(moved(
        x, 1, scratch, first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD), 0, reverse=True)


@triton.jit
def but_last(sum1, last1, sum2, last2):
    """Of two stretches of rows, each the sum of all rows but its last, and that row: the same of both."""
    return sum1 + last1 + sum2, last2


@triton.jit
def others_summed(x, REVERSE: tl.constexpr):
    """As ``summed_before``, or with REVERSE ``summed_after``, by exchanges between threads alone."""
    return tl.associative_scan((tl.zeros_like(x), x), 0, but_last, reverse=REVERSE)[0]


@triton.jit
def logs(x):
    """x / ln 2, as gla_sums sums it."""
    x = x * LOG2_E
    return tl.where(x < -126.0, -126.0, x)


@triton.jit
def decays_of_gates(
    g,  # [rows, H, K], fp32
    G,  # [rows, H, K], fp32: sums of a chunk's decays, of which the last row is there
    last, first, t0, length, i_h, H,
    K: tl.constexpr,
    k0,
    BT: tl.constexpr, BK: tl.constexpr, EARLIER: tl.constexpr, SUM: tl.constexpr,
):
    """What ``decays_from`` returns of a chunk whose gates nobody has summed yet, and [BK]: how many bits all
    rows but the first forget. SUM: G's last row is put there, too."""
    begin = logs(sum_of_chunk(g, 0, first, t0, i_h, H, K, k0, BK))
    x = logs(tile(g, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK))
    if EARLIER:
        b_R = tl.cumsum(logs(rows_beside(g, -1, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)), 0)
        b_G = b_R + x
    else:
        b_G = tl.cumsum(x, 0)
        b_R = b_G
    if SUM:
        # the last row's sum, not one in another order: what rounding has done to both goes out between them
        total = tl.sum(tl.where((tl.arange(0, BT) == last)[:, None], b_G, 0.0), 0)
        columns = k0 + tl.arange(0, BK)
        tl.store(G + ((first + t0 + last) * H + i_h) * K + columns, total, mask=columns < K)
    else:
        total = sum_of_chunk(G, last, first, t0, i_h, H, K, k0, BK)
    reading, written, entered, left, kept = decays_from(b_G, b_R, begin, total, BT, EARLIER)
    return reading, written, entered, left, kept, total - begin


@triton.jit
def decays_of_sums(
    G,  # [rows, H, K], fp32: sums of a chunk's decays
    last, first, t0, length, i_h, H,
    K: tl.constexpr,
    k0,
    BT: tl.constexpr, BK: tl.constexpr, EARLIER: tl.constexpr,
):
    """What ``decays_from`` returns of a chunk whose gates are summed."""
    b_G = sums_at(G, tl.minimum(tl.arange(0, BT), last), first, t0, i_h, H, K, k0, BK)
    b_R = sums_read(b_G, G, last, first, t0, i_h, H, K=K, k0=k0, BT=BT, BK=BK, EARLIER=EARLIER)
    begin = sum_of_chunk(G, 0, first, t0, i_h, H, K, k0, BK)
    total = sum_of_chunk(G, last, first, t0, i_h, H, K, k0, BK)
    return decays_from(b_G, b_R, begin, total, BT, EARLIER)


@triton.jit
def decays_from(
    b_G,  # [BT, BK]: sums of decays
    b_R,  # [BT, BK]: those that count where a row reads
    begin,  # [BK]: the first row's
    total,  # [BK]: the last row's
    BT: tl.constexpr, EARLIER: tl.constexpr,
):
    """[BT, BK] three times: what stands at the rows that read, with EARLIER before they decay, at those that
    are written, and what is left of the state that enters when a row reads it; [BK] twice: what is left of a
    row at the chunk's end beyond what stands there, and of the state."""
    middle = (begin + total) * 0.5
    written = tl.exp2(middle[None, :] - b_G)
    reading = b_R - middle[None, :]
    if EARLIER:  # the first row reads no other, and where it forgets everything would have an infinite factor
        inside = (tl.arange(0, BT) > 0)[:, None]
        reading = tl.exp2(tl.where(inside, reading, float("-inf")))
        entered = tl.where(inside, reading * tl.exp2(middle)[None, :], 1.0)
    else:
        reading = tl.exp2(reading)
        entered = reading * tl.exp2(middle)[None, :]
    return reading, written, entered, tl.exp2(total - middle), tl.exp2(total)


@triton.jit
def still_served(serves, forgotten):
    """serves, or 0 where one of these channels forgets more than one reference serves, so that no factor
    exceeds 2^60. forgotten: by all rows but the first, in bits."""
    return tl.where(tl.min(forgotten, 0) >= -120.0, serves, 0)


@triton.jit
def two_of(x, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE, and what that loses. Of bf16, products with the rows that are written take
    both: when chunks are halved neighbours meet at a factor of 1, but from one reference both rows have a
    factor, and with both rounded errors would be larger."""
    rounded = x.to(DTYPE)
    return rounded, (x - rounded.to(tl.float32)).to(DTYPE)


@triton.jit
def scored(
    scores,  # [BT, BT], fp32
    X,  # [BT, BK], fp32: rows that read
    Y,  # [BT, BK], fp32: rows that are written
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):
    """scores and what these channels add to them."""
    x = X.to(DTYPE)
    whole, rest = two_of(Y, DTYPE)
    scores += tl.dot(x, tl.trans(whole), input_precision=PRECISION)
    if DTYPE == tl.bfloat16:
        scores += tl.dot(x, tl.trans(rest))
    return scores
