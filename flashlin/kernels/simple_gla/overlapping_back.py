"""The reverse scan of the scalar-decay family for Hopper, in Gluon, as an overlapping kernel.

Loads, products and stores of different chunks run at the same time. Like the reverse scan of the delta rules
(``delta/overlapping_back.py``), it computes transposed products. So each product leaves its result in the
registers where the next product reads it:

    dv^T = dh^T k^T e^{G_L - G} + do^T s
    dh^T = e^{G_L} dh^T + (do^T scale e^G) q

with s_ij = scale e^{G_i - G_j} (q_i . k_j) for j <= i.

A program computes one or two groups of 64 columns of v, with four warps for each group; the groups share q
and k. One more warp loads the preceding chunks by TMA into a ring of STAGES slots. It also computes factors
from their decays and stores them. The kernel requires whole chunks of dense sequences (``recipe.py``).
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
def load_back(ring, q, k, do, G, rate, line, row0, qk_column, v_column, chunks, scale, BT: gl.constexpr,
              BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr, LINES: gl.constexpr,
              DECAY: gl.constexpr, STAGES: gl.constexpr):
    """Load q, k and do of the chunks, from the last chunk to the first.

    This is the program of the loading warp. Chunk i of this order goes to slot i % STAGES, once all groups of
    warps have released that slot. The slot is full after its bytes have arrived and its vectors of decays are
    written. With sums G of log2 decays, these are G_i, scale 2^{G_i}, 2^{G_L - G_i}, 2^{G_L}, and G_i +
    log2(scale).

    ring: shared memory with STAGES slots for q, k and do, LINES vectors per slot, and the slots' barriers.
    line: offset of the program's segment in G.
    rate: log2 decay of the head per token, if it is constant (DECAY is 1).
    row0: first row of the program's segment.
    """
    ring_q, ring_k, ring_do, lines, full, empty = ring
    tokens = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [1], [0]))
    for i in range(chunks):
        slot = i % STAGES
        row = row0 + (chunks - 1 - i) * BT
        if DECAY == 2:
            at = line + (chunks - 1 - i) * BT
            sums = gl.load(G + at + tokens)
            total = gl.load(G + at + BT - 1 + 0 * tokens)
        if DECAY == 1:
            sums = rate * (tokens + 1).to(gl.float32)
            total = rate * (0 * tokens + BT).to(gl.float32)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * BT * (2 * BK + GROUPS * BV))
        async_load(k, [row, qk_column], bar, ring_k.index(slot))
        async_load(q, [row, qk_column], bar, ring_q.index(slot))
        for group in gl.static_range(GROUPS):
            async_load(do, [row, v_column + group * BV], bar, ring_do.index(slot * GROUPS + group))
        if DECAY > 0:
            first = slot * LINES
            lines.index(first).store(sums)
            lines.index(first + 1).store(gl.exp2(sums) * scale)
            lines.index(first + 2).store(gl.exp2(total - sums))
            lines.index(first + 3).store(gl.exp2(total))
            lines.index(first + 4).store(sums + gl.log2(scale))
        barrier()  # all lanes must have written before one signals
        mbarrier.arrive(bar, count=1)


@gluon.jit
def multiply_back(ring, dv, leaves, dht, dh0, squares, states_of, entering, leaving, row0, table, step,
                  column, v0, v_column, chunks, scale, group: gl.constexpr, BT: gl.constexpr,
                  BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, LINES: gl.constexpr,
                  GROUPS: gl.constexpr, SIDE: gl.constexpr, STATES: gl.constexpr, DECAY: gl.constexpr,
                  HAS_DHT: gl.constexpr, HAS_DH0: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr):
    """Compute dv of all chunks, and dh0 if HAS_DH0; this is the program of one group of four warps.

    leaves: with STATES, the descriptor that receives the gradient of the state that leaves each chunk. The
        gradient of chunk i is stored at row ``table`` + i ``step``, from column ``column``. With SIDE, each
        block of SIDE rows of the state goes to the next SIDE columns.
    ring: as in ``load_back``, with its vectors of decays.
    squares: shared memory of each group, for the scores times their decays, and then for dv.
    states_of: shared memory of each group for the state.
    entering: index of the gradient in dht.
    leaving: index of the state in dh0, negative if it is not stored.
    group: number of the group, which computes BV columns of v from v0 + group BV.
    """
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    a_row: gl.constexpr = gl.SliceLayout(1, of_chunk)
    a_column: gl.constexpr = gl.SliceLayout(0, of_chunk)
    ring_q, ring_k, ring_do, lines, full, empty = ring
    dtype: gl.constexpr = ring_k.dtype
    BLOCKS: gl.constexpr = BK // SIDE if SIDE > 0 else 1  # blocks of a state, each stored separately
    STORES: gl.constexpr = BLOCKS if STATES else 0
    square, s_state = squares.index(group), states_of.index(group)
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
        entered = dh.to(dtype)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        scores = warpgroup_mma(b_q, b_k.permute((1, 0)), none, use_acc=False, is_async=True)
        out = warpgroup_mma(gl.convert_layout(entered, left), b_k.permute((1, 0)), nothing, use_acc=False,
                            is_async=True)
        if STATES:
            # The previous state has left shared memory; the store of the previous dv may still be running.
            tma.store_wait(1)
            s_state.permute((1, 0)).store(entered)
            fence_async_shared()
            for block in gl.static_range(BLOCKS):
                if SIDE > 0:
                    async_store(leaves, [table + at * step, column + block * SIDE],
                                s_state.slice(block * SIDE, SIDE))
                else:
                    async_store(leaves, [table + at * step, column], s_state)
        scores = warpgroup_mma_wait(1, [scores])
        if DECAY == 0:
            weights = gl.where(causal, scores * scale, 0.0)
        else:
            of_row = lines.index(line + 4).load(a_row)
            of_column = lines.index(line).load(a_column)
            weights = scores * gl.exp2(gl.where(causal, of_row[:, None] - of_column[None, :], float("-inf")))
        tma.store_wait(STORES)  # the previous dv has left ``square``, which is reused for the weights
        square.store(weights.to(dtype))
        fence_async_shared()
        b_do = ring_do.index(slot * GROUPS + group).permute((1, 0)).load(of_chunk)
        out = warpgroup_mma_wait(0, [out])
        if DECAY > 0:
            out = out * lines.index(line + 2).load(a_column)[None, :]
        out = warpgroup_mma(gl.convert_layout(b_do, left), square, out, is_async=True)
        if DECAY == 0:
            w = b_do.to(gl.float32) * scale
        else:
            w = b_do.to(gl.float32) * lines.index(line + 1).load(a_column)[None, :]
            dh = dh * lines.index(line + 3).load(gl.SliceLayout(1, of_state))[:, None]
        dh = warpgroup_mma(gl.convert_layout(w.to(dtype), left_of_state), b_q, dh, is_async=True)
        dh, out = warpgroup_mma_wait(0, [dh, out])
        barrier()  # all warps have read the slot and the weights
        mbarrier.arrive(empty.index(slot), count=1)
        square.permute((1, 0)).store(out.to(dtype))
        fence_async_shared()
        async_store(dv, [row0 + at * BT, v_column], square)
    tma.store_wait(0)
    if HAS_DH0:
        if leaving >= 0:
            # If the compiler knew that this is 0, it would keep the addresses of dht in registers until here.
            zero = gl.minimum(chunks, 0)
            gl.store(state_tile(dh0, leaving, v0, zero, of_state, BK, V, BV, V_FIRST), dh)


def _leaving(x):
    """Return the TMA shape of ``dstates``: (matrix columns, block rows, block columns, matrix rows).

    dstates receives the gradients of states. Without STATES nothing is stored there, and dv is passed in its
    place, so the shape is that of dv.

    x: the kernel's arguments by name.
    """
    if not x["STATES"]:
        return x["H"] * x["V"], x["BT"], x["BV"]
    if x["SIDE"]:
        return x["H"] * x["BK"], x["SIDE"], x["SIDE"]
    return x["V"], x["BK"], x["BV"], x["slots"] * x["H"] * x["BK"]


@described(
    q=lambda x: (x["H"] // x["GROUP"] * x["BK"], x["BT"], x["BK"]),
    k=lambda x: (x["H"] // x["GROUP"] * x["BK"], x["BT"], x["BK"]),
    do=lambda x: (x["H"] * x["V"], x["BT"], x["BV"]),
    dv=lambda x: (x["H"] * x["V"], x["BT"], x["BV"]),
    dstates=_leaving,
    rest=_leaving)
@gluon.jit(do_not_specialize=["T", "R", "L", "rows", "slots", "scale"])
def simple_gla_overlapped_back(
    q, k,  # [rows, H // GROUP, K]
    do,  # [rows, H, V], of q's dtype
    G,  # [H, R], fp32
    gamma,  # [H]
    dht,  # [segments, H, K, V] or, with V_FIRST, [segments, H, V, K]
    dv,  # [rows, H, V], of q's dtype
    dh0,  # [N, H, K, V] or, with V_FIRST, [N, H, V, K], fp32
    dstates,  # with STATES, receives the gradients of states, see dstate_at
    rest,  # with SIDE, receives the second half of them, see dstate_at
    scale,
    T,  # tokens of a sequence, a multiple of BT
    H, R, L,
    rows,  # B T, the rows of the whole batch
    slots,  # entries of dstates without SIDE
    V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # bound on the registers per thread, see compat/descriptors.py
    SIDE: gl.constexpr, STATES: gl.constexpr, DECAY: gl.constexpr, HAS_DHT: gl.constexpr,
    HAS_DH0: gl.constexpr, V_FIRST: gl.constexpr, GROUP: gl.constexpr,
):
    """Compute dv and dh0 by a scan from the last chunk to the first, as an overlapping kernel for Hopper.

    It gives the results of ``simple_gla_dv``. With STATES it also stores the gradients of the states that
    leave the chunks. One program computes GROUPS times BV columns of one head's state, where GROUPS is 1 or
    2. With SIDE, one program must compute all V columns. BK equals K.
    """
    LINES: gl.constexpr = 5 if DECAY > 0 else 1
    dtype: gl.constexpr = q.dtype
    v0, i_h, n, row0, chunks, own, leaving = own_rows(None, T, H, L, V, GROUPS * BV, BT, True)
    line = i_h.to(gl.int64) * R + row0
    rate = 0.0
    if DECAY == 1:
        rate = gl.load(gamma + i_h).to(gl.float32) * 1.4426950408889634
    ring_q = gl.allocate_shared_memory(dtype, [STAGES, BT, BK], q.layout)
    ring_k = gl.allocate_shared_memory(dtype, [STAGES, BT, BK], k.layout)
    ring_do = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, BT, BV], do.layout)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES * LINES, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    squares = gl.allocate_shared_memory(dtype, [GROUPS, BT, BT], dv.layout)  # weights, then dv; BV is BT
    states = gl.allocate_shared_memory(dtype, [GROUPS, BK, BV], dstates.layout)
    full, empty = barriers(STAGES, 2, GROUPS)
    ring = (ring_q, ring_k, ring_do, lines, full, empty)
    qk_column = i_h // GROUP * BK
    v_column = i_h * V + v0
    if SIDE > 0:
        table, step, column, next_column = row0, BT, i_h * BK, i_h * BK
    else:
        table, step, column, next_column = ((row0 // BT + n) * H + i_h) * BK, H * BK, v0, v0 + BV
    if GROUPS == 1:
        gl.warp_specialize(
            [(multiply_back, (ring, dv, dstates, dht, dh0, squares, states, own, leaving, row0, table, step,
                              column, v0, v_column, chunks, scale, 0, BT, BK, V, BV, LINES, GROUPS, SIDE,
                              STATES, DECAY, HAS_DHT, HAS_DH0, V_FIRST, STAGES)),
             (load_back, (ring, q, k, do, G, rate, line, row0, qk_column, v_column, chunks, scale, BT, BK, BV,
                          GROUPS, LINES, DECAY, STAGES))],
            [1], [40])
    else:
        gl.warp_specialize(
            [(multiply_back, (ring, dv, dstates, dht, dh0, squares, states, own, leaving, row0, table, step,
                              column, v0, v_column, chunks, scale, 0, BT, BK, V, BV, LINES, GROUPS, SIDE,
                              STATES, DECAY, HAS_DHT, HAS_DH0, V_FIRST, STAGES)),
             (multiply_back, (ring, dv, rest, dht, dh0, squares, states, own, leaving, row0, table, step,
                              next_column, v0, v_column, chunks, scale, 1, BT, BK, V, BV, LINES, GROUPS, SIDE,
                              STATES, DECAY, HAS_DHT, HAS_DH0, V_FIRST, STAGES)),
             (load_back, (ring, q, k, do, G, rate, line, row0, qk_column, v_column, chunks, scale, BT, BK, BV,
                          GROUPS, LINES, DECAY, STAGES))],
            [4, 1], [232, 40])
