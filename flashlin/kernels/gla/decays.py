"""Helpers for the decays within a chunk, for families with a decay for each key channel.

They load sums of decays, compute the factors of a chunk with one decay reference (``one_reference.py``), load
rows shifted by some tokens, and sum rows before or after each row.
"""

import triton
import triton.language as tl

from flashlin.kernels.gla.parts import sum_of_chunk
from flashlin.kernels.tile_ops import LOG2_E, put, tile


@triton.jit
def sums_at(G, rows, first, t0, i_h, H, K: tl.constexpr, k0, BK: tl.constexpr):
    """Load the sums of decays of the given rows of a chunk and head, [rows, BK].

    rows: indices of rows in the chunk, all inside the sequence.
    first, t0: first row of the sequence, and the chunk's first token in it.
    k0: first column.
    G: [rows, H, K], fp32: decays summed within each chunk.
    """
    columns = k0 + tl.arange(0, BK)
    offsets = rows[:, None] * (H * K) + columns[None, :]
    if K % BK != 0:
        return tl.load(G + ((first + t0) * H + i_h) * K + offsets, mask=(columns < K)[None, :], other=0.0)
    else:
        return tl.load(G + ((first + t0) * H + i_h) * K + offsets)


@triton.jit
def sums_read(b_G, G, last, first, t0, i_h, H, K: tl.constexpr, k0, BT: tl.constexpr, BK: tl.constexpr,
              EARLIER: tl.constexpr):
    """Return the exponents (base 2) by which the entering state has decayed when each row reads it, [BT, BK].

    These are the rows of b_G or, with EARLIER, the rows above: each row then reads before its own decay.

    b_G: decays summed from the start of the chunk, [BT, BK].
    last: the chunk's last row inside the sequence.
    """
    if EARLIER:
        rows = tl.arange(0, BT)
        above = sums_at(G, tl.minimum(tl.maximum(rows - 1, 0), last), first, t0, i_h, H, K, k0, BK)
        return tl.where((rows > 0)[:, None], above, 0.0)
    else:
        return b_G


