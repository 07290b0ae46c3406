"""The inverses of ``forward.py`` for Hopper, in Gluon, with one program of four warps for each chunk and head.

Each warp inverts one 16x16 block on the diagonal of I + M by substitution in float32; the rows of the block are
in shared memory. Products of blocks then give the columns of blocks from right to left:

    X_rc = -(sum over m from c + 1 to r of X_rm M_mc) X_cc

This has the terms of ``triangular_inverse.merge``. Operands are sums of two bf16 numbers, as in its ``product``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlin.compat.descriptors import described
from flashlin.kernels.gluon_ops import async_load, barrier


@gluon.jit
def halves(x):
    """Return two bf16 tiles whose sum is x, the first one truncated."""
    top = (x.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
    return top.to(gl.bfloat16), (x - top).to(gl.bfloat16)


@gluon.jit
def operands(x, layout: gl.constexpr):
    """Return the two tiles of ``halves`` as left operands of products with this layout."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    high, low = halves(x)
    return gl.convert_layout(high, left), gl.convert_layout(low, left)


@gluon.jit
def multiplied(high, low, b_high, b_low, acc, layout: gl.constexpr):
    """Return acc plus (high + low) (b_high + b_low), where the right tiles [16, 16] are in shared memory."""
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    b = b_high.load(right)
    return mma_v2(high, b, mma_v2(high, b_low.load(right), mma_v2(low, b, acc)))


