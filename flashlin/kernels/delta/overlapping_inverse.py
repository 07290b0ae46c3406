"""Compute the inverse A of each chunk (``forward.py``) on Hopper, in Gluon, with four warps per chunk.

M has 4 x 4 blocks of 16 x 16. Warp w holds rows 16 w to 16 w + 15 of every matrix. Each warp inverts its
block on the diagonal by substitution in float32. Then products merge these inverses into the inverses of two
tiles of 32 x 32, and these into the inverse of the chunk, as ``triangular_inverse.merge`` does.

All warps multiply their rows by the same right operand, a block of 16 x 16. Some warps do not need this
product. Their results may be infinite, and ``gl.where`` discards them. Operands are the sums of two bf16
numbers, as in ``triangular_inverse.product``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlin.compat.descriptors import described
from flashlin.kernels.gluon_ops import async_load, async_store, barrier, reinterpreted

NARROW = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # of matrices [64, 16]
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
OWN = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))  # of four blocks [4, 16, 16]
COLUMN = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0]))  # a half for each thread


@gluon.jit
def halves(x):
    """Return two bf16 matrices whose sum equals x to 16 bits. The first one has the high bits."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def put(x, to):
    """Store x [64, 16] as two bf16 matrices (``halves``) in the two buffers of a right operand."""
    high, low = halves(x)
    to[0].store(high)
    to[1].store(low)


@gluon.jit
def plus(acc, x, right, block: gl.constexpr):
    """Return acc + x R, where R is one block of 16 rows of a right operand (see ``put``)."""
    high, low = halves(x)
    high, low = gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)
    top = right[0].slice(16 * block, 16).load(RIGHT)
    acc = mma_v2(low, top, acc)
    acc = mma_v2(high, right[1].slice(16 * block, 16).load(RIGHT), acc)
    return mma_v2(high, top, acc)


@gluon.jit
def scratch():
    """Return the shared memory that ``inverse`` needs: three right operands (``put``), and the diagonal of M.

    The compiler adds a barrier between two stores to one allocation. So the high and low bits of most
    operands have an allocation each. The third operand reuses the memory of the diagonal, which is not needed
    then.
    """
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 16], gl.bfloat16)
    one = (gl.allocate_shared_memory(gl.bfloat16, [64, 16], small),
           gl.allocate_shared_memory(gl.bfloat16, [64, 16], small))
    two = (gl.allocate_shared_memory(gl.bfloat16, [64, 16], small),
           gl.allocate_shared_memory(gl.bfloat16, [64, 16], small))
    both = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 16], small)
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return one, two, (both.index(0), both.index(1)), reinterpreted(both, gl.float32, [64, 16], rows)


