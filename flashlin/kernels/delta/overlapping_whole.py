"""The whole forward of a delta rule for Hopper in one Gluon kernel: inverses, scores and scan.

It computes the same as ``delta_inverse`` and ``delta_overlapped`` (``overlapping.py``), but the inverses of
chunks stay in shared memory. While groups of four warps run the scan of a chunk, another group computes the
inverse A of the next one. The first scanning group also computes the scores s. The loading warp loads beta and
G, and no A.

The inverse of I + M begins with the 16x16 blocks on the diagonal, as in ``kernels/triangular_inverse.py``. Four
products then add the blocks below them, for tiles of 32 and for the whole chunk. Each operand of these products
is the sum of two bf16 numbers, which keeps 16 bits. The products of blocks of 16 share one product of 16 x 64:
rows of block w of the result use its columns of block w only.

ptxas serializes all products of the function if one group has too few registers. The order of products in the
scan, and the numbers of registers, avoid this (warning C7512 of ptxas).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlin.compat.descriptors import described
from flashlin.kernels.gluon_ops import async_load, async_store, barrier, barriers, own_rows, state_tile


@gluon.jit
def load_whole(ring, q, k, v, beta, betas, G, line, row0, i_h, HV, qk_column, v_column, chunks, BT: gl.constexpr,
               BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr, LINES: gl.constexpr,
               DECAY: gl.constexpr, STAGES: gl.constexpr):
    """Load all chunks of a program into the ring, like ``load`` of ``overlapping.py``, but without inverses."""
    ring_q, ring_k, ring_v, lines, full, empty = ring
    tokens = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [1], [0]))
    for i in range(chunks):
        slot = i % STAGES
        row = row0 + i * BT
        rate = gl.load(beta + ((row + tokens).to(gl.int64) * HV + i_h)).to(gl.float32)
        if DECAY == 2:
            at = line + i * BT
            sums = gl.load(G + at + tokens)
            total = gl.load(G + at + BT - 1 + 0 * tokens)
        if betas is not None:
            gl.store(betas + line + i * BT + tokens, rate)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * BT * (2 * BK + GROUPS * BV))
        async_load(k, [row, qk_column], bar, ring_k.index(slot))
        async_load(q, [row, qk_column], bar, ring_q.index(slot))
        for group in gl.static_range(GROUPS):
            async_load(v, [row, v_column + group * BV], bar, ring_v.index(slot * GROUPS + group))
        first = slot * LINES
        lines.index(first).store(rate)
        if DECAY == 2:
            lines.index(first + 1).store(sums)
            lines.index(first + 2).store(gl.exp2(sums))
            lines.index(first + 3).store(gl.exp2(total - sums))
            lines.index(first + 4).store(gl.exp2(total))
        barrier()  # all lanes must have written before one signals
        mbarrier.arrive(bar, count=1)


@gluon.jit
def halves_of(x, dtype: gl.constexpr):
    """Return two 16-bit numbers whose sum is x in float32."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(dtype), (x - high).to(dtype)


@gluon.jit
def in_blocks(x):
    """Return the four blocks of 16 columns of x."""
    BT: gl.constexpr = x.shape[0]
    even, odd = gl.split(x.reshape([BT, 2, 2, 16]).permute((0, 1, 3, 2)))
    first, third = gl.split(even.permute((0, 2, 1)))
    second, fourth = gl.split(odd.permute((0, 2, 1)))
    return first, second, third, fourth


