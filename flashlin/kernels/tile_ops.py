"""Functions that the families' kernels share: rows of a sequence, tiles, decays, states.

These parameters mean the same in all kernels. A kernel comments on one of them only if it means something
else there.

    T       tokens of a sequence                N       number of sequences
    H       heads; of q and k if there is HV    HV      heads of v
    R       elements of a line                  rows    rows in all
    L       tokens of a part                    S       programs to a sequence
    n       the chunk's sequence                i_h     the head
    first   first row of the sequence           length  tokens of the sequence
    t0      first token of the chunk            last    last row of the chunk
    d0, k0  first column
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sequence_of(n, bounds, T, VARLEN: tl.constexpr):
    """First row and length of sequence n; rows are counted through the whole [B * T] batch."""
    if VARLEN:
        first = tl.load(bounds + n).to(tl.int64)
        length = (tl.load(bounds + n + 1).to(tl.int64) - first).to(tl.int32)
    else:
        first = n.to(tl.int64) * T
        length = T
    return first, length


@triton.jit(do_not_specialize=["T", "N", "R", "S"])
def gate_cumsum(
    g,  # [rows, H]
    G,  # [H, R], fp32
    bounds,  # [N + 1] or None
    T, N, H, R, S,
    BT: tl.constexpr, BH: tl.constexpr, VARLEN: tl.constexpr,
):
    """G [H, R]: g / ln 2 summed within blocks of BT tokens of each sequence. S programs share a sequence.
    Laid out so that the scans load a chunk's decays as one line, straight into the layouts they need, instead
    of exchanging them between warps in every chunk.

    A token that leaves less than float32's smallest normal number leaves that much (FORGOTTEN): then
    differences of sums stay precise after one that forgets everything, even by -inf.
    """
    NH = (H + BH - 1) // BH
    program = tl.program_id(0)
    heads = program % NH * BH + tl.arange(0, BH)
    share = program // NH % S
    first, length = sequence_of(program // NH // S, bounds, T, VARLEN)
    rows = tl.arange(0, BT)
    for t0 in range(share * BT, length, S * BT):
        mask = (t0 + rows < length)[:, None] & (heads < H)[None, :]
        x = tl.load(g + (first + t0 + rows)[:, None] * H + heads[None, :], mask=mask,
                    other=0.0).to(tl.float32) * LOG2_E
        x = tl.where(x < -126.0, -126.0, x)
        tl.store(G + heads.to(tl.int64)[None, :] * R + (first + t0 + rows)[:, None], tl.cumsum(x, 0),
                 mask=mask)


@triton.jit
def decays(
    G,  # [H, R], fp32, or None
    gamma,  # [H] or None
    first, t0, length, i_h, R,
    BT: tl.constexpr, BLOCK: tl.constexpr, DECAY: tl.constexpr,
):
    """G_i of the chunk's tokens, and G_L, to base 2. Rows past the end add nothing, so they hold G_L."""
    rows = tl.arange(0, BT)
    if DECAY == 2:
        line = G + i_h.to(tl.int64) * R + first + t0
        inside = t0 + rows < length
        total = tl.load(line + tl.minimum(BT, length - t0) - 1)
        cumulated = tl.where(inside, tl.load(line + rows, mask=inside, other=0.0), total)
        if BT < BLOCK:  # the sums began at the block's start, not at the chunk's
            before = tl.load(line - 1, mask=t0 % BLOCK != 0, other=0.0)
            cumulated -= before
            total -= before
    elif DECAY == 1:
        rate = tl.load(gamma + i_h).to(tl.float32) * LOG2_E
        n = tl.minimum(length - t0, BT)
        cumulated = rate * tl.minimum(rows + 1, n).to(tl.float32)
        total = rate * n.to(tl.float32)
    else:
        cumulated = tl.zeros([BT], dtype=tl.float32)
        total = 0.0
    return cumulated, total


@triton.jit
def scaled_decay(D_row, D_column, causal, scale):
    """scale 2^{D_i - D_j}, zero where not causal: masked before exp2, because there the difference is
    positive and overflows. scale >= 0 goes into the exponent, which costs one addition a row instead of a
    product an element."""
    return tl.exp2(tl.where(causal, (D_row + tl.log2(scale))[:, None] - D_column[None, :], float("-inf")))


@triton.jit
def tile(
    x,  # [rows, H, D]
    first, t0, length, i_h, H,
    D: tl.constexpr,
    d0,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """[BT, BD] of a [rows, H, D] tensor, zeros outside."""
    rows = tl.arange(0, BT)
    cols = d0 + tl.arange(0, BD)
    offsets = rows[:, None] * (H * D) + cols[None, :]
    mask = (t0 + rows < length)[:, None]
    if D % BD != 0:
        mask = mask & (cols < D)[None, :]
    return tl.load(x + ((first + t0) * H + i_h) * D + offsets, mask=mask, other=0.0)


@triton.jit
def beta_of(beta, first, t0, length, i_h, HV, BT: tl.constexpr):
    """[BT] of beta [rows, HV], zeros past the end."""
    rows = tl.arange(0, BT)
    return tl.load(beta + (first + t0 + rows) * HV + i_h, mask=t0 + rows < length, other=0.0)


@triton.jit
def put(
    x,  # [rows, H, D]
    value,  # [BT, BD]
    first, t0, length, i_h, H,
    D: tl.constexpr,
    d0,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """Store [BT, BD] into a [rows, H, D] tensor."""
    rows = tl.arange(0, BT)
    cols = d0 + tl.arange(0, BD)
    offsets = rows[:, None] * (H * D) + cols[None, :]
    mask = (t0 + rows < length)[:, None]
    if D % BD != 0:
        mask = mask & (cols < D)[None, :]
    tl.store(x + ((first + t0) * H + i_h) * D + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def zero_rows(
    x,  # [rows, H, D]
    first,  # from this row on
    length,  # so many
    i_h, H,
    D: tl.constexpr,
    d0,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """Zeros into columns d0 .. d0 + BD of ``length`` rows from ``first`` on, of one head."""
    for t0 in range(0, length, BT):
        put(x, tl.zeros([BT, BD], dtype=tl.float32), first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD)


@triton.jit
def zero_gaps(
    x,  # [rows, H, D]
    bounds,  # [N + 1]
    n,  # this sequence
    T,  # rows in all
    N, i_h, H,
    D: tl.constexpr,
    d0,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """Rows before the first and after the last sequence belong to nobody: zeros, never what the memory
    held."""
    if n == 0:
        zero_rows(x, n.to(tl.int64), tl.load(bounds).to(tl.int32), i_h, H, D, d0, BT, BD)
    if n == N - 1:
        last = tl.load(bounds + N).to(tl.int64)
        zero_rows(x, last, (T - last).to(tl.int32), i_h, H, D, d0, BT, BD)


@triton.jit
def first_slot(n, first, BT: tl.constexpr):
    """Where sequence n's chunks go in a table of chunks. Sequences never overlap, and no host has to count
    them."""
    return first // BT + n


@triton.jit
def state_offsets(nh, k0, v0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  V_FIRST: tl.constexpr):
    """Offsets and mask of a [BK, BV] tile of state nh, stored [K, V] or, with V_FIRST, [V, K]."""
    k = k0 + tl.arange(0, BK)
    v = v0 + tl.arange(0, BV)
    if V_FIRST:
        offsets = k[:, None] + v[None, :] * K
    else:
        offsets = k[:, None] * V + v[None, :]
    return nh.to(tl.int64) * (K * V) + offsets, (k < K)[:, None] & (v < V)[None, :]
