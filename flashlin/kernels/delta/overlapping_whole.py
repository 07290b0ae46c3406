"""The whole forward pass of a delta rule in one kernel for Hopper, in Gluon.

It is the scan of ``overlapping.py`` with one more kind of program: groups of four warps that compute the
inverse of the next chunks (``overlapping_inverse.py``) while the other groups run the scan. So the inverses
need no global memory, except in training, where backward reads them.
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
from flashlin.kernels.delta.overlapping import load, multiply, ring_of
from flashlin.kernels.delta.overlapping_inverse import inverse, scratch
from flashlin.kernels.gluon_ops import async_store, barrier, barriers, own_rows


@gluon.jit
def prepare(turn: gl.constexpr, ring, inverted, memory, low, writes, place, PREPARERS: gl.constexpr,
            DECAY: gl.constexpr):
    """Compute the inverse of every PREPARERS-th chunk, from chunk ``turn`` on, into the slot of the chunk.

    inverted: the barriers that signal inverses. memory: see ``scratch``. low: a buffer [BT, BT].
    writes: A, A_low and betas, for backward, or None three times.
    place: the program's first row, its column in A, the offset of its first token in betas, and its chunks.
    """
    A, A_low, betas = writes
    row0, column, line, chunks = place
    ring_q, ring_k, ring_v, ring_A, ring_low, lines, full, empty = ring
    STAGES: gl.constexpr = ring_k.shape[0]
    BT: gl.constexpr = ring_k.shape[1]
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    dtype: gl.constexpr = ring_k.dtype
    of_line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tokens = gl.arange(0, BT, of_line)
    none = gl.zeros([BT, BT], gl.float32, of_chunk)
    for i in range(turn, chunks, PREPARERS):
        slot = i % STAGES
        first = slot * (5 if DECAY == 2 else 1)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        b_k = ring_k.index(slot)
        products = warpgroup_mma(b_k, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, [products])
        X = inverse(products, lines.index(first), lines.index(first + DECAY // 2), memory, DECAY)
        X = gl.convert_layout(X, of_chunk)
        b_A = ring_A.index(slot)
        b_A.store(X.to(dtype))
        if A is not None:
            low.store((X - b_A.load(of_chunk).to(gl.float32)).to(dtype))
        fence_async_shared()
        barrier()  # all warps must have written before one thread signals
        mbarrier.arrive(inverted.index(slot), count=1)
        if A is not None:
            row = row0 + i * BT
            async_store(A, [row, column], b_A)
            async_store(A_low, [row, column], low)
            gl.store(betas + line + i * BT + tokens, lines.index(first).load(of_line))
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(empty.index(slot), count=1)


@described(
    q=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    k=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    v=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]),
    A=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    A_low=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    o=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]))
@gluon.jit(do_not_specialize=["T", "R", "L", "rows", "scale"])
def delta_overlapped_whole(
    k, q,  # [rows, H, K]
    v,  # [rows, HV, V]
    beta,  # [rows, HV]
    G,  # [HV, R], fp32
    h0,  # [N, HV, K, V] or, with V_FIRST, [N, HV, V, K]
    o,  # [rows, HV, V]
    ht,  # [N, HV, K, V] or, with V_FIRST, [N, HV, V, K], fp32
    A, A_low,  # [rows, HV, BT], or None
    betas,  # [HV, R], fp32, or None
    scale,
    T,  # tokens of a sequence, a multiple of BT
    H, HV, R, L,
    rows,  # number of rows in the batch
    V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, DECAY: gl.constexpr, HAS_H0: gl.constexpr, HAS_HT: gl.constexpr,
    V_FIRST: gl.constexpr,
):
    """Write o, ht and, for backward, A, A_low and betas, like delta_inverse and delta_scan.

    One program computes GROUPS (1 or 2) times BV columns of the state of one head. BK is K. Each strip of
    columns computes the inverses of its head.
    """
    v0, i_h, n, row0, chunks, entering, leaving = own_rows(None, T, HV, L, V, GROUPS * BV, BT, False)
    ring = ring_of(q, k, v, None, BT=BT, BK=BK, BV=BV, GROUPS=GROUPS, STAGES=STAGES, DECAY=DECAY,
                   READERS=GROUPS + (0 if A is None else 1))
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BT], k.dtype)
    weights = gl.allocate_shared_memory(k.dtype, [2, BT, BT], square)
    written = gl.allocate_shared_memory(o.dtype, [GROUPS, BT, BV], o.layout)
    scored, used = barriers(2, 1, GROUPS)
    inverted, _ = barriers(STAGES, 1, 1)
    work = (o, None, h0, ht, weights, written, weights, scored, used, inverted, scale)
    place = (v0, i_h * V + v0, row0, entering, leaving, 0, 0, chunks)
    line = i_h.to(gl.int64) * R + row0
    reads = (q, k, v, None, None, beta + (row0.to(gl.int64) * HV + i_h), G)
    columns = (i_h // (HV // H) * BK, i_h * V + v0, 0)
    writes, own = (A, A_low, betas), (row0, i_h * BT, line, chunks)
    memory, low = scratch(), weights  # low: a placeholder
    if A is not None:
        low = gl.allocate_shared_memory(k.dtype, [BT, BT], square)
    if GROUPS == 1:
        other_memory, other_low = scratch(), low
        if A is not None:
            other_low = gl.allocate_shared_memory(k.dtype, [BT, BT], square)
        gl.warp_specialize(
            [(multiply, (0, ring, work, place, V, GROUPS, DECAY, HAS_H0, HAS_HT, V_FIRST)),
             (prepare, (0, ring, inverted, memory, low, writes, own, 2, DECAY)),
             (prepare, (1, ring, inverted, other_memory, other_low, writes, own, 2, DECAY)),
             (load, (ring, reads, row0, line, HV, columns, chunks, GROUPS, DECAY, False))],
            [4, 4, 1], [128, 128, 40])
    else:
        gl.warp_specialize(
            [(multiply, (0, ring, work, place, V, GROUPS, DECAY, HAS_H0, HAS_HT, V_FIRST)),
             (multiply, (1, ring, work, place, V, GROUPS, DECAY, HAS_H0, HAS_HT, V_FIRST)),
             (prepare, (0, ring, inverted, memory, low, writes, own, 1, DECAY)),
             (load, (ring, reads, row0, line, HV, columns, chunks, GROUPS, DECAY, False))],
            [4, 4, 1], [184, 112, 32])
