"""Triton functions that several kernels of the delta families share: loads and updates of one chunk."""

import triton
import triton.language as tl


@triton.jit
def rows_of(line, first, t0, length, i_h, R, BT: tl.constexpr):
    """Load BT values of one head of ``line`` [HV, R], with zeros after the end of the sequence."""
    rows = tl.arange(0, BT)
    return tl.load(line + i_h.to(tl.int64) * R + first + t0 + rows, mask=t0 + rows < length, other=0.0)


@triton.jit
def sums_read(G, D, first, t0, length, i_h, R, BT: tl.constexpr, BLOCK: tl.constexpr, DECAY: tl.constexpr,
              EARLIER: tl.constexpr):
    """Return the sum of log2 decays, [BT], from the start of the block to each token's prediction.

    The state that the prediction reads has decayed by this sum. Without EARLIER this is D, which includes the
    token's own decay. With EARLIER (Comba), it is the sum up to the token before. G is summed within blocks
    of BLOCK tokens. Rows after the end of the sequence have the last sum of the sequence.
    """
    if EARLIER and DECAY == 2:
        at = tl.minimum(t0 + tl.arange(0, BT), length)
        return tl.load(G + i_h.to(tl.int64) * R + first + at - 1, mask=at % BLOCK != 0, other=0.0)
    else:
        return D


@triton.jit
def written(h, b_p, b_k, b_v, b_A, b_beta, read, D, total, b_low, DECAY: tl.constexpr, HALF: tl.constexpr,
            PRECISION: tl.constexpr):
    """Return u [BT, BV] and the final state [BK, BV] of a chunk, with the notation of forward.py.

    h: the state before the chunk, [BK, BV], fp32. b_p: vectors of the predictions, which read h, [BT, BK].
    b_k, b_v, b_A, b_beta: [BT, BK], [BT, BV], [BT, BT] and [BT]. b_low: with HALF, the rounding error of b_A.
    read: log2 decay of h at each read. D, total: cumulative log2 decays of the chunk, and their total.
    HALF: compensate the rounding of A and y to 16 bits in the product A y, as the reverse scan does.
    """
    ph = tl.dot(b_p, h.to(b_k.dtype), input_precision=PRECISION)
    if DECAY == 0:
        y = (b_v - ph) * b_beta[:, None]
    else:
        y = (b_v - ph * tl.exp2(read)[:, None]) * b_beta[:, None]
        h *= tl.exp2(total)
    b_y = y.to(b_A.dtype)
    u = tl.dot(b_A, b_y, input_precision=PRECISION)
    if HALF:
        u += tl.dot(b_A, (y - b_y).to(b_A.dtype), input_precision=PRECISION)
        u += tl.dot(b_low, b_y, input_precision=PRECISION)
    b_w = u
    if DECAY != 0:
        b_w *= tl.exp2(total - D)[:, None]
    h += tl.dot(tl.trans(b_k), b_w.to(b_k.dtype), input_precision=PRECISION)
    return u, h
