"""The forward scan of the scalar-decay family for Hopper, in Gluon, as an overlapping kernel.

Plain Triton waits for each product before it starts the next. Here one warp loads q, k and v of the next
chunks by TMA into a ring of STAGES slots, and four warps multiply. q k^T and q h run while w = e^{G_L - G} k
is computed in registers. The update of the state w^T v runs at the same time as (q k^T) v. o is stored while
the next chunk is computed.

The kernel requires whole chunks of dense sequences (``recipe.py``). The gain is in
benchmarks/results/overlapping-* and two-programs-*. The module is imported only if a plan has this kernel,
since Gluon came with Triton 3.5.
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
from flashlin.kernels.gluon_ops import async_load, async_store, barriers, own_rows


@gluon.jit
def load(ring, q, k, v, row0, qk_column, v_column, chunks, BT: gl.constexpr, BK: gl.constexpr,
         BV: gl.constexpr, STAGES: gl.constexpr):
    """Load q, k and v of all chunks into the rings; this is the program of the loading warp.

    Chunk i goes to slot i % STAGES, once that slot is empty.

    ring: shared memory with STAGES slots for q, k and v, and the barriers of the slots.
    row0: first row of the program's segment.
    qk_column, v_column: first columns of the head in q and k, and of the program in v.
    chunks: number of chunks.
    """
    ring_q, ring_k, ring_v, full, empty = ring
    for i in range(chunks):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * BT * (2 * BK + BV))
        async_load(q, [row0 + i * BT, qk_column], bar, ring_q.index(slot))
        async_load(k, [row0 + i * BT, qk_column], bar, ring_k.index(slot))
        async_load(v, [row0 + i * BT, v_column], bar, ring_v.index(slot))


@gluon.jit
def state_offsets(nh, v0, layout: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
                  V_FIRST: gl.constexpr):
    """Return the offsets of a [BK, BV] tile of state nh, stored as [K, V] or, with V_FIRST, [V, K].

    The tile has all K = BK rows.

    v0: first column of the tile.
    layout: the Gluon layout of the tile.
    """
    rows = gl.arange(0, BK, gl.SliceLayout(1, layout))
    columns = v0 + gl.arange(0, BV, gl.SliceLayout(0, layout))
    if V_FIRST:
        inside = rows[:, None] + columns[None, :] * BK
    else:
        inside = rows[:, None] * V + columns[None, :]
    return nh.to(gl.int64) * (BK * V) + inside


@gluon.jit
def factors(of_row, of_column, total, causal, scale):
    """Return the factors of a chunk: scale 2^{G_i - G_j} or 0 where not causal, 2^{G_L - G_j}, and 2^{G_L}.

    of_row, of_column: the sums of log2 decays G, in the layouts of rows and columns.
    total: G_L, the sum over the whole chunk.
    causal: mask [BT, BT] of the pairs with j <= i.
    """
    decay = gl.exp2(gl.where(causal, of_row[:, None] - of_column[None, :], float("-inf"))) * scale
    return decay, gl.exp2(total - of_column), gl.exp2(total)


@gluon.jit
def multiply(ring, o, G, line, rate, h0, ht, s_h, s_o, entering, leaving, row0, v0, v_column, chunks, scale,
             BT: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, DECAY: gl.constexpr,
             HAS_H0: gl.constexpr, HAS_HT: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr):
    """Compute o of all chunks, and the final state if HAS_HT.

    This is the program of the four warps that multiply.

    G: sums of decays; the program's rows begin at ``line``.
    rate: log2 decay of the head per token, if it is constant (DECAY is 1).
    s_h, s_o: shared memory for the state and for o.
    entering: index of the initial state in h0.
    leaving: index of the final state in ht, negative if it is not stored.
    row0: first row of the program's segment.
    v0, v_column: first column of the program within the head, and within a row of o.
    """
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    ring_q, ring_k, ring_v, full, empty = ring
    dtype: gl.constexpr = s_h.dtype
    rows = gl.arange(0, BT, gl.SliceLayout(1, of_scores))
    columns = gl.arange(0, BT, gl.SliceLayout(0, of_scores))
    causal = rows[:, None] >= columns[None, :]
    written = gl.arange(0, BT, gl.SliceLayout(1, of_state))
    if HAS_H0:
        h = gl.load(h0 + state_offsets(entering, v0, of_state, BK, V, BV, V_FIRST)).to(gl.float32)
    else:
        h = gl.zeros([BK, BV], gl.float32, of_state)
    none = gl.zeros([BT, BT], gl.float32, of_scores)
    nothing = gl.zeros([BT, BV], gl.float32, of_state)
    if DECAY == 1:
        of_row = rate * (rows + 1).to(gl.float32)
        of_column = rate * (columns + 1).to(gl.float32)
        of_written = rate * (written + 1).to(gl.float32)
        decay, to_end, kept = factors(of_row, of_column, rate * BT, causal, scale)
        read = gl.exp2(of_written) * scale
    for i in range(chunks):
        slot = i % STAGES
        s_h.store(h.to(dtype))
        fence_async_shared()
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        b_k = ring_k.index(slot)
        scores = warpgroup_mma(ring_q.index(slot), b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        out = warpgroup_mma(ring_q.index(slot), s_h, nothing, use_acc=False, is_async=True)
        if DECAY == 0:
            h = warpgroup_mma(b_k.permute((1, 0)), ring_v.index(slot), h, is_async=True)
            scores = warpgroup_mma_wait(2, [scores])
            weights = gl.where(causal, scores * scale, 0.0)
            out = warpgroup_mma_wait(1, [out]) * scale
        else:
            if DECAY == 2:
                of_row = gl.load(G + line + i * BT + rows)
                of_column = gl.load(G + line + i * BT + columns)
                of_written = gl.load(G + line + i * BT + written)
                total = gl.load(G + line + i * BT + BT - 1)
                decay, to_end, kept = factors(of_row, of_column, total, causal, scale)
                read = gl.exp2(of_written) * scale
            w = b_k.permute((1, 0)).load(of_scores).to(gl.float32) * to_end[None, :]
            h = h * kept
            h = warpgroup_mma(gl.convert_layout(w.to(dtype), left), ring_v.index(slot), h, is_async=True)
            scores = warpgroup_mma_wait(2, [scores])
            weights = scores * decay
            out = warpgroup_mma_wait(1, [out]) * read[:, None]
        weights = gl.convert_layout(weights.to(dtype), left)
        out = warpgroup_mma(weights, ring_v.index(slot), out, is_async=True)
        out, h = warpgroup_mma_wait(0, [out, h])
        mbarrier.arrive(empty.index(slot), count=1)
        tma.store_wait(0)
        s_o.store(out.to(s_o.dtype))
        fence_async_shared()
        async_store(o, [row0 + i * BT, v_column], s_o)
    tma.store_wait(0)
    if HAS_HT:
        if leaving >= 0:
            gl.store(ht + state_offsets(leaving, v0, of_state, BK, V, BV, V_FIRST), h)


@described(
    q=lambda x: (x["H"] // x["GROUP"] * x["BK"], x["BT"], x["BK"]),
    k=lambda x: (x["H"] // x["GROUP"] * x["BK"], x["BT"], x["BK"]),
    v=lambda x: (x["H"] * x["V"], x["BT"], x["BV"]),
    o=lambda x: (x["H"] * x["V"], x["BT"], x["BV"]))
@gluon.jit(do_not_specialize=["T", "R", "L", "rows", "scale"])
def simple_gla_overlapped(
    q, k,  # [rows, H // GROUP, K]
    v,  # [rows, H, V]
    G,  # [H, R], fp32
    gamma,  # [H]
    h0,  # [segments, H, K, V] or, with V_FIRST, [segments, H, V, K]
    o,  # [rows, H, V]
    ht,  # [N, H, K, V] or, with V_FIRST, [N, H, V, K], fp32
    scale,
    T,  # tokens of a sequence, a multiple of BT
    H, R, L,
    rows,  # B T, the rows of the whole batch
    V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # bound on the registers per thread, see compat/descriptors.py
    DECAY: gl.constexpr, HAS_H0: gl.constexpr, HAS_HT: gl.constexpr, V_FIRST: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Compute o and the final states ht by a scan over chunks, as an overlapping kernel for Hopper.

    It gives the results of ``simple_gla_scan``. One program computes BV columns of one head's state. BK
    equals K.
    """
    dtype: gl.constexpr = q.dtype
    v0, i_h, n, row0, chunks, own, leaving = own_rows(None, T, H, L, V, BV, BT, False)
    line = i_h.to(gl.int64) * R + row0
    rate = 0.0
    if DECAY == 1:
        rate = gl.load(gamma + i_h).to(gl.float32) * 1.4426950408889634
    ring_q = gl.allocate_shared_memory(dtype, [STAGES, BT, BK], q.layout)
    ring_k = gl.allocate_shared_memory(dtype, [STAGES, BT, BK], k.layout)
    ring_v = gl.allocate_shared_memory(dtype, [STAGES, BT, BV], v.layout)
    s_o = gl.allocate_shared_memory(o.dtype, [BT, BV], o.layout)
    s_h = gl.allocate_shared_memory(dtype, [BK, BV], v.layout)
    full, empty = barriers(STAGES, 1, 1)
    ring = (ring_q, ring_k, ring_v, full, empty)
    v_column = i_h * V + v0
    gl.warp_specialize(
        [(multiply, (ring, o, G, line, rate, h0, ht, s_h, s_o, own, leaving, row0, v0, v_column, chunks,
                     scale, BT, BK, V, BV, DECAY, HAS_H0, HAS_HT, V_FIRST, STAGES)),
         (load, (ring, q, k, v, row0, i_h // GROUP * BK, v_column, chunks, BT, BK, BV, STAGES))],
        [1], [24])
