"""Triton functions that the kernels of all families share: rows of a sequence, tiles, decays, states.

These parameters have the same meaning in all kernels. A kernel has a comment for a parameter of this table
only if the parameter has another meaning there. Only kernels show the shapes of their tensors; functions that
they call use the same names. A row is one token; rows are counted through the whole batch.

    T       tokens of a sequence                N       number of sequences
    H       heads; of q and k if there is HV    HV      heads of v
    R       row length of tensors [H, R]        rows    number of rows in the batch
    L       tokens of a segment                 S       programs for each sequence
    n       number of the sequence              i_h     number of the head
    first   first row of the sequence           length  tokens of the sequence
    t0      first token of the chunk            last    last row of the chunk
    d0, k0  first column of the tile
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sequence_of(n, bounds, T, VARLEN: tl.constexpr):
    """Return the first row and the length of sequence n; rows are counted through the whole [B * T] batch."""
    if VARLEN:
        first = tl.load(bounds + n).to(tl.int64)
        length = (tl.load(bounds + n + 1).to(tl.int64) - first).to(tl.int32)
    else:
        first = n.to(tl.int64) * T
        length = T
    return first, length


@triton.jit(do_not_specialize=["T", "N", "R", "S"])
def gate_cumsum(
    g, G, bounds, T, N, H, R, S, BT: tl.constexpr, BH: tl.constexpr, VARLEN: tl.constexpr,
):
    """Write G [H, R]: cumulative sums of g / ln 2 within blocks of BT tokens of each sequence.

    S programs divide the blocks of a sequence. In this layout the decays of a chunk and head are contiguous.
    The scans load them directly into the layouts they need, without an exchange between warps in every chunk.

    A decay below 2^-126, the smallest normal float32, counts as 2^-126 (FORGOTTEN). So differences of sums
    stay precise after a token that forgets the whole state, even with g = -inf.

    g: [rows, H].
    G: [H, R], fp32.
    bounds: [N + 1] or None.
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