@gluon.jit
def quarters(x):
    """Return the four matrices [64, 16] side by side in a matrix [64, 64]."""
    even, odd = gl.split(x.reshape([64, 4, 16]).permute([0, 2, 1]).reshape([64, 16, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return (gl.convert_layout(a, NARROW), gl.convert_layout(b, NARROW), gl.convert_layout(c, NARROW),
            gl.convert_layout(d, NARROW))


@gluon.jit
def beside(a, b, WIDE: gl.constexpr):
    """Return the matrix [64, WIDE] with the columns of a, then those of b."""
    return gl.join(a, b).permute([0, 2, 1]).reshape([64, WIDE])


@gluon.jit
def scaled(x, betas, sums, i: gl.constexpr, DECAY: gl.constexpr):
    """Return columns 16 i to 16 i + 15 of M below the diagonal blocks, given the products x of the keys.

    The cumulative decay at the last of these columns splits each decay into two factors. Both are at most 1
    in rows below, if no log decay is positive.
    """
    rows: gl.constexpr = gl.SliceLayout(1, NARROW)
    if DECAY == 0:
        return x * betas.load(rows)[:, None]
    else:
        until = sums.slice(16 * i, 16).load(gl.SliceLayout(0, NARROW))
        here = sums.slice(16 * i + 15, 1)
        before = gl.exp2(here.load(gl.SliceLayout(0, NARROW)) - until)
        after = gl.exp2(sums.load(rows) - here.load(rows)) * betas.load(rows)
        return x * after[:, None] * before[None, :]


@gluon.jit
def scaled_diagonal(x, betas, sums, DECAY: gl.constexpr):
    """Return the four diagonal blocks [4, 16, 16] of M, given the products x of the keys."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows: gl.constexpr = gl.SliceLayout(2, OWN)
    columns: gl.constexpr = gl.SliceLayout(1, OWN)
    below = (gl.arange(0, 16, gl.SliceLayout(0, rows))[None, :, None]
             > gl.arange(0, 16, gl.SliceLayout(0, columns))[None, None, :])
    x = x * reinterpreted(betas, gl.float32, [4, 16], flat).load(rows)[:, :, None]
    if DECAY == 0:
        return gl.where(below, x, 0.0)
    else:
        tile = reinterpreted(sums, gl.float32, [4, 16], flat)
        apart = tile.load(rows)[:, :, None] - tile.load(columns)[:, None, :]
        return x * gl.exp2(gl.where(below, apart, float("-inf")))


@gluon.jit
def substituted(diagonal):
    """Return the inverses of I + M for the four diagonal blocks M in shared memory, as a matrix [64, 16].

    As soon as a row of the inverses is complete, its multiples are subtracted from all later rows.

    diagonal: [64, 16], float32. Rows 4 j to 4 j + 3 hold column j of the four blocks, one row per block.
    """
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))[None, None, :]
    column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))[None, :, None]
    X = gl.where(row == column, 1.0, 0.0) + gl.zeros([4, 16, 16], gl.float32, COLUMN)
    for j in gl.static_range(15):
        # This sum selects row j. With integers, the compiler can remove the additions of zero.
        done = gl.sum(gl.where(row == j, X.to(gl.int32, bitcast=True), 0), 2).to(gl.float32, bitcast=True)
        X = X - diagonal.slice(4 * j, 4).load(gl.SliceLayout(1, COLUMN))[:, None, :] * done[:, :, None]
    return gl.convert_layout(X.permute([0, 2, 1]).reshape([64, 16]), NARROW)


@gluon.jit
def inverse(products, betas, sums, memory, DECAY: gl.constexpr):
    """Return the inverse (I + M)^-1 of a chunk, [64, 64].

    products: the products k_i . k_j of its keys.
    betas, sums: beta and, with DECAY, the cumulative log2 decays, in shared memory.
    memory: the result of ``scratch``.
    """
    one, two, three, diagonal = memory
    a, b, c, d = quarters(products)
    # The number of each row's warp. Because of the sum, ptxas does not see that all lanes of a warp have the
    # same number. Otherwise ptxas would copy each condition from a uniform predicate, 64 times in all.
    warp = (gl.arange(0, 64, gl.SliceLayout(1, NARROW)) // 16)[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, NARROW))[None, :]
    own = gl.sum(gl.where(column == 0, warp, 0), 1)[:, None]
    X = gl.where(own < 2, gl.where(own == 0, a, b), gl.where(own == 2, c, d))
    X = scaled_diagonal(gl.convert_layout(X.reshape([4, 16, 16]), OWN), betas, sums, DECAY)
    diagonal.store(X.permute([2, 0, 1]).reshape([64, 16]))
    X = substituted(diagonal)
    a, b = scaled(a, betas, sums, 0, DECAY), scaled(b, betas, sums, 1, DECAY)
    c = scaled(c, betas, sums, 2, DECAY)
    put(X, one)
    none = gl.zeros([64, 16], gl.float32, NARROW)
    # The rows of warp w become block (w, 0), (w, 1) or (w, 2) of M, times the inverse of block 0, 1 or 2.
    first = plus(none, a, one, 0)
    second = plus(none, b, one, 1)
    put(gl.where(own == 1, first, plus(none, c, one, 2)), two)
    # c and d are the left and right 16 columns of the inverses of both tiles of 32 x 32.
    below = gl.where(own == 1, plus(none, X, two, 1), plus(none, X, two, 3))
    c = gl.where(own % 2 == 0, X, -below)
    d = gl.where(own % 2 == 0, 0.0, X)
    put(c, three)
    put(plus(first, b, three, 1), one)
    put(second, two)
    a = plus(plus(none, c, one, 2), d, one, 3)
    b = plus(plus(none, c, two, 2), d, two, 3)
    upper = own < 2
    left = beside(gl.where(upper, c, -a), gl.where(upper, d, -b), 32)
    return beside(left, beside(gl.where(upper, 0.0, c), gl.where(upper, 0.0, d), 32), 64)


@described(
    k=lambda x: (x["H"] * x["BK"], x["BT"], x["BT"]),
    A=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    A_low=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]))
@gluon.jit(do_not_specialize=["T", "N", "R", "rows"])
def delta_overlapped_inverse(
    k, A, A_low, betas, G, kk, chunk_rows, T, N, H, HV, shared, R, rows, BT: gl.constexpr, BK: gl.constexpr,
    REGISTERS: gl.constexpr, DECAY: gl.constexpr,
):
    """Write A and A_low of one chunk and head, like delta_inverse, and the squared norms of its keys.

    The first programs compute the last chunks of all sequences. So the L2 cache may still have the
    keys and inverses of the first chunks when the scan begins.

    k: [rows, H, K].
    A, A_low: [rows, HV, BT]; A_low may be None.
    betas, G: [HV, R], fp32; G may be None.
    kk: the squared norms, [H, R], fp32, or None. Heads that share a head of k all write the same values.
    chunk_rows: the first rows of the chunks of packed sequences (``packed.whole_chunks``), or None. With
        packed sequences, N is 1.
    T: tokens of a sequence, a multiple of BT.
    N: number of sequences.
    shared: heads of A for each head of k. If it is 1, Triton compiles the kernel without the division.
    rows: number of rows in the batch. BK is K.
    """
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    of_line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = k.dtype
    program = gl.program_id(0)
    i_h = program % HV
    own = program // HV
    row = own % N * T + (T // BT - 1 - own // N) * BT
    if chunk_rows is not None:
        row = gl.load(chunk_rows + row // BT)
        if row < 0:
            return
    keys = gl.allocate_shared_memory(dtype, [BK // BT, BT, BT], k.layout)
    memory = scratch()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_beta = gl.allocate_shared_memory(gl.float32, [BT], flat)
    s_sums = s_beta
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(bar, count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(bar, 2 * BT * BK)
    column = i_h // shared * BK
    for i in gl.static_range(BK // BT):
        async_load(k, [row, column + i * BT], bar, keys.index(i))
    tokens = gl.arange(0, BT, of_line)
    line = i_h.to(gl.int64) * R + row
    s_beta.store(gl.load(betas + line + tokens))
    if DECAY == 2:
        s_sums = gl.allocate_shared_memory(gl.float32, [BT], flat)
        s_sums.store(gl.load(G + line + tokens))
    products = gl.zeros([BT, BT], gl.float32, of_chunk)
    mbarrier.wait(bar, 0)
    for i in gl.static_range(BK // BT):
        products = warpgroup_mma(keys.index(i), keys.index(i).permute((1, 0)), products, is_async=True)
    products = warpgroup_mma_wait(0, [products])
    if kk is not None:
        reads = gl.arange(0, BT, gl.SliceLayout(1, of_chunk))
        same = reads[:, None] == gl.arange(0, BT, gl.SliceLayout(0, of_chunk))[None, :]
        gl.store(kk + (i_h // shared).to(gl.int64) * R + row + reads,
                 gl.sum(gl.where(same, products, 0.0), 1))
    X = gl.convert_layout(inverse(products, s_beta, s_sums, memory, DECAY), of_chunk)
    tiles = gl.allocate_shared_memory(dtype, [1 if A_low is None else 2, BT, BT], A.layout)
    tiles.index(0).store(X.to(dtype))
    if A_low is not None:  # loading the rounded numbers is faster than converting them one at a time
        tiles.index(1).store((X - tiles.index(0).load(of_chunk).to(gl.float32)).to(dtype))
    fence_async_shared()
    barrier()
    async_store(A, [row, i_h * BT], tiles.index(0))
    if A_low is not None:
        async_store(A_low, [row, i_h * BT], tiles.index(1))
    tma.store_wait(0)
