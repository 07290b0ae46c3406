"""The gradients of ``backward.py`` for Hopper, in Gluon, with one program for each chunk and head.

TMA loads the rows do, u and dy once. The state, its gradient, q and k arrive in strips of BK channels, the
next one while a strip is computed. dq and dk are stored from the shared memory that held q and k. Two
programs fit a multiprocessor, so one computes while the other waits.

The gradients of scores, ds and z, are in shared memory. Only one left operand is in registers: the transpose
of Diag(beta) z, which is multiplied by k.
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
from flashlin.kernels.gluon_ops import async_load, async_store, barrier


@gluon.jit
def load_strip(ring, states, dstates, q, k, full, table, row, column, i, BT: gl.constexpr, BK: gl.constexpr,
               BV: gl.constexpr):
    """Load strip i of q, of k, and of the chunk's state and its gradient, which begin at row ``table``."""
    ring_h, ring_dh, ring_q, ring_k = ring
    bar = full.index(i % 2)
    mbarrier.expect(bar, 4 * BK * (BV + BT))
    async_load(states, [table + i * BK, 0], bar, ring_h.index(i % 2))
    async_load(dstates, [table + i * BK, 0], bar, ring_dh.index(i % 2))
    async_load(q, [row, column + i * BK], bar, ring_q.index(i % 2))
    async_load(k, [row, column + i * BK], bar, ring_k.index(i % 2))


@described(
    **dict.fromkeys(("do", "u", "dy"), lambda x: (x["HV"] * x["BV"], x["BT"], x["BV"])),
    **dict.fromkeys(("q", "k"), lambda x: (x["H"] * x["K"], x["BT"], x["BK"])),
    **dict.fromkeys(("dq", "dk"), lambda x: (x["HV"] * x["K"], x["BT"], x["BK"])),
    **dict.fromkeys(("states", "dstates"),
                    lambda x: (x["BV"], x["BK"], x["BV"], x["slots"] * x["HV"] * x["K"])))
