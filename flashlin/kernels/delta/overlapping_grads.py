"""The gradients of ``backward.py`` for Hopper, in Gluon, with one program for each pair of chunks and head.

The tables have one state for each pair: the state h that enters its first chunk, and the gradient dh of the
state that leaves its second chunk. A program has two groups of four warps, one for each chunk. Each group also
computes the state that the other one needs (``passed_on``):

    first group: the state between the chunks, e^{G_L} h + (u e^{G_L - G})^T k
    second group: its gradient, e^{G_L} dh + (do scale e^G)^T q - (dy beta e^G)^T k

A separate warp loads the rows do, u and dy with TMA, and then strips of BK channels of h, dh, q and k into a ring
buffer of two slots. dq and dk are stored from the shared memory that held q and k.

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
from flashlin.kernels.gluon_ops import async_load, async_store, barrier, barriers


@gluon.jit
def load_pair(reads, rows_of, rings, ready, full, empty, place, K: gl.constexpr, BT: gl.constexpr,
              BK: gl.constexpr, BV: gl.constexpr):
    """Load the rows of both chunks, and then all strips; this is the program of the loading warp.

    place: the first row of each chunk; the columns of the head in do, u and dy, and in q and k; and the row of
    the tables where the pair begins.
    """
    do, u, dy, q, k, states, dstates = reads
    ring_h, ring_dh, ring_q, ring_k = rings
    row_a, row_b, v_column, column, table = place
    for group in gl.static_range(2):
        row = row_a if group == 0 else row_b
        bar = ready.index(group)
        mbarrier.expect(bar, 6 * BT * BV)
        async_load(do, [row, v_column], bar, rows_of.index(3 * group))
        async_load(u, [row, v_column], bar, rows_of.index(3 * group + 1))
        async_load(dy, [row, v_column], bar, rows_of.index(3 * group + 2))
    for i in range(K // BK):
        slot = i % 2
        mbarrier.wait(empty.index(slot), ((i // 2) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 4 * BK * BV + 8 * BK * BT)
        async_load(states, [table + i * BK, 0], bar, ring_h.index(slot))
        async_load(dstates, [table + i * BK, 0], bar, ring_dh.index(slot))
        for group in gl.static_range(2):
            row = row_a if group == 0 else row_b
            async_load(q, [row, column + i * BK], bar, ring_q.index(2 * slot + group))
            async_load(k, [row, column + i * BK], bar, ring_k.index(2 * slot + group))


@gluon.jit
def passed_on(group: gl.constexpr, state, rows, scaled_of, q, k, factors, kept):
    """Return the strip of the state, or of its gradient, that the other chunk needs, transposed: [V, BK].

    state: the strip of h or dh. rows: do, u and dy. scaled_of: two buffers for the right operands. q, k: [BT, BK],
    float32. factors: scale e^G, e^{G_L - G} and beta e^G of each row.
    """
    s_do, s_u, s_dy = rows
    BK: gl.constexpr = state.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    entered, left, written = factors
    dtype: gl.constexpr = s_u.dtype
    if group == 0:
        scaled_of.index(0).store((k * left[:, None]).to(dtype))
    else:
        scaled_of.index(0).store((q * entered[:, None]).to(dtype))
        scaled_of.index(1).store((k * -written[:, None]).to(dtype))
    made = state.permute((1, 0)).load(layout).to(gl.float32) * kept
    fence_async_shared()
    barrier()  # all warps must have written the right operands
    if group == 0:
        made = warpgroup_mma(s_u.permute((1, 0)), scaled_of.index(0), made, is_async=True)
    else:
        made = warpgroup_mma(s_do.permute((1, 0)), scaled_of.index(0), made, is_async=True)
        made = warpgroup_mma(s_dy.permute((1, 0)), scaled_of.index(1), made, is_async=True)
    return warpgroup_mma_wait(0, [made])


@gluon.jit
def grads_of(group: gl.constexpr, tensors, memory, bars, place, H, HV, R, scale, K: gl.constexpr,
             BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, DECAY: gl.constexpr):
    """Compute the gradients of one chunk of the pair; this is the program of a group of four warps.

    place: its first row; whether the chunk exists; the head; and its column in dq and dk. If there is no second
    chunk, the second group computes with the rows of the first one. It then passes dh on unchanged, and stores
    nothing.
    """
    dq, dk, v, betas, G, dv, dbeta, dg = tensors
    rows_of, ring_h, ring_dh, ring_q, ring_k, pairs_of, made_of, scaled_of = memory
    ready, full, empty, given, taken = bars
    row, exists, i_h, column = place
    of_pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    of_strip: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_values: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    a_row: gl.constexpr = gl.SliceLayout(1, of_strip)
    a_read: gl.constexpr = gl.SliceLayout(1, of_pairs)
    a_write: gl.constexpr = gl.SliceLayout(0, of_pairs)
    dtype: gl.constexpr = rows_of.dtype
    s_do, s_u, s_dy = rows_of.index(3 * group), rows_of.index(3 * group + 1), rows_of.index(3 * group + 2)
    s_ds, s_z = pairs_of.index(2 * group), pairs_of.index(2 * group + 1)
    own_scaled = scaled_of[0] if group == 0 else scaled_of[1]
    first = row.to(gl.int64) * HV + i_h
    line = i_h.to(gl.int64) * R + row
    tokens = gl.arange(0, BT, gl.SliceLayout(1, of_values)).to(gl.int64)
    at_v = first * BV + tokens[:, None] * (HV * BV) + gl.arange(0, BV, gl.SliceLayout(0, of_values))[None, :]
    b_v = gl.load(v + at_v)
    token = gl.arange(0, BT, a_row)
    beta = gl.load(betas + line + token)
    reads, writes = gl.arange(0, BT, a_read), gl.arange(0, BT, a_write)
    entered = gl.zeros([BT], gl.float32, a_row) + 1.0
    left, kept = entered, 1.0
    if DECAY == 2:
        sums = gl.load(G + line + token)
        total = gl.load(G + line + BT - 1)
        entered, left, kept = gl.exp2(sums), gl.exp2(total - sums), gl.exp2(total)
    factors = (entered * scale, left, entered * beta)
    passes = kept
    if group == 1:
        factors = (gl.where(exists, entered * scale, 0.0), left, gl.where(exists, entered * beta, 0.0))
        passes = gl.where(exists, kept, 1.0)
    # Scores of pairs, and the gradients of v and beta.
    mbarrier.wait(ready.index(group), 0)
    b_y = s_dy.load(of_values).to(gl.float32)
    gl.store(dv + at_v, (b_y * gl.load(betas + line + tokens)[:, None]).to(dv.dtype.element_ty), mask=exists)
    b_dbeta = gl.convert_layout(gl.sum(b_y * b_v.to(gl.float32), 1), a_row)
    none = gl.zeros([BT, BT], gl.float32, of_pairs)
    ds = warpgroup_mma(s_do, s_u.permute((1, 0)), none, use_acc=False, is_async=True)
    z = warpgroup_mma(s_dy, s_u.permute((1, 0)), none, use_acc=False, is_async=True)
    ds, z = warpgroup_mma_wait(0, [ds, z])
    same = gl.convert_layout(gl.sum(gl.where(reads[:, None] == writes[None, :], ds, 0.0), 1) * scale, a_row)
    below = reads[:, None] > writes[None, :]
    if DECAY == 2:
        apart = gl.load(G + line + reads)[:, None] - gl.load(G + line + writes)[None, :]
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
        slot = i % 2
        s_q, s_k = ring_q.index(2 * slot + group), ring_k.index(2 * slot + group)
        mbarrier.wait(full.index(slot), (i // 2) & 1)
        b_q, b_k = s_q.load(of_strip).to(gl.float32), s_k.load(of_strip).to(gl.float32)
        if group == 0:
            made = passed_on(0, ring_h.index(slot), (s_do, s_u, s_dy), own_scaled, b_q, b_k, factors, passes)
        else:
            made = passed_on(1, ring_dh.index(slot), (s_do, s_u, s_dy), own_scaled, b_q, b_k, factors, passes)
        mbarrier.wait(taken.index(group), (i & 1) ^ 1)
        made_of.index(group).permute((1, 0)).store(made.to(dtype))
        fence_async_shared()
        barrier()  # all warps must have written before one thread signals
        mbarrier.arrive(given.index(group), count=1)
        mbarrier.wait(given.index(1 - group), i & 1)
        s_h = ring_h.index(slot) if group == 0 else made_of.index(0)
        s_dh = made_of.index(1) if group == 0 else ring_dh.index(slot)
        by_q = warpgroup_mma(s_do, s_h.permute((1, 0)), nothing, use_acc=False, is_async=True)
        by_k = warpgroup_mma(s_dy, s_h.permute((1, 0)), nothing, use_acc=False, is_async=True)
        to_h = warpgroup_mma(s_u, s_dh.permute((1, 0)), nothing, use_acc=False, is_async=True)
        across += gl.sum(s_h.load(of_values).to(gl.float32) * s_dh.load(of_values).to(gl.float32), 1)
        by_q, by_k, to_h = warpgroup_mma_wait(0, [by_q, by_k, to_h])
        barrier()  # all warps must have read the other group's strip
        mbarrier.arrive(taken.index(1 - group), count=1)
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
        if exists:
            async_store(dq, [row, column + i * BK], s_q)
            async_store(dk, [row, column + i * BK], s_k)
        tma.store_wait(0)
        mbarrier.arrive(empty.index(slot), count=1)
    gl.store(dbeta + first + token.to(gl.int64) * HV, b_dbeta, mask=exists)
    if DECAY == 2:
        here, passed = gl.convert_layout(here, a_read), gl.convert_layout(passed, a_read)
        of_token = gl.sum(gl.where(reads[:, None] >= writes[None, :], here[:, None], passed[:, None]), 0)
        gl.store(dg + first + writes.to(gl.int64) * HV, of_token + gl.sum(across, 0) * kept, mask=exists)


@described(
    **dict.fromkeys(("do", "u", "dy"), lambda x: (x["HV"] * x["BV"], x["BT"], x["BV"])),
    **dict.fromkeys(("q", "k"), lambda x: (x["H"] * x["K"], x["BT"], x["BK"])),
    **dict.fromkeys(("dq", "dk"), lambda x: (x["HV"] * x["K"], x["BT"], x["BK"])),
    **dict.fromkeys(("states", "dstates"),
                    lambda x: (x["BV"], x["BK"], x["BV"], x["slots"] * x["HV"] * x["K"])))
@gluon.jit(do_not_specialize=["T", "N", "whole", "R", "rows", "entries", "slots", "scale"])
def delta_overlapped_grads(
    do, u, dy, q, k, states, dstates, dq, dk, v, betas, G, dv, dbeta, dg, scale, T, N, whole, H, HV, R, rows,
    entries, slots, K: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
    DECAY: gl.constexpr,
):
    """Write dq, dk, dv, dbeta and dg of all chunks, like delta_grads. BV is V.

    The first programs compute the last chunks, whose states were written last and may still be in the L2
    cache. A program reads u and dy before it writes gradients, so dq may share memory with u, and dv with dy.

    do, u, dy: [rows, HV, V], of the dtype of q.
    q, k: [rows, H, K].
    states, dstates: [slots, HV, K, V], one for each pair of chunks.
    dq, dk: [rows, HV, K].
    v: [rows, HV, V].
    betas, G: [HV, R], fp32.
    dv: [rows, HV, V].
    dbeta: [rows, HV].
    dg: [rows, HV], fp32.
    T: tokens to compute of each sequence, a multiple of BT.
    N: number of sequences.
    whole: rows from a sequence to the next, at least T.
    rows: number of rows in the batch.
    entries: entries of states for each sequence, and also of dstates.
    slots: number of entries of states or dstates, the smaller of both.
    """
    dtype: gl.constexpr = do.dtype
    program = gl.program_id(0)
    i_h = program % HV
    own = program // HV
    n = own % N
    chunks = T // BT
    pair = (chunks + 1) // 2 - 1 - own // N
    row_a = n * whole + pair * 2 * BT
    exists = pair * 2 + 1 < chunks
    row_b = gl.where(exists, row_a + BT, row_a)
    rows_of = gl.allocate_shared_memory(dtype, [6, BT, BV], do.layout)
    ring_h = gl.allocate_shared_memory(dtype, [2, BK, BV], states.layout)
    ring_dh = gl.allocate_shared_memory(dtype, [2, BK, BV], dstates.layout)
    ring_q = gl.allocate_shared_memory(dtype, [4, BT, BK], q.layout)
    ring_k = gl.allocate_shared_memory(dtype, [4, BT, BK], k.layout)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BT], dtype)
    pairs_of = gl.allocate_shared_memory(dtype, [4, BT, BT], square)
    made_of = gl.allocate_shared_memory(dtype, [2, BK, BV], states.layout)
    scaled_of = (gl.allocate_shared_memory(dtype, [1, BT, BK], q.layout),
                 gl.allocate_shared_memory(dtype, [2, BT, BK], q.layout))
    ready, _ = barriers(2, 1, 1)
    full, empty = barriers(2, 1, 2)
    given, taken = barriers(2, 1, 1)
    tensors = (dq, dk, v, betas, G, dv, dbeta, dg)
    memory = (rows_of, ring_h, ring_dh, ring_q, ring_k, pairs_of, made_of, scaled_of)
    bars = (ready, full, empty, given, taken)
    column, table = i_h * K, ((n * entries + pair) * HV + i_h) * K
    reads, rings = (do, u, dy, q, k, states, dstates), (ring_h, ring_dh, ring_q, ring_k)
    place = (row_a, row_b, i_h * BV, i_h // (HV // H) * K, table)
    gl.warp_specialize(
        [(grads_of, (0, tensors, memory, bars, (row_a, pair >= 0, i_h, column), H, HV, R, scale, K, BT, BK, BV,
                     DECAY)),
         (grads_of, (1, tensors, memory, bars, (row_b, exists, i_h, column), H, HV, R, scale, K, BT, BK, BV,
                     DECAY)),
         (load_pair, (reads, rows_of, rings, ready, full, empty, place, K, BT, BK, BV))], [4, 1], [232, 40])
