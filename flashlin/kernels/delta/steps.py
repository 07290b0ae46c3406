"""What several kernels of the delta families do with a chunk."""

import triton
import triton.language as tl


@triton.jit
def rows_of(line, first, t0, length, i_h, R, BT: tl.constexpr):
    """[BT] of a line [HV, R], zeros past the end."""
    rows = tl.arange(0, BT)
    return tl.load(line + i_h.to(tl.int64) * R + first + t0 + rows, mask=t0 + rows < length, other=0.0)


@triton.jit
def sums_read(G, D, first, t0, length, i_h, R, BT: tl.constexpr, BLOCK: tl.constexpr, DECAY: tl.constexpr,
              EARLIER: tl.constexpr):
    """[BT], to base 2: how much the state has decayed since its block of BLOCK tokens began, where the tokens
    from t0 on read it: D, the sums up to their own, or with EARLIER one token earlier. Rows past the end hold
    the sequence's last sum."""
    if EARLIER and DECAY == 2:
        at = tl.minimum(t0 + tl.arange(0, BT), length)
        return tl.load(G + i_h.to(tl.int64) * R + first + at - 1, mask=at % BLOCK != 0, other=0.0)
    else:
        return D


@triton.jit
def written(
    h,  # [BK, BV], fp32: the state that enters the chunk
    b_p,  # [BT, BK]: what reads it
    b_k,  # [BT, BK]
    b_v,  # [BT, BV]
    b_A,  # [BT, BT]
    b_beta,  # [BT]
    read,  # [BT]: how much it has decayed there
    D,  # [BT]: the chunk's decays, summed
    total,  # their sum
    b_low,  # [BT, BT]: with HALF what rounding A has lost
    DECAY: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):
    """(u [BT, BV], the state that leaves the chunk), with the notation of forward.py. HALF: neither side of A
    y loses what it would by being rounded, as in the reverse scan."""
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