@gluon.jit(do_not_specialize=["T", "N", "whole", "R", "rows", "entries", "slots", "scale"])
def delta_overlapped_grads(
    do, u, dy, q, k, states, dstates, dq, dk, v, g, betas, G, dv, dbeta, dg, chunk_rows, scale, T, N, whole,
    H, HV, R, rows, entries, slots, K: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
    DECAY: gl.constexpr, FORGOTTEN: gl.constexpr,
):
    """Write dq, dk, dv, dbeta and dg of all chunks, like delta_grads. BV is V.

    dg is zero where g is at most FORGOTTEN, see ``batch.zero_forgotten``.

    The first programs compute the last chunks, whose states were written last and may still be in the L2
    cache. A program reads u and dy before it writes gradients, so dq may share memory with u, and dv with dy.

    do, u, dy: [rows, HV, V], of the dtype of q.
    q, k: [rows, H, K].
    states, dstates: [slots, HV, K, V], one for each chunk.
    dq, dk: [rows, HV, K].
    v: [rows, HV, V].
    g: [rows, HV], fp32, the log decays.
    betas, G: [HV, R], fp32.
    dv: [rows, HV, V].
    dbeta: [rows, HV].
    dg: [rows, HV], fp32.
    chunk_rows: the first rows of the chunks of packed sequences (``packed.whole_chunks``), or None. With
        packed sequences, N is 1.
    T: tokens to compute of each sequence, a multiple of BT.
    N: number of sequences.
    whole: rows between the starts of two sequences; at least T.
    rows: number of rows in the batch.
    entries: entries of states for each sequence, and also of dstates.
    slots: number of entries of states or dstates, the smaller of the two.
    """
    of_pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    of_strip: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_values: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    a_row: gl.constexpr = gl.SliceLayout(1, of_strip)
    a_read: gl.constexpr = gl.SliceLayout(1, of_pairs)
    a_write: gl.constexpr = gl.SliceLayout(0, of_pairs)
    dtype: gl.constexpr = do.dtype
    program = gl.program_id(0)
    i_h = program % HV
    own = program // HV
    n = own % N
    chunk = T // BT - 1 - own // N
    row = n * whole + chunk * BT
    if chunk_rows is not None:
        row = gl.load(chunk_rows + chunk)
        if row < 0:
            return
    table = ((n * entries + chunk) * HV + i_h) * K
    column = i_h // (HV // H) * K
    s_do = gl.allocate_shared_memory(dtype, [BT, BV], do.layout)
    s_u = gl.allocate_shared_memory(dtype, [BT, BV], u.layout)
    s_dy = gl.allocate_shared_memory(dtype, [BT, BV], dy.layout)
    ring_h = gl.allocate_shared_memory(dtype, [2, BK, BV], states.layout)
    ring_dh = gl.allocate_shared_memory(dtype, [2, BK, BV], dstates.layout)
    ring_q = gl.allocate_shared_memory(dtype, [2, BT, BK], q.layout)
    ring_k = gl.allocate_shared_memory(dtype, [2, BT, BK], k.layout)
    pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BT], dtype)
    s_ds = gl.allocate_shared_memory(dtype, [BT, BT], pairs)
    s_z = gl.allocate_shared_memory(dtype, [BT, BT], pairs)
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()
    bar = full.index(2)
    mbarrier.expect(bar, 6 * BT * BV)
    async_load(do, [row, i_h * BV], bar, s_do)
    async_load(u, [row, i_h * BV], bar, s_u)
    async_load(dy, [row, i_h * BV], bar, s_dy)
    ring = (ring_h, ring_dh, ring_q, ring_k)
    for i in gl.static_range(2):
        load_strip(ring, states, dstates, q, k, full, table=table, row=row, column=column, i=i, BT=BT, BK=BK,
                   BV=BV)
    first = row.to(gl.int64) * HV + i_h
    line = i_h.to(gl.int64) * R + row
    tokens = gl.arange(0, BT, gl.SliceLayout(1, of_values)).to(gl.int64)
    at_v = first * BV + tokens[:, None] * (HV * BV) + gl.arange(0, BV, gl.SliceLayout(0, of_values))[None, :]
    b_v = gl.load(v + at_v).to(gl.float32)
    token = gl.arange(0, BT, a_row)
    beta = gl.load(betas + line + token)
    reads, writes = gl.arange(0, BT, a_read), gl.arange(0, BT, a_write)
    entered = gl.zeros([BT], gl.float32, a_row) + 1.0
    left, kept = entered, 1.0
    if DECAY == 2:
        apart = gl.load(G + line + reads)[:, None] - gl.load(G + line + writes)[None, :]
        sums = gl.load(G + line + token)
        total = gl.load(G + line + BT - 1)
        entered, left, kept = gl.exp2(sums), gl.exp2(total - sums), gl.exp2(total)
    # Scores of pairs, and the gradients of v and beta.
    mbarrier.wait(bar, 0)
    none = gl.zeros([BT, BT], gl.float32, of_pairs)
    ds = warpgroup_mma(s_do, s_u.permute((1, 0)), none, use_acc=False, is_async=True)
    z = warpgroup_mma(s_dy, s_u.permute((1, 0)), none, use_acc=False, is_async=True)
    b_y = s_dy.load(of_values).to(gl.float32)
    gl.store(dv + at_v, (b_y * gl.load(betas + line + tokens)[:, None]).to(dv.dtype.element_ty))
    b_dbeta = gl.convert_layout(gl.sum(b_y * b_v, 1), a_row)
    ds, z = warpgroup_mma_wait(0, [ds, z])
    same = gl.convert_layout(gl.sum(gl.where(reads[:, None] == writes[None, :], ds, 0.0), 1) * scale, a_row)
    below = reads[:, None] > writes[None, :]
    if DECAY == 2:
        between = gl.exp2(gl.where(below, apart, float("-inf")))
        ds, z = ds * (between * scale), z * -between
    else:
        ds, z = gl.where(below, ds * scale, 0.0), gl.where(below, -z, 0.0)
    s_ds.store(ds.to(dtype))
    s_z.store(z.to(dtype))
    fence_async_shared()
    barrier()
    of_left: gl.constexpr = gl.DotOperandLayout(0, of_strip, 2)
    of_reader = gl.load(betas + line + gl.arange(0, BT, gl.SliceLayout(0, of_left)))
    scaled = (s_z.permute((1, 0)).load(of_left).to(gl.float32) * of_reader[None, :]).to(dtype)
    here = gl.zeros([BT], gl.float32, a_row)
    passed = gl.zeros([BT], gl.float32, a_row)
    across = gl.zeros([BK], gl.float32, gl.SliceLayout(1, of_values))
    nothing = gl.zeros([BT, BK], gl.float32, of_strip)
    for i in range(K // BK):
        s_h, s_dh, s_q, s_k = (
            ring_h.index(i % 2), ring_dh.index(i % 2), ring_q.index(i % 2), ring_k.index(i % 2))
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        by_q = warpgroup_mma(s_do, s_h.permute((1, 0)), nothing, use_acc=False, is_async=True)
        by_k = warpgroup_mma(s_dy, s_h.permute((1, 0)), nothing, use_acc=False, is_async=True)
        to_h = warpgroup_mma(s_u, s_dh.permute((1, 0)), nothing, use_acc=False, is_async=True)
        across += gl.sum(s_h.load(of_values).to(gl.float32) * s_dh.load(of_values).to(gl.float32), 1)
        b_q, b_k = s_q.load(of_strip).to(gl.float32), s_k.load(of_strip).to(gl.float32)
        by_q, by_k, to_h = warpgroup_mma_wait(0, [by_q, by_k, to_h])
        to_h *= left[:, None]
        passed += gl.sum(b_k * to_h, 1)
        by_q = warpgroup_mma(s_ds, s_k, by_q * (entered * scale)[:, None], is_async=True)
        by_k = warpgroup_mma(s_z, s_k, by_k * -entered[:, None], is_async=True)
        back = warpgroup_mma(s_ds.permute((1, 0)), s_q, nothing, use_acc=False, is_async=True)
        back = warpgroup_mma(scaled, s_k, back, is_async=True)
        by_q, by_k, back = warpgroup_mma_wait(0, [by_q, by_k, back])
        b_dbeta += gl.sum(b_k * by_k, 1)
        by_k *= beta[:, None]
        here += gl.sum(b_q * by_q + b_k * (by_k - back), 1)
        barrier()  # all warps must have read the strip
        s_q.store((by_q + same[:, None] * b_k).to(dtype))
        s_k.store((to_h + by_k + back + same[:, None] * b_q).to(dtype))
        fence_async_shared()
        barrier()
        async_store(dq, [row, i_h * K + i * BK], s_q)
        async_store(dk, [row, i_h * K + i * BK], s_k)
        if i + 2 < K // BK:
            tma.store_wait(0)
            load_strip(ring, states, dstates, q, k, full, table=table, row=row, column=column, i=i + 2, BT=BT,
                       BK=BK, BV=BV)
    gl.store(dbeta + first + token.to(gl.int64) * HV, b_dbeta)
    if DECAY == 2:
        here, passed = gl.convert_layout(here, a_read), gl.convert_layout(passed, a_read)
        of_token = gl.sum(gl.where(reads[:, None] >= writes[None, :], here[:, None], passed[:, None]), 0)
        at_g = first + writes.to(gl.int64) * HV
        of_token = gl.where(gl.load(g + at_g) <= FORGOTTEN, 0.0, of_token + gl.sum(across, 0) * kept)
        gl.store(dg + at_g, of_token)
    tma.store_wait(0)
