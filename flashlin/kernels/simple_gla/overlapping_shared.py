"""Gradients of a chunk for Hopper where heads of v share q and k, in Gluon, as an overlapping kernel.

The kernel replaces ``simple_gla_shared`` of ``backward.py``; loads and products of different heads run at the
same time. One program computes a slice of the heads that share q and k:

    dq = (do h^T) scale e^G, summed over heads, + s k
    dk = (v dh^T) e^{G_L - G}, summed over heads, + s^T q

with s_ij = (do_i . v_j) scale e^{G_i - G_j} for j <= i, summed over heads.

One group of four warps computes dq, and another computes dk. Both run the same code, with do and v, h and dh,
q and k exchanged. Each computes the pairs that it needs itself, so neither waits for the other, and each
writes its own part of dg. One more warp loads the next heads by TMA into a ring of STAGES slots. It also
computes factors from their decays and stores them.

The kernel requires whole chunks of dense sequences, heads of 64 columns and states of 128 (``recipe.py``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlin.compat.descriptors import described
from flashlin.kernels.gluon_ops import async_load, barrier, barriers


@gluon.jit
def load_heads(ring, q, k, v, do, G, states, dstates, s_q, s_k, ready, row, qk_column, table, begin, heads, R,
               scale, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr):
    """Load q and k of the chunk, then for each head v, do, the state and the gradient of the state.

    This is the program of the loading warp. Head i goes to slot i % STAGES, once both groups of warps have
    released that slot. The slot is full after its bytes have arrived and its vectors of decays are written.
    With sums G of log2 decays, these are G_i, scale 2^{G_i}, 2^{G_L - G_i}, and 2^{G_L}.

    ring: shared memory with STAGES slots for v, do, h and dh, 4 vectors per slot, and the slots' barriers.
    ready: barrier for q and k.
    row: first row of the chunk.
    table: index of head 0's state of this chunk in states and dstates.
    begin, heads: first head of the slice and number of heads.
    """
    ring_v, ring_do, ring_h, ring_dh, lines, full, empty = ring
    tokens = gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [1], [0]))
    mbarrier.expect(ready, 4 * BT * BK)
    async_load(q, [row, qk_column], ready, s_q)
    async_load(k, [row, qk_column], ready, s_k)
    for i in range(heads):
        slot = i % STAGES
        i_h = begin + i
        at = i_h.to(gl.int64) * R + row
        sums = gl.load(G + at + tokens)
        total = gl.load(G + at + BT - 1 + 0 * tokens)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 4 * (BT + BK) * BV)
        async_load(do, [row, i_h * BV], bar, ring_do.index(slot))
        async_load(v, [row, i_h * BV], bar, ring_v.index(slot))
        async_load(states, [(table + i_h) * BK, 0], bar, ring_h.index(slot))
        async_load(dstates, [(table + i_h) * BK, 0], bar, ring_dh.index(slot))
        lines.index(slot * 4).store(sums)
        lines.index(slot * 4 + 1).store(gl.exp2(sums) * scale)
        lines.index(slot * 4 + 2).store(gl.exp2(total - sums))
        lines.index(slot * 4 + 3).store(gl.exp2(total))
        barrier()  # all lanes must have written before one signals
        mbarrier.arrive(bar, count=1)


@gluon.jit
def add_heads(grad, dg, s_own, s_other, ring_x, ring_y, ring_own, ring_h, ring_dh, lines, vectors, scores_of,
              ready, full, empty, group: gl.constexpr, row, i_s, shares, begin, heads, H, scale,
              BT: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """Compute dq (group 0) or dk (group 1), and the group's part of dg.

    This is the program of one group of four warps. Group 0 uses the rows of q, x = do and the states h. Group
    1 uses the rows of k, x = v and the gradients dh. Each group also computes half of the channels of <h,
    dh>, which contributes to all gates of the chunk.

    grad: dq or dk.
    s_own, s_other: q and k in shared memory, or k and q.
    ring_x, ring_y: do and v, or v and do.
    ring_own: h or dh.
    lines: vectors of decays from ``load_heads``.
    vectors: shared memory to exchange parts of dg between threads.
    scores_of: shared memory for the scores of each group.
    row: first row of the chunk.
    i_s, shares: number of the slice of heads, and how many slices there are.
    begin, heads: first head of the slice and number of heads.
    """
    of_own: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    a_row: gl.constexpr = gl.SliceLayout(1, of_chunk)
    a_column: gl.constexpr = gl.SliceLayout(0, of_chunk)
    own_row: gl.constexpr = gl.SliceLayout(1, of_own)
    dtype: gl.constexpr = s_own.dtype
    rows = gl.arange(0, BT, a_row)
    columns = gl.arange(0, BT, a_column)
    later = columns[None, :] >= rows[:, None]
    if group == 0:
        causal = rows[:, None] >= columns[None, :]
    else:
        causal = later
    none = gl.zeros([BT, BT], gl.float32, of_chunk)
    nothing = gl.zeros([BT, BK], gl.float32, of_own)
    mbarrier.wait(ready, 0)
    scores = warpgroup_mma(s_own, s_other.permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    s_scores = scores_of.index(group)
    s_scores.store(gl.where(causal & (rows[:, None] != columns[None, :]), scores, 0.0))
    out = gl.zeros([BT, BK], gl.float32, of_own)
    ds = gl.zeros([BT, BT], gl.float32, of_chunk)
    for i in range(heads):
        slot = i % STAGES
        line = slot * 4
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        b_x = ring_x.index(slot)
        p = warpgroup_mma(b_x, ring_y.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        h = ring_h.index(slot).slice(group * BT, BT).load(of_chunk).to(gl.float32)
        dh = ring_dh.index(slot).slice(group * BT, BT).load(of_chunk).to(gl.float32)
        across = gl.sum(h * dh, 1) * lines.index(line + 3).load(a_row)
        of_row = lines.index(line).load(a_row)[:, None]
        of_column = lines.index(line).load(a_column)[None, :]
        between = of_row - of_column if group == 0 else of_column - of_row
        p = warpgroup_mma_wait(0, [p])
        p = p * gl.exp2(gl.where(causal, between, float("-inf")))
        ds += p
        pairs = gl.sum(p * s_scores.load(of_chunk), 1) * scale
        beyond = warpgroup_mma(b_x, ring_own.index(slot).permute((1, 0)), nothing, use_acc=False,
                               is_async=True)
        factor = lines.index(line + 1 + group).load(own_row)
        beyond = warpgroup_mma_wait(0, [beyond]) * factor[:, None]
        out += beyond
        read = gl.convert_layout(gl.sum(s_own.load(of_own).to(gl.float32) * beyond, 1), a_row)
        pair = (i % 2) * 4 + group * 2
        if group == 0:  # a token's terms in dg_t for its own and earlier t, then for later t
            vectors.index(pair).store(across + read + pairs)
            vectors.index(pair + 1).store(across)
        else:
            vectors.index(pair).store(across - pairs)
            vectors.index(pair + 1).store(across + read)
        barrier()  # all warps have read the slot and written their vectors
        mbarrier.arrive(empty.index(slot), count=1)
        after = vectors.index(pair).load(a_column)[None, :]
        before = vectors.index(pair + 1).load(a_column)[None, :]
        b_dg = gl.sum(gl.where(later, after, before), 1)
        gl.store(dg + ((row + rows).to(gl.int64) * H + begin + i) * 2 + group, b_dg)
    left: gl.constexpr = gl.DotOperandLayout(0, of_own, 2)
    out = warpgroup_mma(gl.convert_layout((ds * scale).to(dtype), left), s_other, out, is_async=True)
    out = warpgroup_mma_wait(0, [out])
    at = (row + gl.arange(0, BT, own_row)).to(gl.int64) * shares + i_s
    channels = gl.arange(0, BK, gl.SliceLayout(0, of_own))
    gl.store(grad + at[:, None] * BK + channels[None, :], out.to(grad.dtype.element_ty))


def _of_heads(x):
    """Return the TMA block of q and k: columns of the matrix, then rows and columns of a block.

    x: the kernel's arguments by name.
    """
    return x["H"] // x["GROUP"] * x["BK"], x["BT"], x["BK"]


def _of_values(x):
    """Return the TMA block of v and do: columns of the matrix, then rows and columns of a block.

    x: the kernel's arguments by name.
    """
    return x["H"] * x["BV"], x["BT"], x["BV"]


def _states(x):
    """Return the TMA block of states: columns of the matrix, rows and columns of a block, matrix rows.

    x: the kernel's arguments by name.
    """
    return x["BV"], x["BK"], x["BV"], x["slots"] * x["H"] * x["BK"]


@described(q=_of_heads, k=_of_heads, v=_of_values, do=_of_values, states=_states, dstates=_states)
@gluon.jit(do_not_specialize=["T", "R", "S", "rows", "slots", "scale"])
def simple_gla_overlapped_shared(
    q, k,  # [rows, H // GROUP, K]
    v,  # [rows, H, V]
    do,  # [rows, H, V], of q's dtype
    G,  # [H, R], fp32
    states, dstates,  # [slots, H, K, V], one entry per chunk
    dq, dk,  # [rows, slices of heads, K]
    dg,  # [rows, H, 2], fp32
    scale,
    T,  # tokens of a sequence, a multiple of BT
    H, R,
    S,  # chunks per sequence
    rows,  # B T, the rows of the whole batch
    slots,  # entries of states and dstates
    BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, BH: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Compute dq, dk and dg of one chunk where heads of v share q and k, as an overlapping kernel for Hopper.

    It gives the results of ``simple_gla_shared``. The heads that share one q and k are divided into slices of
    at most BH heads. A program computes the sums of dq and dk over one slice. dg has two parts per head,
    which torch adds. BK equals K and BV equals V.
    """
    SHARES: gl.constexpr = (GROUP + BH - 1) // BH
    dtype: gl.constexpr = q.dtype
    shares = H // GROUP * SHARES
    program = gl.program_id(0)
    i_s = program % shares
    chunk = program // shares
    n = chunk // S
    row = n * T + chunk % S * BT
    i_g = i_s // SHARES
    begin = i_g * GROUP + i_s % SHARES * GROUP // SHARES
    heads = i_g * GROUP + (i_s % SHARES + 1) * GROUP // SHARES - begin
    table = (row // BT + n) * H
    s_q = gl.allocate_shared_memory(dtype, [BT, BK], q.layout)
    s_k = gl.allocate_shared_memory(dtype, [BT, BK], k.layout)
    ring_v = gl.allocate_shared_memory(dtype, [STAGES, BT, BV], v.layout)
    ring_do = gl.allocate_shared_memory(dtype, [STAGES, BT, BV], do.layout)
    ring_h = gl.allocate_shared_memory(dtype, [STAGES, BK, BV], states.layout)
    ring_dh = gl.allocate_shared_memory(dtype, [STAGES, BK, BV], dstates.layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines = gl.allocate_shared_memory(gl.float32, [STAGES * 4, BT], line)
    vectors = gl.allocate_shared_memory(gl.float32, [8, BT], line)
    scores_of = gl.allocate_shared_memory(gl.float32, [2, BT, BT], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    full, empty = barriers(STAGES, 2, 2)
    ring = (ring_v, ring_do, ring_h, ring_dh, lines, full, empty)
    gl.warp_specialize(
        [(add_heads, (dq, dg, s_q, s_k, ring_do, ring_v, ring_h, ring_h, ring_dh, lines, vectors,
                      scores_of, ready, full, empty, 0, row, i_s, shares, begin, heads, H, scale, BT, BK,
                      STAGES)),
         (add_heads, (dk, dg, s_k, s_q, ring_v, ring_do, ring_dh, ring_h, ring_dh, lines, vectors,
                      scores_of, ready, full, empty, 1, row, i_s, shares, begin, heads, H, scale, BT, BK,
                      STAGES)),
         (load_heads, (ring, q, k, v, do, G, states, dstates, s_q, s_k, ready, row, i_g * BK, table, begin,
                       heads, R, scale, BT, BK, BV, STAGES))],
        [4, 1], [232, 40])