@triton.jit
def bonus_of(u, i_h, K: tl.constexpr, k0, BK: tl.constexpr):
    """Load RWKV-6's bonus of head i_h, [1, BK] in fp32, from column k0."""
    columns = k0 + tl.arange(0, BK)
    return tl.load(u + i_h * K + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def rows_beside(x, by: tl.constexpr, first, t0, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr,
                BD: tl.constexpr):
    """Load a chunk's tile [BT, BD] shifted by ``by`` rows: row t of the result is row t + by of the chunk.

    Rows that the chunk does not have are zero.

    x: [rows, H, D].
    by: offset in rows.
    """
    rows = tl.arange(0, BT)
    columns = d0 + tl.arange(0, BD)
    inside = (rows + by >= 0) & (rows + by < BT) & (t0 + rows + by < length)
    offsets = rows[:, None] * (H * D) + columns[None, :]
    return tl.load(x + ((first + t0 + by) * H + i_h) * D + offsets,
                   mask=inside[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def moved(x, by: tl.constexpr, scratch, first, t0, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr,
          BD: tl.constexpr):
    """Return the tile x [BT, BD] shifted by ``by`` rows: row t of the result is row t + by of x, or zero.

    The rows pass through ``scratch`` [rows, H, D], whose rows of this chunk are overwritten.

    x: [BT, BD].
    by: offset in rows.
    scratch: [rows, H, D].
    """
    put(scratch, x, first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD)
    tl.debug_barrier()
    found = rows_beside(scratch, by, first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD)
    tl.debug_barrier()  # all threads have read before the scratch memory is overwritten
    return found


@triton.jit
def summed_before(x, scratch, first, t0, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr,
                  BD: tl.constexpr):
    """Return for each row t the sum of all earlier rows of the tile, x_1 + ... + x_{t-1}, [BT, BD].

    It is not computed as the running sum minus x_t, because x_t may be much larger than the result. The rows
    of ``scratch`` of this chunk are overwritten.

    x: [BT, BD].
    scratch: [rows, H, D].
    """
    return tl.cumsum(moved(x, -1, scratch, first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD), 0)


@triton.jit
def summed_after(x, scratch, first, t0, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr,
                 BD: tl.constexpr):
    """Return for each row t the sum of all later rows of the tile, x_{t+1} + ... + x_L, [BT, BD].

    The rows of ``scratch`` of this chunk are overwritten.

    x: [BT, BD].
    scratch: [rows, H, D].
    """
    return tl.cumsum(moved(
        x, 1, scratch, first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD), 0, reverse=True)


@triton.jit
def but_last(sum1, last1, sum2, last2):
    """Combine two adjacent ranges of rows, for an associative scan.

    Each range is given as the sum of all its rows except the last, and its last row.
    """
    return sum1 + last1 + sum2, last2


@triton.jit
def others_summed(x, REVERSE: tl.constexpr):
    """Return for each row the sum of all earlier rows of x [BT, BD] or, with REVERSE, of all later rows.

    Unlike ``summed_before`` and ``summed_after``, it needs no scratch memory: threads exchange the values.
    """
    return tl.associative_scan((tl.zeros_like(x), x), 0, but_last, reverse=REVERSE)[0]


@triton.jit
def logs(x):
    """Return the natural log decays x as log2 decays, clamped to at least -126 like in ``gla_sums``."""
    x = x * LOG2_E
    return tl.where(x < -126.0, -126.0, x)


@triton.jit
def decays_of_gates(g, G, last, first, t0, length, i_h, H, K: tl.constexpr, k0, BT: tl.constexpr,
                    BK: tl.constexpr, EARLIER: tl.constexpr, SUM: tl.constexpr):
    """Return the six decay factors of a chunk with one decay reference, computed from its gates g.

    The first five are described in ``decays_from``. The last, [BK], is the sum of decays of all rows but the
    first, in bits.

    G: with SUM, its row ``last`` receives the chunk's sum of decays; otherwise that row is read.
    EARLIER: whether rows read before their own decay (RWKV-6).
    g: [rows, H, K], fp32.
    """
    begin = logs(sum_of_chunk(g, 0, first, t0, i_h, H, K, k0, BK))
    x = logs(tile(g, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK))
    if EARLIER:
        b_R = tl.cumsum(logs(rows_beside(g, -1, first, t0, length, i_h, H, D=K, d0=k0, BT=BT, BD=BK)), 0)
        b_G = b_R + x
    else:
        b_G = tl.cumsum(x, 0)
        b_R = b_G
    if SUM:
        # Use the last row of the cumulative sum. Its rounding errors cancel against those of the other rows.
        # Those of a sum in another order would not cancel.
        total = tl.sum(tl.where((tl.arange(0, BT) == last)[:, None], b_G, 0.0), 0)
        columns = k0 + tl.arange(0, BK)
        tl.store(G + ((first + t0 + last) * H + i_h) * K + columns, total, mask=columns < K)
    else:
        total = sum_of_chunk(G, last, first, t0, i_h, H, K, k0, BK)
    reading, written, entered, left, kept = decays_from(b_G, b_R, begin, total, BT, EARLIER)
    return reading, written, entered, left, kept, total - begin


@triton.jit
def decays_of_sums(G, last, first, t0, length, i_h, H, K: tl.constexpr, k0, BT: tl.constexpr,
                   BK: tl.constexpr, EARLIER: tl.constexpr):
    """Return the five decay factors of a chunk with one decay reference, computed from its sums of decays G.

    ``decays_from`` describes them.

    last: the chunk's last row inside the sequence.
    EARLIER: whether q reads the state before the decay of its own token.
    G: [rows, H, K], fp32: decays summed within each chunk.
    """
    b_G = sums_at(G, tl.minimum(tl.arange(0, BT), last), first, t0, i_h, H, K, k0, BK)
    b_R = sums_read(b_G, G, last, first, t0, i_h, H, K=K, k0=k0, BT=BT, BK=BK, EARLIER=EARLIER)
    begin = sum_of_chunk(G, 0, first, t0, i_h, H, K, k0, BK)
    total = sum_of_chunk(G, last, first, t0, i_h, H, K, k0, BK)
    return decays_from(b_G, b_R, begin, total, BT, EARLIER)


@triton.jit
def decays_from(b_G, b_R, begin, total, BT: tl.constexpr, EARLIER: tl.constexpr):
    """Return the factors of a chunk's rows relative to one decay reference, in the middle of its decays.

    1. [BT, BK]: the factor of rows that read the state, such as q.
    2. [BT, BK]: the factor of rows that are written to the state, such as k.
    3. [BT, BK]: how much of the entering state is left when each row reads it.
    4. [BK]: multiplied by factor 2, the decay from a written row to the end of the chunk.
    5. [BK]: how much of the entering state is left at the end of the chunk.

    With EARLIER, a row reads the state before its own decay, so the first row reads only the entering state.

    b_G: [BT, BK]: sums of decays.
    b_R: [BT, BK]: sums of decays at the time when each row reads.
    begin: [BK]: the first row of b_G.
    total: [BK]: the last row of b_G.
    """
    middle = (begin + total) * 0.5
    written = tl.exp2(middle[None, :] - b_G)
    reading = b_R - middle[None, :]
    if EARLIER:  # the first row reads no other row; if it forgets everything, its factor would be infinite
        inside = (tl.arange(0, BT) > 0)[:, None]
        reading = tl.exp2(tl.where(inside, reading, float("-inf")))
        entered = tl.where(inside, reading * tl.exp2(middle)[None, :], 1.0)
    else:
        reading = tl.exp2(reading)
        entered = reading * tl.exp2(middle)[None, :]
    return reading, written, entered, tl.exp2(total - middle), tl.exp2(total)


@triton.jit
def still_served(serves, forgotten):
    """Return ``serves``, or 0 if one of these channels does not fit one decay reference.

    A channel fits if it forgets at most 120 bits. Then no factor exceeds 2^60.

    serves: 1 or 0, the result for the previous channels.
    forgotten: [BK], sum of the decays of all rows, or of all but the first, in bits, at most 0.
    """
    return tl.where(tl.min(forgotten, 0) >= -120.0, serves, 0)


@triton.jit
def two_of(x, DTYPE: tl.constexpr):
    """Split x in fp32 into its value rounded to DTYPE and the remainder, also rounded to DTYPE.

    With one decay reference in bf16, products use both numbers of the rows that are written. The reason is
    that both rows of a pair are multiplied by a factor, and the error would be larger if both were rounded.
    Halving does not need this, because there the factors of adjacent tokens are 1.
    """
    rounded = x.to(DTYPE)
    return rounded, (x - rounded.to(tl.float32)).to(DTYPE)


@triton.jit
def scored(scores, X, Y, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Add X Y^T to the scores [BT, BT]; in bf16, Y is split into two numbers to keep precision.

    scores: [BT, BT], fp32.
    X: [BT, BK], fp32: rows that read, times their factor.
    Y: [BT, BK], fp32: rows that are written, times their factor.
    """
    x = X.to(DTYPE)
    whole, rest = two_of(Y, DTYPE)
    scores += tl.dot(x, tl.trans(whole), input_precision=PRECISION)
    if DTYPE == tl.bfloat16:
        scores += tl.dot(x, tl.trans(rest))
    return scores