@gluon.jit
def column(S, X, X_high, X_low, c: gl.constexpr, layout: gl.constexpr):
    """Return column c of blocks, [BT, 16], where S is the sum of its products before the last one."""
    rows = gl.arange(0, X.shape[0], gl.SliceLayout(1, layout))[:, None]
    high, low = operands(S, layout)
    S = multiplied(high, low, X_high.slice(16 * c, 16).permute((1, 0)), X_low.slice(16 * c, 16).permute((1, 0)),
                   gl.zeros_like(S), layout)
    return gl.where(rows // 16 == c, X, -S)


@gluon.jit
def put_column(A, A_low, X, at, c: gl.constexpr, HAS_LOW: gl.constexpr):
    """Store column c of blocks of the inverse, X [BT, 16], and its rounding error."""
    rounded = X.to(A.dtype.element_ty)
    gl.store(A + at + c * 16, rounded)
    if HAS_LOW:
        gl.store(A_low + at + c * 16, (X - rounded.to(gl.float32)).to(A.dtype.element_ty))


@described(k=lambda x: (x["H"] * x["K"], x["BT"], x["K"]))
@gluon.jit(do_not_specialize=["T", "R", "rows"])
def delta_overlapped_inverse(
    k,  # [rows, H, K]
    beta,  # [rows, HV]
    G,  # [HV, R], fp32
    A, A_low,  # [rows, HV, BT]
    betas,  # [HV, R], fp32
    H, HV, R,
    rows,  # number of rows in the batch
    K: gl.constexpr, BT: gl.constexpr, DECAY: gl.constexpr, HAS_LOW: gl.constexpr,
    REGISTERS: gl.constexpr,  # bound on the registers per thread, see compat/descriptors.py
):
    """Write A, A_low and betas of all chunks, like delta_inverse. BT is 64."""
    of_pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    of_column: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    of_blocks: gl.constexpr = gl.BlockedLayout([1, 1, 8], [16, 1, 2], [1, 4, 1], [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    program = gl.program_id(0)
    i_h = program % HV
    row = program // HV * BT
    s_k = gl.allocate_shared_memory(k.dtype, [BT, K], k.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(full.index(0), 2 * BT * K)
    async_load(k, [row, i_h // (HV // H) * K], full.index(0), s_k)
    line = i_h.to(gl.int64) * R + row
    reads = gl.arange(0, BT, gl.SliceLayout(1, of_pairs))
    writes = gl.arange(0, BT, gl.SliceLayout(0, of_pairs))
    b_beta = gl.load(beta + (row + reads).to(gl.int64) * HV + i_h).to(gl.float32)
    gl.store(betas + line + reads, b_beta)
    below = reads[:, None] > writes[None, :]
    between = gl.where(below, b_beta[:, None], 0.0)
    if DECAY == 2:
        apart = gl.load(G + line + reads)[:, None] - gl.load(G + line + writes)[None, :]
        between *= gl.exp2(gl.where(below, apart, 0.0))
    mbarrier.wait(full.index(0), 0)
    none = gl.zeros([BT, BT], gl.float32, of_pairs)
    M = warpgroup_mma(s_k, s_k.permute((1, 0)), none, use_acc=False, is_async=True)
    M = warpgroup_mma_wait(0, [M]) * between
    # Columns of blocks are contiguous in memory, and rows of the blocks on the diagonal.
    M_high = gl.allocate_shared_memory(gl.bfloat16, [BT * BT // 16, 16], plain)
    M_low = gl.allocate_shared_memory(gl.bfloat16, [BT * BT // 16, 16], plain)
    high, low = halves(M.reshape([BT, BT // 16, 16]).permute((1, 0, 2)).reshape([BT * BT // 16, 16]))
    M_high.store(high)
    M_low.store(low)
    own = gl.where(reads[:, None] // 16 == writes[None, :] // 16, M, 0.0)
    diagonal = gl.allocate_shared_memory(gl.float32, [16, BT // 16, 16],
                                         gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    diagonal.store(gl.sum(own.reshape([BT // 16, 16, BT // 16, 16]), 2).permute((1, 0, 2)))
    c = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, of_blocks)))[:, None, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, of_blocks)))[None, None, :]
    X = gl.zeros([16, BT // 16, 16], gl.float32, of_blocks) + gl.where(j == c, 1.0, 0.0)  # column, block, row
    for i in gl.static_range(1, 16):
        m = diagonal.slice(i, 1).load(of_blocks)
        X -= gl.where(j == i, gl.sum(m * X, 2)[:, :, None], 0.0)
    X_high = gl.allocate_shared_memory(gl.bfloat16, [BT, 16], plain)  # transposed blocks
    X_low = gl.allocate_shared_memory(gl.bfloat16, [BT, 16], plain)
    high, low = halves(X.permute((1, 0, 2)).reshape([BT, 16]))
    X_high.store(high)
    X_low.store(low)
    X = gl.convert_layout(X.permute((1, 2, 0)).reshape([BT, 16]), of_column)
    tokens = gl.arange(0, BT, gl.SliceLayout(1, of_column))
    at = ((row + tokens).to(gl.int64) * HV + i_h)[:, None] * BT
    at += gl.arange(0, 16, gl.SliceLayout(0, of_column))[None, :]
    nothing = gl.zeros([BT, 16], gl.float32, of_column)
    X3 = gl.where((tokens // 16)[:, None] == 3, X, 0.0)
    put_column(A, A_low, X3, at, 3, HAS_LOW)
    high_3, low_3 = operands(X3, of_column)
    S = multiplied(high_3, low_3, M_high.slice(2 * BT + 48, 16), M_low.slice(2 * BT + 48, 16), nothing, of_column)
    X2 = column(S, X, X_high, X_low, 2, of_column)
    put_column(A, A_low, X2, at, 2, HAS_LOW)
    high_2, low_2 = operands(X2, of_column)
    S = multiplied(high_2, low_2, M_high.slice(BT + 32, 16), M_low.slice(BT + 32, 16), nothing, of_column)
    S = multiplied(high_3, low_3, M_high.slice(BT + 48, 16), M_low.slice(BT + 48, 16), S, of_column)
    X1 = column(S, X, X_high, X_low, 1, of_column)
    put_column(A, A_low, X1, at, 1, HAS_LOW)
    high, low = operands(X1, of_column)
    S = multiplied(high, low, M_high.slice(16, 16), M_low.slice(16, 16), nothing, of_column)
    S = multiplied(high_2, low_2, M_high.slice(32, 16), M_low.slice(32, 16), S, of_column)
    S = multiplied(high_3, low_3, M_high.slice(48, 16), M_low.slice(48, 16), S, of_column)
    put_column(A, A_low, column(S, X, X_high, X_low, 0, of_column), at, 0, HAS_LOW)