@triton.jit(do_not_specialize=["rows"])
def sum_heads(x, y, rows, n, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Write y, the sums of n neighboring heads of x, added in float32 in the order of the heads.

    x: [rows, n, D]; a row is one head of one token of the result.
    y: [rows, D].
    """
    own = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    columns = tl.arange(0, BD)
    mask = (own < rows)[:, None] & (columns < D)[None, :]
    total = tl.zeros([BT, BD], dtype=tl.float32)
    for i in range(n):
        total += tl.load(x + (own * n + i)[:, None] * D + columns[None, :], mask=mask,
                         other=0.0).to(tl.float32)
    tl.store(y + own[:, None] * D + columns[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def decays(G, gamma, first, t0, length, i_h, R, BT: tl.constexpr, BLOCK: tl.constexpr, DECAY: tl.constexpr):
    """Return the cumulative log2 decays of a chunk's tokens, [BT], and their total for the chunk.

    Rows after the end of the sequence do not decay, so they have the total. DECAY: 2 reads the sums in G, 1
    uses one rate gamma for each head, 0 is no decay. BLOCK: tokens of the blocks within which G is summed.

    G: [H, R], fp32, or None.
    gamma: [H] or None.
    """
    rows = tl.arange(0, BT)
    if DECAY == 2:
        line = G + i_h.to(tl.int64) * R + first + t0
        inside = t0 + rows < length
        total = tl.load(line + tl.minimum(BT, length - t0) - 1)
        cumulated = tl.where(inside, tl.load(line + rows, mask=inside, other=0.0), total)
        if BT < BLOCK:  # G is summed from the start of the block, and the chunk may start later
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
    """Return scale * 2^(D_i - D_j) for the causal elements of a tile, and zero for the others.

    The mask is applied before exp2, because the difference of a masked element is positive and overflows.
    log2(scale) is added to D_i (scale >= 0). This costs one addition per row instead of one product per
    element.
    """
    return tl.exp2(tl.where(causal, (D_row + tl.log2(scale))[:, None] - D_column[None, :], float("-inf")))


@triton.jit
def tile(x, first, t0, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr, BD: tl.constexpr):
    """Load a [BT, BD] tile of one head of a [rows, H, D] tensor, with zeros outside the sequence.

    x: [rows, H, D].
    """
    rows = tl.arange(0, BT)
    cols = d0 + tl.arange(0, BD)
    offsets = rows[:, None] * (H * D) + cols[None, :]
    mask = (t0 + rows < length)[:, None]
    if D % BD != 0:
        mask = mask & (cols < D)[None, :]
    return tl.load(x + ((first + t0) * H + i_h) * D + offsets, mask=mask, other=0.0)


@triton.jit
def beta_of(beta, first, t0, length, i_h, HV, BT: tl.constexpr):
    """Load BT values of beta [rows, HV] of one head, with zeros after the end of the sequence."""
    rows = tl.arange(0, BT)
    return tl.load(beta + (first + t0 + rows) * HV + i_h, mask=t0 + rows < length, other=0.0)


@triton.jit
def put(x, value, first, t0, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr, BD: tl.constexpr):
    """Store a [BT, BD] tile into one head of a [rows, H, D] tensor.

    x: [rows, H, D].
    value: [BT, BD].
    """
    rows = tl.arange(0, BT)
    cols = d0 + tl.arange(0, BD)
    offsets = rows[:, None] * (H * D) + cols[None, :]
    mask = (t0 + rows < length)[:, None]
    if D % BD != 0:
        mask = mask & (cols < D)[None, :]
    tl.store(x + ((first + t0) * H + i_h) * D + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def zero_rows(x, first, length, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr, BD: tl.constexpr):
    """Store zeros into columns d0 .. d0 + BD of one head, in ``length`` rows that begin at ``first``.

    x: [rows, H, D].
    first: the first row to zero.
    length: number of rows to zero.
    """
    for t0 in range(0, length, BT):
        put(x, tl.zeros([BT, BD], dtype=tl.float32), first, t0, length, i_h, H, D=D, d0=d0, BT=BT, BD=BD)


@triton.jit
def zero_gaps(x, bounds, n, T, N, i_h, H, D: tl.constexpr, d0, BT: tl.constexpr, BD: tl.constexpr):
    """Store zeros into the rows before the first and after the last packed sequence.

    No sequence owns these rows, so they would keep the old contents of the memory. The program of sequence 0
    writes the first rows, and the program of the last sequence writes the last ones.

    x: [rows, H, D].
    bounds: [N + 1].
    n: number of this program's sequence.
    T: number of rows in the batch.
    """
    if n == 0:
        zero_rows(x, n.to(tl.int64), tl.load(bounds).to(tl.int32), i_h, H, D, d0, BT, BD)
    if n == N - 1:
        last = tl.load(bounds + N).to(tl.int64)
        zero_rows(x, last, (T - last).to(tl.int32), i_h, H, D, d0, BT, BD)


@triton.jit
def first_slot(n, first, BT: tl.constexpr):
    """Return the index of the first chunk of sequence n in a table with one entry for each chunk.

    Entries of different sequences never overlap, and the host does not have to count chunks.
    """
    return first // BT + n


@triton.jit
def chunk_of(slot, bounds, T, N, S, BT: tl.constexpr, VARLEN: tl.constexpr):
    """Return sequence, first row of the sequence, length and first token of the chunk of a program.

    The first token is not less than the length if the program has no chunk. Packed sequences have one program
    for each slot of ``first_slot``, so a long sequence has as many programs as chunks. A step of the search
    reads 256 bounds at once and keeps the sequences between two of them.

    slot: number of the program among those of one head. S: chunks per sequence, if these are not packed.
    """
    if VARLEN:
        n, count = 0, N
        while count > 1:
            step = (count + 255) // 256
            each = n + step * tl.arange(0, 256)
            begin = tl.load(bounds + each, mask=each < N, other=0)
            before = (each < N) & (begin // BT + each <= slot)
            n += step * (tl.maximum(tl.sum(before.to(tl.int32), 0), 1) - 1)
            count = step
        first, length = sequence_of(n, bounds, T, VARLEN)
        t0 = (slot - first_slot(n, first, BT)).to(tl.int32) * BT
        t0 = tl.where(t0 < 0, length, t0)  # the slot is before the first sequence
    else:
        n = slot // S
        first, length = sequence_of(n, bounds, T, VARLEN)
        t0 = slot % S * BT
    return n, first, length, t0


@triton.jit
def state_offsets(nh, k0, v0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  V_FIRST: tl.constexpr):
    """Return offsets and mask of a [BK, BV] tile of state nh, stored [K, V] or, with V_FIRST, [V, K]."""
    k = k0 + tl.arange(0, BK)
    v = v0 + tl.arange(0, BV)
    if V_FIRST:
        offsets = k[:, None] + v[None, :] * K
    else:
        offsets = k[:, None] * V + v[None, :]
    return nh.to(tl.int64) * (K * V) + offsets, (k < K)[:, None] & (v < V)[None, :]
