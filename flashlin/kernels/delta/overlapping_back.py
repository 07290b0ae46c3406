"""The reverse scan of ``backward.py`` for Hopper, in Gluon, with the same structure as ``overlapping.py``.

All matrices are transposed, so that the result of each product is in registers as the left operand of the
next one:

    du^T = dh^T k^T e^{G_L - G} + do^T s
    dy^T = du^T A   (the rounding of both operands is compensated)
    dh^T = e^{G_L} dh^T + (do^T scale e^G) q - (dy^T beta e^G) k

with s_ij = scale e^{G_i - G_j} (q_i . k_j) for j <= i. Here each group computes s itself. The gradient of the
state after a chunk is stored while the products of the chunk run.
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
from flashlin.kernels.delta.overlapping import load, ring_of
from flashlin.kernels.gluon_ops import async_store, barrier, own_rows, packed_rows, state_tile


@gluon.jit
def multiply_back(group: gl.constexpr, ring, work, place, V: gl.constexpr, GROUPS: gl.constexpr,
                  DECAY: gl.constexpr, HAS_DHT: gl.constexpr, HAS_DH0: gl.constexpr, ALONE: gl.constexpr,
                  V_FIRST: gl.constexpr):
    """Compute all chunks, from last to first, for BV columns; this is the program of a group of four warps.

    ``overlapping.multiply`` describes most arguments. In ``work``, dy, dstates, dht and dh0 replace o,
    states, h0 and ht. There are no ``scored`` and ``used``. With ALONE, dy and dstates are not written.
    """
    dy, dstates, dht, dh0, weights_of, dy_of, states_of, scale = work
    v0, v_column, row0, entering, leaving, table, step, chunks = place
    ring_q, ring_k, ring_do, ring_A, ring_low, lines, full, empty = ring
    dtype: gl.constexpr = ring_k.dtype
    STAGES: gl.constexpr = ring_k.shape[0]
    BT: gl.constexpr = ring_k.shape[1]
    BK: gl.constexpr = ring_k.shape[2]
    BV: gl.constexpr = ring_do.shape[2]
    LINES: gl.constexpr = 5 if DECAY == 2 else 1
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    a_row: gl.constexpr = gl.SliceLayout(1, of_chunk)
    a_column: gl.constexpr = gl.SliceLayout(0, of_chunk)
    s_weights, s_dy, s_state = weights_of.index(group), dy_of.index(group), states_of.index(group)
    v0 += group * BV
    v_column += group * BV
    causal = gl.arange(0, BT, a_row)[:, None] >= gl.arange(0, BT, a_column)[None, :]
    if HAS_DHT:
        dh = gl.load(state_tile(dht, entering, v0, 0, of_state, BK, V, BV, V_FIRST)).to(gl.float32)
    else:
        dh = gl.zeros([BV, BK], gl.float32, of_state)
    none = gl.zeros([BT, BT], gl.float32, of_chunk)
    nothing = gl.zeros([BV, BT], gl.float32, of_chunk)
    for i in range(chunks):
        slot = i % STAGES
        at = chunks - 1 - i
        b_q, b_k, line = ring_q.index(slot), ring_k.index(slot), slot * LINES
        b_A = ring_A.index(slot)
        entered = dh.to(dtype)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        scores = warpgroup_mma(b_q, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        du = warpgroup_mma(gl.convert_layout(entered, left), b_k.permute((1, 0)), nothing, use_acc=False,
                           is_async=True)
        if not ALONE:
            tma.store_wait(1)  # the buffer of the last state is free now; that of dy may not be
            s_state.permute((1, 0)).store(entered)
            fence_async_shared()
            async_store(dstates, [table + at * step, v0], s_state)
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
        b_do = ring_do.index(slot * GROUPS + group).permute((1, 0)).load(of_chunk)
        du = warpgroup_mma_wait(0, [du])
        if DECAY == 2:
            du = du * lines.index(line + 3).load(a_column)[None, :]
        du = warpgroup_mma(gl.convert_layout(b_do, left), s_weights, du, is_async=True)
        if DECAY == 0:
            w = b_do.to(gl.float32) * scale
        else:
            w = b_do.to(gl.float32) * (lines.index(line + 2).load(a_column) * scale)[None, :]
            dh = dh * lines.index(line + 4).load(gl.SliceLayout(1, of_state))[:, None]
        dh = warpgroup_mma(gl.convert_layout(w.to(dtype), left_of_state), b_q, dh, is_async=True)
        du = warpgroup_mma_wait(1, [du])
        high = du.to(dtype)
        low = gl.convert_layout((du - high.to(gl.float32)).to(dtype), left)
        high = gl.convert_layout(high, left)
        out = warpgroup_mma(high, b_A, nothing, use_acc=False, is_async=True)
        out = warpgroup_mma(low, b_A, out, is_async=True)
        out = warpgroup_mma(high, ring_low.index(slot), out, is_async=True)
        dh, out = warpgroup_mma_wait(0, [dh, out])
        dv = out * lines.index(line).load(a_column)[None, :]
        if DECAY == 2:
            dv = dv * lines.index(line + 2).load(a_column)[None, :]
        dh = warpgroup_mma(gl.convert_layout((-dv).to(dtype), left_of_state), b_k, dh, is_async=True)
        if not ALONE:
            tma.store_wait(1)  # the buffer of the last dy is free now; that of the state may not be
            s_dy.permute((1, 0)).store(out.to(dtype))
            fence_async_shared()
            async_store(dy, [row0 + at * BT, v_column], s_dy)
        dh = warpgroup_mma_wait(0, [dh])
        barrier()  # all warps must have read the slot before one thread signals
        mbarrier.arrive(empty.index(slot), count=1)
    tma.store_wait(0)
    if HAS_DH0 or ALONE:
        if leaving >= 0:
            zero = gl.minimum(chunks, 0)  # a known 0 would make the compiler keep dht's addresses until here
            gl.store(state_tile(dh0, leaving, v0, zero, of_state, BK, V, BV, V_FIRST), dh)


@described(
    q=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    k=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    do=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]),
    A=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    A_low=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    dy=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]),
    dstates=lambda x: (x["V"], x["BK"], x["BV"], x["slots"] * x["HV"] * x["BK"]))
@gluon.jit(do_not_specialize=["T", "N", "R", "L", "rows", "entries", "slots", "scale"])
def delta_overlapped_back(
    q, k, do, A, A_low, betas, G, dht, dy, dh0, dstates, undivided, bounds, windows_back, scale, T, N, H, HV, R,
    L, rows, entries, slots, V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, DECAY: gl.constexpr, HAS_DHT: gl.constexpr,
    HAS_DH0: gl.constexpr, ALONE: gl.constexpr, V_FIRST: gl.constexpr,
):
    """Run the reverse scan in Gluon: write dy, dstates and dh0, like delta_reverse.

    One program computes GROUPS (1 or 2) times BV columns of the state of one head. BK is K.

    ALONE: compute only the gradient of each segment's initial state, as if its final state had no gradient.
    windows_back: with ALONE, the number of chunks to compute at the start of each segment; 0 means all.

    q, k: [rows, H, K].
    do: [rows, HV, V], of q's dtype.
    A, A_low: [rows, HV, BT].
    betas, G: [HV, R], fp32.
    dht: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K].
    dy: [rows, HV, V], or None.
    dh0: [N, HV, K, V] or, with V_FIRST, [N, HV, V, K], fp32; with ALONE, [segments, ...].
    dstates: [slots, HV, K, V], one for each chunk, or None.
    undivided: [N, HV], int32, or None.
    bounds: [N + 1] or None. Only the whole chunks of packed sequences are computed.
    windows_back: [segments, HV], int32, or None.
    T: tokens of a sequence, a multiple of BT.
    rows: number of rows in the batch.
    entries: entries of dstates for each sequence.
    slots: number of entries of dstates.
    """
    if bounds is None:
        v0, i_h, n, row0, chunks, entering, leaving = own_rows(undivided, T, HV, L, V, GROUPS * BV, BT, True)
    else:
        v0, i_h, n, row0, chunks, entering, leaving = packed_rows(
            undivided, bounds, T, N=N, H=HV, L=L, V=V, COLUMNS=GROUPS * BV, ROWS=BT, REVERSE=True)
    if ALONE:  # a first segment has no earlier one to pass its gradient to
        chunks = gl.where(leaving >= 0, 0, chunks)
        if windows_back is not None:
            window = gl.load(windows_back + entering)
            chunks = gl.where(window == 0, chunks, gl.minimum(chunks, gl.maximum(window, 0)))
        leaving = gl.where(chunks > 0, entering, -1)
    step = HV * BK
    ring = ring_of(q, k, do, A, A_low, BT=BT, BK=BK, BV=BV, GROUPS=GROUPS, STAGES=STAGES, DECAY=DECAY)
    weights = gl.allocate_shared_memory(k.dtype, [GROUPS, BT, BT], A.layout)
    written, leaves = weights, weights  # placeholders
    if not ALONE:
        written = gl.allocate_shared_memory(k.dtype, [GROUPS, BT, BV], dy.layout)
        leaves = gl.allocate_shared_memory(k.dtype, [GROUPS, BK, BV], dstates.layout)
    work = (dy, dstates, dht, dh0, weights, written, leaves, scale)
    table = (row0 // BT + n * (entries - T // BT)) * step + i_h * BK
    place = (v0, i_h * V + v0, row0, entering, leaving, table, step, chunks)
    reads, columns = (q, k, do, A, A_low, betas, G), (i_h // (HV // H) * BK, i_h * V + v0, i_h * BT)
    line = i_h.to(gl.int64) * R + row0
    if GROUPS == 1:
        gl.warp_specialize(
            [(multiply_back, (0, ring, work, place, V, GROUPS, DECAY, HAS_DHT, HAS_DH0, ALONE, V_FIRST)),
             (load, (ring, reads, row0, line, columns, chunks, GROUPS, DECAY, True))], [1], [40])
    else:  # see delta_overlapped for the registers
        gl.warp_specialize(
            [(multiply_back, (0, ring, work, place, V, GROUPS, DECAY, HAS_DHT, HAS_DH0, ALONE, V_FIRST)),
             (multiply_back, (1, ring, work, place, V, GROUPS, DECAY, HAS_DHT, HAS_DH0, ALONE, V_FIRST)),
             (load, (ring, reads, row0, line, columns, chunks, GROUPS, DECAY, True))], [4, 1], [232, 40])