@gluon.jit
def block_of(rows_like):
    """Return the number of the block of 16 rows for each row, as a column for a tensor like ``rows_like``."""
    BT: gl.constexpr = rows_like.shape[0]
    return (gl.arange(0, BT, gl.SliceLayout(1, rows_like.type.layout)) // 16)[:, None]


@gluon.jit
def own_columns(x):
    """Return the 16 columns of the block on the diagonal for each row of x."""
    first, second, third, fourth = in_blocks(x)
    w = block_of(first)
    return gl.where(w == 0, first, gl.where(w == 1, second, gl.where(w == 2, third, fourth)))


@gluon.jit
def beside_columns(x):
    """Return 16 columns for each row of x: those of the block before the one on the diagonal, in its pair."""
    first, second, third, fourth = in_blocks(x)
    w = block_of(first)
    return gl.where(w == 1, first, gl.where(w == 3, third, 0.0))


@gluon.jit
def beside(left, right):
    """Return left and right side by side."""
    BT: gl.constexpr = left.shape[0]
    wide: gl.constexpr = left.shape[1]
    return gl.join(left, right).permute((0, 2, 1)).reshape([BT, 2 * wide])


@gluon.jit
def left_columns(x):
    """Return the left half of x."""
    BT: gl.constexpr = x.shape[0]
    left, right = gl.split(x.reshape([BT, 2, BT // 2]).permute((0, 2, 1)))
    return left


@gluon.jit
def store_halves(high_of, low_of, x):
    """Store x as the sum of two 16-bit tiles in shared memory, and return these numbers."""
    high, low = halves_of(x, high_of.dtype)
    high_of.store(high)
    low_of.store(low)
    return high, low


@gluon.jit
def times(high, low, high_of, low_of, none, left: gl.constexpr):
    """Return the product of high + low in registers and a tile in shared memory, the sum of two others."""
    high = gl.convert_layout(high, left)
    y = warpgroup_mma(gl.convert_layout(low, left), high_of, none, use_acc=False, is_async=True)
    y = warpgroup_mma(high, low_of, y, is_async=True)
    y = warpgroup_mma(high, high_of, y, is_async=True)
    return warpgroup_mma_wait(0, [y])


@gluon.jit
def since_of(lines, line, of_chunk: gl.constexpr, BT: gl.constexpr, DECAY: gl.constexpr):
    """Return the decays between the tokens of a chunk [BT, BT], and zeros above the diagonal."""
    a_row: gl.constexpr = gl.SliceLayout(1, of_chunk)
    a_column: gl.constexpr = gl.SliceLayout(0, of_chunk)
    lower = gl.arange(0, BT, a_row)[:, None] >= gl.arange(0, BT, a_column)[None, :]
    if DECAY == 0:
        return gl.where(lower, 1.0, 0.0)
    else:
        apart = lines.index(line + 1).load(a_row)[:, None] - lines.index(line + 1).load(a_column)[None, :]
        return gl.exp2(gl.where(lower, apart, float("-inf")))


@gluon.jit
def invert(ring, pairs, scratch, A, A_low, row0, A_column, chunks, BT: gl.constexpr, LINES: gl.constexpr,
           DECAY: gl.constexpr, STAGES: gl.constexpr):
    """Compute the inverse A of all chunks; this is the program of a group of four warps.

    pairs: A and s of a chunk in shared memory, and their barriers. A, A_low: if given, receive the inverse and
    its rounding error.
    """
    ring_q, ring_k, ring_v, lines, full, empty = ring
    s_A, s_s, ready, free, scored = pairs
    s_M, s_D, s_C, s_C_low, s_E, s_E_low, s_F, s_F_low, s_P, s_P_low, s_A_low = scratch
    dtype: gl.constexpr = ring_k.dtype
    N: gl.constexpr = BT // 16
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    of_blocks: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    column_wise: gl.constexpr = gl.BlockedLayout([1, 16, 1], [1, 1, 32], [4, 1, 1], [1, 2, 0])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    a_row: gl.constexpr = gl.SliceLayout(1, of_chunk)
    none = gl.zeros([BT, BT], gl.float32, of_chunk)
    of_pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    left_of_pairs: gl.constexpr = gl.DotOperandLayout(0, of_pairs, 2)
    narrow = gl.zeros([BT, 32], gl.float32, of_pairs)
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, column_wise)))[None, :, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, column_wise)))[None, None, :]
    if chunks > 0:
        mbarrier.wait(full.index(0), 0)
    M = warpgroup_mma(ring_k.index(0), ring_k.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    for i in range(chunks):
        slot = i % STAGES
        line = slot * LINES
        since = since_of(lines, line, of_chunk, BT, DECAY) * lines.index(line).load(a_row)[:, None]
        M = warpgroup_mma_wait(0, [M]) * since
        own = own_columns(M)
        row = gl.arange(0, BT, gl.SliceLayout(1, own.type.layout)) % 16
        column = gl.arange(0, 16, gl.SliceLayout(0, own.type.layout))
        s_M.store(gl.where(row[:, None] > column[None, :], own, 0.0).reshape([N, 16, 16]))
        store_halves(s_C, s_C_low, beside_columns(M).reshape([N, 16, 16]).permute((1, 0, 2)).reshape([16, BT]))
        store_halves(s_F, s_F_low, left_columns(M))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)  # k is not needed any more
        X = gl.where(j == c, 1.0, 0.0) + gl.zeros([N, 16, 16], gl.float32, column_wise)
        for n in gl.static_range(15):
            m = s_M.slice(n, 1, 2).load(column_wise)
            bits = gl.where(j == n, X.to(gl.int32, bitcast=True), -2147483648)
            X -= m * gl.max(bits, 1).to(gl.float32, bitcast=True)[:, None, :]
        barrier()  # all warps must have read s_M
        s_D.store(X.reshape([BT, 16]))
        store_halves(s_E, s_E_low, X.permute((1, 0, 2)).reshape([16, BT]))
        fence_async_shared()
        barrier()
        D = s_D.load(of_blocks)
        high, low = halves_of(D, dtype)
        T = own_columns(times(high, low, s_C, s_C_low, none, left))
        high, low = halves_of(T, dtype)
        T = gl.convert_layout(beside_columns(times(high, low, s_E, s_E_low, none, left)), of_blocks)
        odd = block_of(D) % 2 == 1
        if A is not None:
            tma.store_wait(0)  # the last chunk's A and A_low have left s_A and s_A_low
        P = gl.convert_layout(beside(gl.where(odd, -T, D), gl.where(odd, D, 0.0)), of_pairs)
        high, low = store_halves(s_P, s_P_low, P)
        fence_async_shared()
        barrier()
        later = gl.minimum(i + 1, chunks - 1)  # M of the next chunk; after the last one, its result is not used
        b_k = ring_k.index(later % STAGES)
        mbarrier.wait(full.index(later % STAGES), (later // STAGES) & 1)
        M = warpgroup_mma(b_k, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        T = times(high, low, s_F.slice(32, 32, 0), s_F_low.slice(32, 32, 0), narrow, left_of_pairs)
        high, low = halves_of(T, dtype)
        T = times(high, low, s_P.slice(0, 32, 0), s_P_low.slice(0, 32, 0), narrow, left_of_pairs)
        lower = block_of(P) >= 2
        X = gl.convert_layout(beside(gl.where(lower, -T, P), gl.where(lower, P, 0.0)), of_chunk)
        high = X.to(dtype)
        mbarrier.wait(free.index(0), (i & 1) ^ 1)
        s_A.store(high)
        if A is not None:
            s_A_low.store((X - high.to(gl.float32)).to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(0), count=1)
        if A is not None:
            async_store(A, [row0 + i * BT, A_column], s_A)
            async_store(A_low, [row0 + i * BT, A_column], s_A_low)
    M = warpgroup_mma_wait(0, [M])
    if A is not None:
        tma.store_wait(0)


@gluon.jit
def scan_whole(ring, pairs, o, h0, ht, o_of, entering, leaving, row0, v0, v_column, chunks, scale,
               group: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
               GROUPS: gl.constexpr, LINES: gl.constexpr, DECAY: gl.constexpr, HAS_H0: gl.constexpr,
               HAS_HT: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr):
    """Compute all chunks for BV columns of the state, like ``multiply`` of ``overlapping.py``."""
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    a_column: gl.constexpr = gl.SliceLayout(0, of_chunk)
    ring_q, ring_k, ring_v, lines, full, empty = ring
    s_A, s_s, ready, free, scored = pairs
    dtype: gl.constexpr = ring_k.dtype
    s_o = o_of.index(group)
    v0 += group * BV
    v_column += group * BV
    if HAS_H0:
        h = gl.load(state_tile(h0, entering, v0, 0, of_state, BK, V, BV, V_FIRST)).to(gl.float32)
    else:
        h = gl.zeros([BV, BK], gl.float32, of_state)
    nothing = gl.zeros([BV, BT], gl.float32, of_chunk)
    entered = gl.convert_layout(h.to(dtype), left)
    for i in range(chunks):
        slot = i % STAGES
        b_q, b_k, line = ring_q.index(slot), ring_k.index(slot), slot * LINES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        if group == 0:
            scores = warpgroup_mma(b_q, b_k.permute((1, 0)), nothing, use_acc=False, is_async=True)
            since = since_of(lines, line, of_chunk, BT, DECAY) * scale
            s_s.index(i & 1).store((warpgroup_mma_wait(0, [scores]) * since).to(dtype))
            fence_async_shared()
            barrier()
            mbarrier.arrive(scored.index(i & 1), count=1)
        hk = warpgroup_mma(entered, b_k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        hk = warpgroup_mma_wait(0, [hk])
        y = ring_v.index(slot * GROUPS + group).permute((1, 0)).load(of_chunk).to(gl.float32)
        if DECAY == 0:
            y = y - hk
        else:
            y = y - hk * lines.index(line + 2).load(a_column)[None, :]
        y = y * lines.index(line).load(a_column)[None, :]
        y = gl.convert_layout(y.to(dtype), left)
        out = warpgroup_mma(entered, b_q.permute((1, 0)), nothing, use_acc=False, is_async=True)
        out = warpgroup_mma_wait(0, [out])
        if DECAY == 0:
            out = out * scale
        else:
            out = out * (lines.index(line + 2).load(a_column) * scale)[None, :]
        mbarrier.wait(ready.index(0), i & 1)
        u = warpgroup_mma(y, s_A.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if DECAY == 2:
            h = h * lines.index(line + 4).load(gl.SliceLayout(1, of_state))[:, None]
        u = warpgroup_mma_wait(0, [u])
        w = u
        if DECAY == 2:
            w = u * lines.index(line + 3).load(a_column)[None, :]
        h = warpgroup_mma(gl.convert_layout(w.to(dtype), left_of_state), b_k, h, is_async=True)
        u = gl.convert_layout(u.to(dtype), left)
        mbarrier.wait(scored.index(i & 1), (i // 2) & 1)
        out = warpgroup_mma(u, s_s.index(i & 1).permute((1, 0)), out, is_async=True)
        h, out = warpgroup_mma_wait(0, [h, out])
        entered = gl.convert_layout(h.to(dtype), left)
        tma.store_wait(0)
        s_o.permute((1, 0)).store(out.to(s_o.dtype))
        fence_async_shared()
        async_store(o, [row0 + i * BT, v_column], s_o)
        barrier()  # all warps must have read the slot before one thread signals
        mbarrier.arrive(empty.index(slot), count=1)
        mbarrier.arrive(free.index(0), count=1)
    tma.store_wait(0)
    if HAS_HT:
        if leaving >= 0:
            zero = gl.minimum(chunks, 0)  # a known 0 would make the compiler keep h0's addresses until here
            gl.store(state_tile(ht, leaving, v0, zero, of_state, BK, V, BV, V_FIRST), h)


@described(
    q=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    k=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    v=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]),
    A=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    A_low=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    o=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]))
@gluon.jit(do_not_specialize=["T", "R", "L", "rows", "scale"])
def delta_whole(
    q, k,  # [rows, H, K]
    v,  # [rows, HV, V]
    beta,  # [rows, HV]
    G,  # [HV, R], fp32
    h0,  # [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K]
    A, A_low,  # [rows, HV, BT], or None
    betas,  # [HV, R], fp32, or None
    o,  # [rows, HV, V]
    ht,  # [N, HV, K, V] or, with V_FIRST, [N, HV, V, K], fp32
    undivided,  # [N, HV], int32, or None
    scale,
    T,  # tokens of a sequence, a multiple of BT
    H, HV, R, L,
    rows,  # number of rows in the batch
    V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, DECAY: gl.constexpr, HAS_H0: gl.constexpr, HAS_HT: gl.constexpr,
    V_FIRST: gl.constexpr,
):
    """Run the forward in Gluon: write the outputs o and the final states ht, like delta_scan.

    If given, A, A_low and betas receive what ``delta_inverse`` computes, for backward.

    One program computes GROUPS times BV columns of the state of one head. GROUPS is 2, and BK is K.
    """
    LINES: gl.constexpr = 5 if DECAY == 2 else 1
    dtype: gl.constexpr = q.dtype
    v0, i_h, n, row0, chunks, own, leaving = own_rows(undivided, T, HV, L, V, 2 * BV, BT, False)
    line = i_h.to(gl.int64) * R + row0
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BT], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring_q = gl.allocate_shared_memory(dtype, [STAGES, BT, BK], q.layout)
    ring_k = gl.allocate_shared_memory(dtype, [STAGES, BT, BK], k.layout)
    ring_v = gl.allocate_shared_memory(dtype, [STAGES * 2, BT, BV], v.layout)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES * LINES, BT], plain)
    full, empty = barriers(STAGES, 2, 3)
    ring = (ring_q, ring_k, ring_v, lines, full, empty)
    s_A = gl.allocate_shared_memory(dtype, [BT, BT], square)
    s_s = gl.allocate_shared_memory(dtype, [2, BT, BT], square)
    ready, free = barriers(1, 1, 2)
    scored, unused = barriers(2, 1, 1)
    pairs = (s_A, s_s, ready, free, scored)
    s_M = gl.allocate_shared_memory(gl.float32, [BT // 16, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 2, 0]))
    s_D = s_M._reinterpret(gl.float32, [BT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, BT], dtype)
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, 32], dtype)
    s_C = gl.allocate_shared_memory(dtype, [16, BT], wide)
    s_C_low = gl.allocate_shared_memory(dtype, [16, BT], wide)
    s_E = gl.allocate_shared_memory(dtype, [16, BT], wide)
    s_E_low = gl.allocate_shared_memory(dtype, [16, BT], wide)
    s_F = gl.allocate_shared_memory(dtype, [BT, 32], half)
    s_F_low = gl.allocate_shared_memory(dtype, [BT, 32], half)
    s_P = gl.allocate_shared_memory(dtype, [BT, 32], half)
    s_P_low = gl.allocate_shared_memory(dtype, [BT, 32], half)
    s_A_low = s_A
    if A is not None:
        s_A_low = gl.allocate_shared_memory(dtype, [BT, BT], square)
    scratch = (s_M, s_D, s_C, s_C_low, s_E, s_E_low, s_F, s_F_low, s_P, s_P_low, s_A_low)
    written = gl.allocate_shared_memory(o.dtype, [2, BT, BV], o.layout)
    column = i_h * V + v0
    gl.warp_specialize(
        [(scan_whole, (ring, pairs, o, h0, ht, written, own, leaving, row0, v0, column, chunks, scale, 0, BT,
                       BK, V, BV, 2, LINES, DECAY, HAS_H0, HAS_HT, V_FIRST, STAGES)),
         (scan_whole, (ring, pairs, o, h0, ht, written, own, leaving, row0, v0, column, chunks, scale, 1, BT,
                       BK, V, BV, 2, LINES, DECAY, HAS_H0, HAS_HT, V_FIRST, STAGES)),
         (invert, (ring, pairs, scratch, A, A_low, row0, i_h * BT, chunks, BT, LINES, DECAY, STAGES)),
         (load_whole, (ring, q, k, v, beta, betas, G, line, row0, i_h, HV, i_h // (HV // H) * BK, column, chunks, BT,
                       BK, BV, 2, LINES, DECAY, STAGES))],
        [4, 4, 1], [192, 104, 24])
