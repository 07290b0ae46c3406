"""The forward scan of ``forward.py`` for Hopper, in Gluon: loads, products and stores overlap.

This module is imported only if a plan uses its kernel, because Gluon came with Triton 3.5.

All matrices are transposed, so that the result of each product is in registers as the left operand of the
next one, as in ``kernels/delta/overlapping.py``. With the operands of ``dplr_prepare``, a chunk needs

    x^T = v^T M^T + h^T W^T
    o^T = h^T q_in^T + x^T P^T                  with two writing vectors: + v^T R^T
    h^T = h^T Diag(e^{G_L}) + x^T b_out         with two writing vectors: + v^T k_out

A group of four warps multiplies for 64 columns of v. A separate warp loads the next ROWS rows with TMA into a
ring buffer of STAGES slots. Loads, barriers and stores for each chunk of 16 tokens would take longer than the
products. The kernel supports only dense sequences of whole slots (``recipe.py``).
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

ROWS = gl.constexpr(64)  # rows of a slot of the ring: one chunk of 64 tokens, or four of 16


@gluon.jit
def ring_of(talls, squares, v, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
            STAGES: gl.constexpr):
    """Return the buffers of a ring with STAGES slots, and its barriers: see ``load``."""
    dtype: gl.constexpr = v.dtype
    tall = gl.allocate_shared_memory(dtype, [STAGES * len(talls), ROWS, BK], talls[0].layout)
    square = gl.allocate_shared_memory(dtype, [STAGES * len(squares), ROWS, BT], squares[0].layout)
    of_v = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, BV], v.layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS // BT * BK],
                                        gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES, 2, GROUPS)
    return tall, square, of_v, factors, full, empty


@gluon.jit
def load(ring, talls, squares, v, G, row0, i_h, v_column, slots, row_size, BT: gl.constexpr, BK: gl.constexpr,
         BV: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, REVERSE: gl.constexpr):
    """Load all rows of a program into the ring; this is the program of the loading warp.

    The i-th ROWS rows go to slot i % STAGES, as soon as all groups have finished with this slot. The slot is
    full when its TMA transfers have arrived and its factors 2^{G_L}, BK for each chunk, are written.

    ring: the result of ``ring_of``. talls: operands [rows, HV, K]. squares: operands [rows, HV, BT]. v: v or
    do. row_size: elements of a row of G. REVERSE: begin with the last rows.
    """
    tall, square, of_v, factors, full, empty = ring
    TALL: gl.constexpr = len(talls)
    SQUARE: gl.constexpr = len(squares)
    FACTORS: gl.constexpr = ROWS // BT * BK
    at = gl.arange(0, FACTORS, gl.BlockedLayout([BK // 32], [32], [1], [0]))
    row = row0
    step = ROWS
    if REVERSE:
        row = row0 + (slots - 1) * ROWS
        step = -ROWS
    sums = G + (row + at // BK * BT + BT - 1).to(gl.int64) * row_size + (i_h * BK + at % BK)
    total = gl.load(sums, mask=at < gl.where(slots > 0, FACTORS, 0))
    for i in range(slots):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * ROWS * (TALL * BK + SQUARE * BT + GROUPS * BV))
        for group in gl.static_range(GROUPS):
            async_load(v, [row, v_column + group * BV], bar, of_v.index(slot * GROUPS + group))
        for j in gl.static_range(SQUARE):
            async_load(squares[j], [row, i_h * BT], bar, square.index(slot * SQUARE + j))
        for j in gl.static_range(TALL):
            async_load(talls[j], [row, i_h * BK], bar, tall.index(slot * TALL + j))
        factors.index(slot).store(gl.exp2(total))
        barrier()  # all lanes must have written before one signals
        mbarrier.arrive(bar, count=1)
        row += step
        sums += step * row_size
        total = gl.load(sums, mask=at < gl.where(i + 1 < slots, FACTORS, 0))


@gluon.jit
def multiply(group: gl.constexpr, ring, place, o, states, h0, ht, o_of, states_of, BT: gl.constexpr,
             BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
             TWO_WRITES: gl.constexpr, ERASE_RATE: gl.constexpr, HAS_H0: gl.constexpr, HAS_HT: gl.constexpr,
             V_FIRST: gl.constexpr, STAGES: gl.constexpr):
    """Compute all rows for BV columns of the state; this is the program of a group of four warps.

    place: what ``own_rows`` returns without head and sequence, and then: v_column, the program's first column
    in v and o; table, the row of ``states`` where the entry of its first rows begins; and step, the rows from
    one entry to the next.
    """
    v0, row0, slots, entering, leaving, v_column, table, step = place
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    tall, square, of_v, factors, full, empty = ring
    dtype: gl.constexpr = tall.dtype
    s_o, s_state = o_of.index(group), states_of.index(group)
    v0 += group * BV
    v_column += group * BV
    TALL: gl.constexpr = 2 + TWO_WRITES + (states is None)
    SQUARE: gl.constexpr = 1 if states is not None else 2 + TWO_WRITES
    if HAS_H0:
        h = gl.load(state_tile(h0, entering, v0, 0, of_state, BK, V, BV, V_FIRST)).to(gl.float32)
    else:
        h = gl.zeros([BV, BK], gl.float32, of_state)
    nothing = gl.zeros([BV, BT], gl.float32, of_chunk)
    entered = h.to(dtype)
    for i in range(slots):
        slot = i % STAGES
        at, to = slot * TALL, slot * SQUARE
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        if states is not None:
            tma.store_wait(1)  # the buffer of the last state is free now; that of x may not be
            s_state.permute((1, 0)).store(entered)
            fence_async_shared()
            async_store(states, [table + i * step, v0], s_state)
        for j in gl.static_range(ROWS // BT):
            b_v = of_v.index(slot * GROUPS + group).slice(j * BT, BT).permute((1, 0))
            b_M = square.index(to).slice(j * BT, BT).permute((1, 0))
            b_W = tall.index(at).slice(j * BT, BT).permute((1, 0))
            b_b = tall.index(at + 1).slice(j * BT, BT)
            read = gl.convert_layout(entered, left)
            x = warpgroup_mma(b_v, b_M, nothing, use_acc=False, is_async=True)
            x = warpgroup_mma(read, b_W, x, is_async=True)
            if states is None:
                b_q = tall.index(at + TALL - 1).slice(j * BT, BT).permute((1, 0))
                out = warpgroup_mma(read, b_q, nothing, use_acc=False, is_async=True)
            h = h * factors.index(slot).slice(j * BK, BK).load(gl.SliceLayout(0, of_state))[None, :]
            if states is None:
                x = warpgroup_mma_wait(1, [x])
            else:
                x = warpgroup_mma_wait(0, [x])
            b_x = x.to(dtype)
            h = warpgroup_mma(gl.convert_layout(b_x, left_of_state), b_b, h, is_async=True)
            if ERASE_RATE:  # see dplr_scan
                low = (x - b_x.to(gl.float32)).to(dtype)
                h = warpgroup_mma(gl.convert_layout(low, left_of_state), b_b, h, is_async=True)
            if TWO_WRITES:
                h = warpgroup_mma(b_v, tall.index(at + 2).slice(j * BT, BT), h, is_async=True)
            if states is None:
                b_P = square.index(to + 1).slice(j * BT, BT).permute((1, 0))
                if TWO_WRITES:
                    b_R = square.index(to + 2).slice(j * BT, BT).permute((1, 0))
                    out = warpgroup_mma(b_v, b_R, out, is_async=True)
                out = warpgroup_mma(gl.convert_layout(b_x, left), b_P, out, is_async=True)
                h, out = warpgroup_mma_wait(0, [h, out])
            else:
                h = warpgroup_mma_wait(0, [h])
                out = x
            entered = h.to(dtype)
            if j == 0:
                if states is None:
                    tma.store_wait(0)
                else:
                    tma.store_wait(1)
            s_o.slice(j * BT, BT).permute((1, 0)).store(out.to(s_o.dtype))
        barrier()  # all warps must have read the slot before one thread signals
        mbarrier.arrive(empty.index(slot), count=1)
        fence_async_shared()
        async_store(o, [row0 + i * ROWS, v_column], s_o)
    tma.store_wait(0)
    if HAS_HT:
        if leaving >= 0:
            zero = gl.minimum(slots, 0)  # a known 0 would make the compiler keep h0's addresses until here
            gl.store(state_tile(ht, leaving, v0, zero, of_state, BK, V, BV, V_FIRST), h)


@described(
    **dict.fromkeys(("W", "b_out", "q_in", "k_out"), lambda x: (x["HV"] * x["BK"], 64, x["BK"])),
    **dict.fromkeys(("M", "P", "R"), lambda x: (x["HV"] * x["BT"], 64, x["BT"])),
    **dict.fromkeys(("v", "o"), lambda x: (x["HV"] * x["V"], 64, x["BV"])),
    states=lambda x: (x["V"], x["BK"], x["BV"], x["slots"] * x["HV"] * x["BK"]))
@gluon.jit(do_not_specialize=["T", "L", "rows", "slots"])
def dplr_overlapped(
    W, b_out, q_in, k_out,  # [rows, HV, K]
    M, P, R,  # [rows, HV, BT]
    v,  # [rows, HV, V]
    G,  # [rows, HV, K], fp32: decays summed within each chunk
    h0,  # [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K]
    o,  # [rows, HV, V]
    states,  # [slots, HV, K, V], one for each ROWS rows, or None
    ht,  # [N, HV, K, V] or, with V_FIRST, [N, HV, V, K], fp32
    undivided,  # [N, HV], int32, or None
    T,  # tokens of a sequence, a multiple of ROWS
    HV, L,
    rows,  # number of rows in the batch
    slots,  # number of entries of states
    V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, TWO_WRITES: gl.constexpr, ERASE_RATE: gl.constexpr, HAS_H0: gl.constexpr,
    HAS_HT: gl.constexpr, V_FIRST: gl.constexpr,
):
    """Run the forward scan in Gluon: write the outputs o and the final states ht, like dplr_scan.

    With ``states``, write the states that enter the chunks and, in o, the values X instead, like dplr_states.
    q_in, P and R are None then.

    One program computes GROUPS (1 or 2) times BV columns of the state of one head. BK is K.
    """
    v0, i_h, n, row0, count, entering, leaving = own_rows(undivided, T, HV, L, V, GROUPS * BV, ROWS, False)
    column, step = i_h * V + v0, HV * BK
    place = (v0, row0, count, entering, leaving, column, (row0 // ROWS + n) * step + i_h * BK, step)
    talls = (W, b_out)
    squares = (M,)
    # mypy gives each tuple a fixed length, but Gluon runs these statements while it compiles.
    if TWO_WRITES:
        talls = talls + (k_out,)  # type: ignore[assignment]
    if states is None:
        talls = talls + (q_in,)  # type: ignore[assignment]
        squares = squares + (P,)  # type: ignore[assignment]
        if TWO_WRITES:
            squares = squares + (R,)  # type: ignore[assignment]
    ring = ring_of(talls, squares, v, BT, BK, BV, GROUPS, STAGES)
    s_o = gl.allocate_shared_memory(o.dtype, [GROUPS, ROWS, BV], o.layout)
    s_state = s_o
    if states is not None:
        s_state = gl.allocate_shared_memory(v.dtype, [GROUPS, BK, BV], states.layout)
    if GROUPS == 1:
        gl.warp_specialize(
            [(multiply, (0, ring, place, o, states, h0, ht, s_o, s_state, BT, BK, V, BV, GROUPS, TWO_WRITES,
                         ERASE_RATE, HAS_H0, HAS_HT, V_FIRST, STAGES)),
             (load, (ring, talls, squares, v, G, row0, i_h, column, count, step, BT, BK, BV, GROUPS, STAGES,
                     False))],
            [1], [40])
    else:  # see delta_overlapped for the registers
        gl.warp_specialize(
            [(multiply, (0, ring, place, o, states, h0, ht, s_o, s_state, BT, BK, V, BV, GROUPS, TWO_WRITES,
                         ERASE_RATE, HAS_H0, HAS_HT, V_FIRST, STAGES)),
             (multiply, (1, ring, place, o, states, h0, ht, s_o, s_state, BT, BK, V, BV, GROUPS, TWO_WRITES,
                         ERASE_RATE, HAS_H0, HAS_HT, V_FIRST, STAGES)),
             (load, (ring, talls, squares, v, G, row0, i_h, column, count, step, BT, BK, BV, GROUPS, STAGES,
                     False))],
            [4, 1], [232, 40])
