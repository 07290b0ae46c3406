"""The forward scan of ``forward.py`` for Hopper, in Gluon: loads, products and stores overlap.

This module is imported only if a plan uses a Gluon kernel of this family, because Gluon came with Triton 3.5.

A chunk needs a chain of three products: k h, A y, and the update of the state. All matrices are transposed
here, so that the result of each product is in registers as the left operand of the next one:

    y^T = (v^T - h^T k^T e^G) beta
    u^T = y^T A^T
    o^T = scale (h^T q^T e^G + u^T s^T)
    h^T = e^{G_L} h^T + (u^T e^{G_L - G}) k

A group of four warps multiplies 64 rows at a time. After transposition these are columns of v, so a program
has one group for each 64 of its columns. Two groups share q, k and A, and one multiplies while the other does
other work. The first group computes s, the scores of q and k with their decays, for both. The barriers
``scored`` and ``used`` guard the two buffers of s. A separate warp loads the next chunks with TMA into a ring
buffer of STAGES slots. It also computes the factors for beta and the decays, and stores them as rows of
shared memory (``lines``). The kernel supports only whole chunks of dense sequences (``recipe.py``).

Backward uses the same kernel without q, to restore the states that enter the chunks, and u (RESTORE).
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
from flashlin.kernels.gluon_ops import (
    async_load,
    async_store,
    barrier,
    barriers,
    own_rows,
    packed_rows,
    state_tile,
)


@gluon.jit
def ring_of(q, k, v, A, A_low, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
            STAGES: gl.constexpr, DECAY: gl.constexpr):
    """Return the buffers of a ring with STAGES slots, and its barriers, for ``load``."""
    LINES: gl.constexpr = 5 if DECAY == 2 else 1
    ring_k = gl.allocate_shared_memory(k.dtype, [STAGES, BT, BK], k.layout)
    ring_A = gl.allocate_shared_memory(k.dtype, [STAGES, BT, BT], A.layout)
    ring_q, ring_low = ring_k, ring_A  # placeholders
    if q is not None:
        ring_q = gl.allocate_shared_memory(k.dtype, [STAGES, BT, BK], q.layout)
    if A_low is not None:
        ring_low = gl.allocate_shared_memory(k.dtype, [STAGES, BT, BT], A_low.layout)
    ring_v = gl.allocate_shared_memory(k.dtype, [STAGES * GROUPS, BT, BV], v.layout)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES * LINES, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES, 2, GROUPS)
    return ring_q, ring_k, ring_v, ring_A, ring_low, lines, full, empty


@gluon.jit
def load(ring, reads, row0, line, columns, chunks, GROUPS: gl.constexpr, DECAY: gl.constexpr,
         REVERSE: gl.constexpr):
    """Load all chunks of a program into the ring buffer; this is the program of the loading warp.

    Chunk i goes to slot i % STAGES, as soon as all groups have finished with this slot. The slot is full when
    its TMA transfers have arrived and its rows of ``lines`` are written. These rows are beta and, with
    decays, G_i, 2^{G_i}, 2^{G_L - G_i} and 2^{G_L}, where G is the cumulative log2 decay.

    reads: the tuple q, k, v, A, A_low, betas, G, in which q and A_low may be None.
    line: offset of the program's first token in betas and G.
    columns: the program's first columns in q and k, in v, and in A. REVERSE: begin with the last chunk.
    """
    q, k, v, A, A_low, betas, G = reads
    ring_q, ring_k, ring_v, ring_A, ring_low, lines, full, empty = ring
    qk_column, v_column, A_column = columns
    STAGES: gl.constexpr = ring_k.shape[0]
    BT: gl.constexpr = ring_k.shape[1]
    BV: gl.constexpr = ring_v.shape[2]
    BK: gl.constexpr = ring_k.shape[2]
    ROW: gl.constexpr = (1 if q is None else 2) * BK + (1 if A_low is None else 2) * BT + GROUPS * BV
    tokens = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [1], [0]))
    for i in range(chunks):
        slot = i % STAGES
        t0 = i * BT
        if REVERSE:
            t0 = (chunks - 1 - i) * BT
        row = row0 + t0
        beta = gl.load(betas + line + t0 + tokens)  # loads overlap the wait for an empty slot
        if DECAY == 2:
            sums = gl.load(G + line + t0 + tokens)
            total = gl.load(G + line + t0 + BT - 1 + 0 * tokens)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * BT * ROW)
        async_load(k, [row, qk_column], bar, ring_k.index(slot))
        if q is not None:
            async_load(q, [row, qk_column], bar, ring_q.index(slot))
        for group in gl.static_range(GROUPS):
            async_load(v, [row, v_column + group * BV], bar, ring_v.index(slot * GROUPS + group))
        async_load(A, [row, A_column], bar, ring_A.index(slot))
        if A_low is not None:
            async_load(A_low, [row, A_column], bar, ring_low.index(slot))
        first = slot * (5 if DECAY == 2 else 1)
        lines.index(first).store(beta)
        if DECAY == 2:
            lines.index(first + 1).store(sums)
            lines.index(first + 2).store(gl.exp2(sums))
            lines.index(first + 3).store(gl.exp2(total - sums))
            lines.index(first + 4).store(gl.exp2(total))
        barrier()  # all lanes must have written before one signals
        mbarrier.arrive(bar, count=1)


@gluon.jit
def multiply(group: gl.constexpr, ring, work, place, V: gl.constexpr, GROUPS: gl.constexpr,
             DECAY: gl.constexpr, HAS_H0: gl.constexpr, HAS_HT: gl.constexpr, V_FIRST: gl.constexpr):
    """Compute all chunks for BV columns of the state; this is the program of a group of four warps.

    work: the tensors o, states, h0 and ht; the buffers and barriers of scores and results; and scale.
    place: a tuple of
        v0: the program's first column in a state
        v_column: its first column in v and o
        row0: its first row
        entering: number of the initial state in h0
        leaving: number of the final state in ht, negative if the program writes none
        table: row of ``states`` where the entry of its first chunk begins
        step: rows from one entry to the next
        chunks: number of its chunks
    """
    o, states, h0, ht, weights_of, o_of, states_of, scored, used, scale = work
    v0, v_column, row0, entering, leaving, table, step, chunks = place
    ring_q, ring_k, ring_v, ring_A, ring_low, lines, full, empty = ring
    dtype: gl.constexpr = ring_k.dtype
    STAGES: gl.constexpr = ring_k.shape[0]
    BT: gl.constexpr = ring_k.shape[1]
    BK: gl.constexpr = ring_k.shape[2]
    BV: gl.constexpr = ring_v.shape[2]
    LINES: gl.constexpr = 5 if DECAY == 2 else 1
    RESTORE: gl.constexpr = states is not None
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    a_row: gl.constexpr = gl.SliceLayout(1, of_chunk)
    a_column: gl.constexpr = gl.SliceLayout(0, of_chunk)
    s_o = o_of.index(group)
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
        if group == 0 and not RESTORE:  # the scores of both groups
            scores = warpgroup_mma(b_q, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
            if DECAY == 0:
                since = gl.where(causal, 1.0, 0.0) * scale
            else:
                sums = lines.index(line + 1)
                apart = sums.load(a_row)[:, None] - sums.load(a_column)[None, :]
                since = gl.exp2(gl.where(causal, apart, float("-inf"))) * scale
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.wait(used.index(i % 2), (i // 2 & 1) ^ 1)
            weights_of.index(i % 2).store((scores * since).to(dtype))
            fence_async_shared()
            barrier()  # all warps must have written before one thread signals
            mbarrier.arrive(scored.index(i % 2), count=1)
        hk = warpgroup_mma(entered, b_k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if RESTORE:
            tma.store_wait(1)  # the buffer of the last state is free now; that of u may not be
            states_of.index(group).permute((1, 0)).store(h.to(dtype))
            fence_async_shared()
            async_store(states, [table + i * step, v0], states_of.index(group))
        hk = warpgroup_mma_wait(0, [hk])
        y = ring_v.index(slot * GROUPS + group).permute((1, 0)).load(of_chunk).to(gl.float32)
        if DECAY == 0:
            y = y - hk
        else:
            y = y - hk * lines.index(line + 2).load(a_column)[None, :]
        y = y * lines.index(line).load(a_column)[None, :]
        y = gl.convert_layout(y.to(dtype), left)
        u = warpgroup_mma(y, ring_A.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        out = nothing
        if not RESTORE:
            out = warpgroup_mma(entered, b_q.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if DECAY == 2:
            h = h * lines.index(line + 4).load(gl.SliceLayout(1, of_state))[:, None]
        u = warpgroup_mma_wait(0 if RESTORE else 1, [u])
        w = u
        if DECAY == 2:
            w = u * lines.index(line + 3).load(a_column)[None, :]
        h = warpgroup_mma(gl.convert_layout(w.to(dtype), left_of_state), b_k, h, is_async=True)
        if RESTORE:
            out = u
            h = warpgroup_mma_wait(0, [h])
            entered = gl.convert_layout(h.to(dtype), left)
        else:
            u = gl.convert_layout(u.to(dtype), left)
            out = warpgroup_mma_wait(1, [out])
            if DECAY == 0:
                out = out * scale
            else:
                out = out * (lines.index(line + 2).load(a_column) * scale)[None, :]
            mbarrier.wait(scored.index(i % 2), i // 2 & 1)
            out = warpgroup_mma(u, weights_of.index(i % 2).permute((1, 0)), out, is_async=True)
            h = warpgroup_mma_wait(1, [h])
            entered = gl.convert_layout(h.to(dtype), left)
            out = warpgroup_mma_wait(0, [out])
        tma.store_wait(1 if RESTORE else 0)
        s_o.permute((1, 0)).store(out.to(s_o.dtype))
        fence_async_shared()
        async_store(o, [row0 + i * BT, v_column], s_o)
        barrier()  # all warps must have read the slot before one thread signals
        mbarrier.arrive(empty.index(slot), count=1)
        if not RESTORE:
            mbarrier.arrive(used.index(i % 2), count=1)
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
    o=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]),
    states=lambda x: (x["V"], x["BK"], x["BV"], x["slots"] * x["HV"] * x["BK"]))
@gluon.jit(do_not_specialize=["T", "N", "whole", "R", "L", "rows", "entries", "slots", "scale"])
def delta_overlapped(
    k, q, v, A, betas, G, h0, o, ht, states, undivided, bounds, scale, T, N, whole, H, HV, R, L, rows,
    entries, slots, V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, DECAY: gl.constexpr, HAS_H0: gl.constexpr,
    HAS_HT: gl.constexpr, V_FIRST: gl.constexpr,
):
    """Run the forward scan in Gluon: write the outputs o and the final states ht, like delta_scan.

    Without q, write u to o and the states that enter the chunks to states, like delta_states. One program
    computes GROUPS (1 or 2) times BV columns of the state of one head. BK is K.

    k, q: [rows, H, K]; q is None to restore the states.
    v: [rows, HV, V].
    A: [rows, HV, BT].
    betas, G: [HV, R], fp32.
    h0: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K].
    o: [rows, HV, V].
    ht: [N, HV, K, V] or, with V_FIRST, [N, HV, V, K], fp32.
    states: [slots, HV, K, V], one for each chunk, or None.
    undivided: [N, HV], int32, or None.
    bounds: [N + 1] or None. Only the whole chunks of packed sequences are computed.
    T: tokens to compute of each sequence, a multiple of BT, or the rows of packed sequences.
    whole: rows between the starts of two sequences; at least T.
    rows: number of rows in the batch.
    entries: entries of states for each sequence.
    slots: number of entries of states.
    """
    if bounds is None:
        v0, i_h, n, row0, chunks, entering, leaving = own_rows(undivided, T, HV, L, V, GROUPS * BV, BT, False)
    else:
        v0, i_h, n, row0, chunks, entering, leaving = packed_rows(
            undivided, bounds, T, N=N, H=HV, L=L, V=V, COLUMNS=GROUPS * BV, ROWS=BT, REVERSE=False)
    step = HV * BK
    table = (row0 // BT + n * (entries - T // BT)) * step + i_h * BK
    row0 += n * (whole - T)
    ring = ring_of(q, k, v, A, None, BT=BT, BK=BK, BV=BV, GROUPS=GROUPS, STAGES=STAGES, DECAY=DECAY)
    weights = gl.allocate_shared_memory(k.dtype, [2, BT, BT], A.layout)
    written = gl.allocate_shared_memory(o.dtype, [GROUPS, BT, BV], o.layout)
    leaves = weights  # a placeholder
    if states is not None:
        leaves = gl.allocate_shared_memory(k.dtype, [GROUPS, BK, BV], states.layout)
    scored, used = barriers(2, 1, GROUPS)
    work = (o, states, h0, ht, weights, written, leaves, scored, used, scale)
    place = (v0, i_h * V + v0, row0, entering, leaving, table, step, chunks)
    reads, columns = (q, k, v, A, None, betas, G), (i_h // (HV // H) * BK, i_h * V + v0, i_h * BT)
    line = i_h.to(gl.int64) * R + row0
    # With two groups, each thread has 168 registers at entry. Registers are assigned to four warps at a time.
    # The four that include the loading warp keep 40 per thread, so the two groups get 232.
    if GROUPS == 1:
        gl.warp_specialize(
            [(multiply, (0, ring, work, place, V, GROUPS, DECAY, HAS_H0, HAS_HT, V_FIRST)),
             (load, (ring, reads, row0, line, columns, chunks, GROUPS, DECAY, False))], [1], [40])
    else:
        gl.warp_specialize(
            [(multiply, (0, ring, work, place, V, GROUPS, DECAY, HAS_H0, HAS_HT, V_FIRST)),
             (multiply, (1, ring, work, place, V, GROUPS, DECAY, HAS_H0, HAS_HT, V_FIRST)),
             (load, (ring, reads, row0, line, columns, chunks, GROUPS, DECAY, False))], [4, 1], [232, 40])
