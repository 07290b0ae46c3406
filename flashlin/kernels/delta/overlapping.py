"""The forward scan of ``forward.py`` for Hopper, in Gluon: loads, products and stores overlap.

This module is imported only if a plan uses its kernel, because Gluon came with Triton 3.5.

A chunk needs a chain of three products: k h, A y, and the update of the state. All matrices are transposed
here, so that the result of each product is in registers as the left operand of the next one:

    y^T = (v^T - h^T k^T e^G) beta
    u^T = y^T A^T
    o^T = scale (h^T q^T e^G + u^T s^T)
    h^T = e^{G_L} h^T + (u^T e^{G_L - G}) k

A group of four warps multiplies 64 rows at a time. After transposition these are columns of v, so a program
has one group for each 64 of its columns. Two groups share q, k and A, and one multiplies while the other does
other work. A separate warp loads the next chunks with TMA into a ring buffer of STAGES slots. It also
computes the factors for beta and the decays, and stores them as rows of shared memory (``lines``). The kernel
supports only whole chunks of dense sequences (``recipe.py``).
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
def load(ring, q, k, v, A, betas, G, line, row0, qk_column, v_column, A_column, chunks, BT: gl.constexpr,
         BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr, LINES: gl.constexpr, DECAY: gl.constexpr,
         STAGES: gl.constexpr):
    """Load all chunks of a program into the ring buffer; this is the program of the loading warp.

    Chunk i goes to slot i % STAGES, as soon as all groups have finished with this slot. The slot is full when
    its TMA transfers have arrived and its rows of ``lines`` are written. These rows are beta and, with
    decays, G_i, 2^{G_i}, 2^{G_L - G_i} and 2^{G_L}, where G is the cumulative log2 decay.
    line: offset of the program's first token in betas and G.
    """
    ring_q, ring_k, ring_v, ring_A, lines, full, empty = ring
    tokens = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [1], [0]))
    for i in range(chunks):
        slot = i % STAGES
        row = row0 + i * BT
        at = line + i * BT
        beta = gl.load(betas + at + tokens)  # loads overlap the wait for an empty slot
        if DECAY == 2:
            sums = gl.load(G + at + tokens)
            total = gl.load(G + at + BT - 1 + 0 * tokens)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        if q is not None:
            mbarrier.expect(bar, 2 * BT * (2 * BK + BT + GROUPS * BV))
        else:
            mbarrier.expect(bar, 2 * BT * (BK + BT + GROUPS * BV))
        async_load(k, [row, qk_column], bar, ring_k.index(slot))
        if q is not None:
            async_load(q, [row, qk_column], bar, ring_q.index(slot))
        for group in gl.static_range(GROUPS):
            async_load(v, [row, v_column + group * BV], bar, ring_v.index(slot * GROUPS + group))
        async_load(A, [row, A_column], bar, ring_A.index(slot))
        first = slot * LINES
        lines.index(first).store(beta)
        if DECAY == 2:
            lines.index(first + 1).store(sums)
            lines.index(first + 2).store(gl.exp2(sums))
            lines.index(first + 3).store(gl.exp2(total - sums))
            lines.index(first + 4).store(gl.exp2(total))
        barrier()  # all lanes must have written before one signals
        mbarrier.arrive(bar, count=1)


@gluon.jit
def multiply(ring, o, h0, ht, weights_of, o_of, entering, leaving, row0, v0, v_column, chunks, scale,
             group: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
             GROUPS: gl.constexpr, LINES: gl.constexpr, DECAY: gl.constexpr, HAS_H0: gl.constexpr,
             HAS_HT: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr):
    """Compute all chunks for BV columns of the state; this is the program of a group of four warps.

    v0: first column of the program in a state. v_column: its first column in v and o. entering: number of the
    initial state in h0. leaving: number of the final state in ht, or negative if it is not needed.
    """
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    a_row: gl.constexpr = gl.SliceLayout(1, of_chunk)
    a_column: gl.constexpr = gl.SliceLayout(0, of_chunk)
    ring_q, ring_k, ring_v, ring_A, lines, full, empty = ring
    dtype: gl.constexpr = ring_k.dtype
    s_weights, s_o = weights_of.index(group), o_of.index(group)
    v0 += group * BV
    v_column += group * BV
    causal = gl.arange(0, BT, a_row)[:, None] >= gl.arange(0, BT, a_column)[None, :]
    if HAS_H0:
        h = gl.load(state_tile(h0, entering, v0, 0, of_state, BK, V, BV, V_FIRST)).to(gl.float32)
    else:
        h = gl.zeros([BV, BK], gl.float32, of_state)
    none = gl.zeros([BT, BT], gl.float32, of_chunk)
    nothing = gl.zeros([BV, BT], gl.float32, of_chunk)
    entered = gl.convert_layout(h.to(dtype), left)
    for i in range(chunks):
        slot = i % STAGES
        b_q, b_k, line = ring_q.index(slot), ring_k.index(slot), slot * LINES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        hk = warpgroup_mma(entered, b_k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma(b_q, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        hk = warpgroup_mma_wait(1, [hk])
        y = ring_v.index(slot * GROUPS + group).permute((1, 0)).load(of_chunk).to(gl.float32)
        if DECAY == 0:
            y = y - hk
        else:
            y = y - hk * lines.index(line + 2).load(a_column)[None, :]
        y = y * lines.index(line).load(a_column)[None, :]
        y = gl.convert_layout(y.to(dtype), left)
        u = warpgroup_mma(y, ring_A.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        if DECAY == 0:
            weights = gl.where(causal, scores * scale, 0.0)
        else:
            of_row = lines.index(line + 1).load(a_row)
            of_column = lines.index(line + 1).load(a_column)
            apart = gl.where(causal, of_row[:, None] - of_column[None, :], float("-inf"))
            weights = scores * (gl.exp2(apart) * scale)
        s_weights.store(weights.to(dtype))
        fence_async_shared()
        # This product starts only now, because its accumulators and those of the scores together do not fit
        # in registers.
        out = warpgroup_mma(entered, b_q.permute((1, 0)), nothing, use_acc=False, is_async=True)
        u = warpgroup_mma_wait(1, [u])
        w = u
        if DECAY == 2:
            w = u * lines.index(line + 3).load(a_column)[None, :]
            h = h * lines.index(line + 4).load(gl.SliceLayout(1, of_state))[:, None]
        h = warpgroup_mma(gl.convert_layout(w.to(dtype), left_of_state), b_k, h, is_async=True)
        out = warpgroup_mma_wait(1, [out])
        if DECAY == 0:
            out = out * scale
        else:
            out = out * (lines.index(line + 2).load(a_column) * scale)[None, :]
        u = gl.convert_layout(u.to(dtype), left)
        out = warpgroup_mma(u, s_weights.permute((1, 0)), out, is_async=True)
        h = warpgroup_mma_wait(1, [h])
        entered = gl.convert_layout(h.to(dtype), left)
        out = warpgroup_mma_wait(0, [out])
        tma.store_wait(0)
        s_o.permute((1, 0)).store(out.to(s_o.dtype))
        fence_async_shared()
        async_store(o, [row0 + i * BT, v_column], s_o)
        barrier()  # all warps must have read the slot before one thread signals
        mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(0)
    if HAS_HT:
        if leaving >= 0:
            zero = gl.minimum(chunks, 0)  # a known 0 would make the compiler keep h0's addresses until here
            gl.store(state_tile(ht, leaving, v0, zero, of_state, BK, V, BV, V_FIRST), h)


@gluon.jit
def restore(ring, u, states, h0, u_of, states_of, entering, row0, table, step, v0, v_column, chunks,
            group: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
            GROUPS: gl.constexpr, LINES: gl.constexpr, DECAY: gl.constexpr, HAS_H0: gl.constexpr,
            V_FIRST: gl.constexpr, STAGES: gl.constexpr):
    """Recompute u and the states that enter the chunks; this is the program of a group of four warps.

    table: row of states where the entry of the program's first chunk begins. step: rows from the entry of one
    chunk to the next.
    """
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    a_column: gl.constexpr = gl.SliceLayout(0, of_chunk)
    ring_q, ring_k, ring_v, ring_A, lines, full, empty = ring
    dtype: gl.constexpr = ring_k.dtype
    s_u, s_state = u_of.index(group), states_of.index(group)
    v0 += group * BV
    v_column += group * BV
    if HAS_H0:
        h = gl.load(state_tile(h0, entering, v0, 0, of_state, BK, V, BV, V_FIRST)).to(gl.float32)
    else:
        h = gl.zeros([BV, BK], gl.float32, of_state)
    nothing = gl.zeros([BV, BT], gl.float32, of_chunk)
    for i in range(chunks):
        slot = i % STAGES
        b_k, line = ring_k.index(slot), slot * LINES
        entered = h.to(dtype)
        tma.store_wait(1)  # the buffer of the last state is free now; that of u may not be
        s_state.permute((1, 0)).store(entered)
        fence_async_shared()
        async_store(states, [table + i * step, v0], s_state)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        hk = warpgroup_mma(gl.convert_layout(entered, left), b_k.permute((1, 0)), nothing, use_acc=False,
                           is_async=True)
        y = ring_v.index(slot * GROUPS + group).permute((1, 0)).load(of_chunk).to(gl.float32)
        hk = warpgroup_mma_wait(0, [hk])
        if DECAY == 0:
            y = y - hk
        else:
            y = y - hk * lines.index(line + 2).load(a_column)[None, :]
        y = y * lines.index(line).load(a_column)[None, :]
        u_t = warpgroup_mma(gl.convert_layout(y.to(dtype), left), ring_A.index(slot).permute((1, 0)), nothing,
                            use_acc=False, is_async=True)
        if DECAY == 2:
            h = h * lines.index(line + 4).load(gl.SliceLayout(1, of_state))[:, None]
        u_t = warpgroup_mma_wait(0, [u_t])
        w = u_t
        if DECAY == 2:
            w = u_t * lines.index(line + 3).load(a_column)[None, :]
        h = warpgroup_mma(gl.convert_layout(w.to(dtype), left_of_state), b_k, h, is_async=True)
        tma.store_wait(1)  # the buffer of the last u is free now; that of the state may not be
        s_u.permute((1, 0)).store(u_t.to(dtype))
        fence_async_shared()
        async_store(u, [row0 + i * BT, v_column], s_u)
        h = warpgroup_mma_wait(0, [h])
        barrier()  # all warps must have read the slot before one thread signals
        mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(0)


@described(
    k=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    v=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]),
    A=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    u=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]),
    states=lambda x: (x["V"], x["BK"], x["BV"], x["slots"] * x["HV"] * x["BK"]))
@gluon.jit(do_not_specialize=["T", "R", "L", "rows", "slots"])
def delta_overlapped_states(
    k,  # [rows, H, K]
    v,  # [rows, HV, V]
    A,  # [rows, HV, BT]
    betas, G,  # [HV, R], fp32
    h0,  # [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K]
    u,  # [rows, HV, V]
    states,  # [slots, HV, K, V], one for each chunk
    undivided,  # [N, HV], int32, or None
    T,  # tokens of a sequence, a multiple of BT
    H, HV, R, L,
    rows,  # number of rows in the batch
    slots,  # number of entries of states
    V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, DECAY: gl.constexpr, HAS_H0: gl.constexpr, V_FIRST: gl.constexpr,
):
    """Recompute u and the states before the chunks in Gluon, for backward, like delta_states.

    One program computes GROUPS (1 or 2) times BV columns of the state of one head. BK is K.
    """
    LINES: gl.constexpr = 5 if DECAY == 2 else 1
    dtype: gl.constexpr = k.dtype
    v0, i_h, n, row0, chunks, own, leaving = own_rows(undivided, T, HV, L, V, GROUPS * BV, BT, False)
    line = i_h.to(gl.int64) * R + row0
    table = ((row0 // BT + n) * HV + i_h) * BK
    ring_k = gl.allocate_shared_memory(dtype, [STAGES, BT, BK], k.layout)
    ring_v = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, BT, BV], v.layout)
    ring_A = gl.allocate_shared_memory(dtype, [STAGES, BT, BT], A.layout)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES * LINES, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = gl.allocate_shared_memory(dtype, [GROUPS, BT, BV], u.layout)
    entered = gl.allocate_shared_memory(dtype, [GROUPS, BK, BV], states.layout)
    full, empty = barriers(STAGES, 2, GROUPS)
    ring = (ring_k, ring_k, ring_v, ring_A, lines, full, empty)
    qk_column = i_h // (HV // H) * BK
    v_column, step = i_h * V + v0, HV * BK
    if GROUPS == 1:
        gl.warp_specialize(
            [(restore, (ring, u, states, h0, written, entered, own, row0, table, step, v0, v_column, chunks, 0,
                        BT, BK, V, BV, GROUPS, LINES, DECAY, HAS_H0, V_FIRST, STAGES)),
             (load, (ring, None, k, v, A, betas, G, line, row0, qk_column, v_column, i_h * BT, chunks, BT, BK,
                     BV, GROUPS, LINES, DECAY, STAGES))],
            [1], [40])
    else:
        gl.warp_specialize(
            [(restore, (ring, u, states, h0, written, entered, own, row0, table, step, v0, v_column, chunks, 0,
                        BT, BK, V, BV, GROUPS, LINES, DECAY, HAS_H0, V_FIRST, STAGES)),
             (restore, (ring, u, states, h0, written, entered, own, row0, table, step, v0, v_column, chunks, 1,
                        BT, BK, V, BV, GROUPS, LINES, DECAY, HAS_H0, V_FIRST, STAGES)),
             (load, (ring, None, k, v, A, betas, G, line, row0, qk_column, v_column, i_h * BT, chunks, BT, BK,
                     BV, GROUPS, LINES, DECAY, STAGES))],
            [4, 1], [232, 40])


@described(
    q=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    k=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    v=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]),
    A=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    o=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]))
@gluon.jit(do_not_specialize=["T", "R", "L", "rows", "scale"])
def delta_overlapped(
    q, k,  # [rows, H, K]
    v,  # [rows, HV, V]
    A,  # [rows, HV, BT]
    betas, G,  # [HV, R], fp32
    h0,  # [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K]
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
    """Run the forward scan in Gluon: write the outputs o and the final states ht, like delta_scan.

    One program computes GROUPS (1 or 2) times BV columns of the state of one head. BK is K.
    """
    LINES: gl.constexpr = 5 if DECAY == 2 else 1
    dtype: gl.constexpr = q.dtype
    v0, i_h, n, row0, chunks, own, leaving = own_rows(undivided, T, HV, L, V, GROUPS * BV, BT, False)
    line = i_h.to(gl.int64) * R + row0
    ring_q = gl.allocate_shared_memory(dtype, [STAGES, BT, BK], q.layout)
    ring_k = gl.allocate_shared_memory(dtype, [STAGES, BT, BK], k.layout)
    ring_v = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, BT, BV], v.layout)
    ring_A = gl.allocate_shared_memory(dtype, [STAGES, BT, BT], A.layout)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES * LINES, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weights = gl.allocate_shared_memory(dtype, [GROUPS, BT, BT], A.layout)
    written = gl.allocate_shared_memory(o.dtype, [GROUPS, BT, BV], o.layout)
    full, empty = barriers(STAGES, 2, GROUPS)
    ring = (ring_q, ring_k, ring_v, ring_A, lines, full, empty)
    qk_column = i_h // (HV // H) * BK
    v_column = i_h * V + v0
    # With two groups, each thread has 168 registers at entry. Registers are assigned to four warps at a time.
    # The four that include the loading warp keep 40 per thread, so the two groups get 232.
    if GROUPS == 1:
        gl.warp_specialize(
            [(multiply, (ring, o, h0, ht, weights, written, own, leaving, row0, v0, v_column, chunks, scale,
                         0, BT, BK, V, BV, GROUPS, LINES, DECAY, HAS_H0, HAS_HT, V_FIRST, STAGES)),
             (load, (ring, q, k, v, A, betas, G, line, row0, qk_column, v_column, i_h * BT, chunks, BT, BK,
                     BV, GROUPS, LINES, DECAY, STAGES))],
            [1], [40])
    else:
        gl.warp_specialize(
            [(multiply, (ring, o, h0, ht, weights, written, own, leaving, row0, v0, v_column, chunks, scale,
                         0, BT, BK, V, BV, GROUPS, LINES, DECAY, HAS_H0, HAS_HT, V_FIRST, STAGES)),
             (multiply, (ring, o, h0, ht, weights, written, own, leaving, row0, v0, v_column, chunks, scale,
                         1, BT, BK, V, BV, GROUPS, LINES, DECAY, HAS_H0, HAS_HT, V_FIRST, STAGES)),
             (load, (ring, q, k, v, A, betas, G, line, row0, qk_column, v_column, i_h * BT, chunks, BT, BK,
                     BV, GROUPS, LINES, DECAY, STAGES))],
            [4, 1], [232, 40])
