"""The reverse scan of ``backward.py`` for Hopper, in Gluon, for one writing vector.

It works like the forward scan in ``overlapping.py``. With all matrices transposed, a chunk needs

    dX^T = do^T P + dh^T b_out^T
    dY^T = dX^T T
    dh^T = dh^T Diag(e^{G_L}) + do^T q_in + dY^T a_in
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
from flashlin.kernels.dplr.overlapping import ROWS, load, ring_of
from flashlin.kernels.gluon_ops import async_store, barrier, own_rows, state_tile


@gluon.jit
def multiply_back(group: gl.constexpr, ring, place, dy, dstates, dht, dh0, dy_of, states_of, BT: gl.constexpr,
                  BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
                  HAS_DHT: gl.constexpr, HAS_DH0: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr):
    """Compute all rows, from last to first, for BV columns; this is the program of a group of four warps.

    ``multiply`` describes the arguments. Here they contain gradients in place of states and outputs.
    """
    v0, row0, slots, entering, leaving, v_column, table, step = place
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    tall, square, of_v, factors, full, empty = ring
    dtype: gl.constexpr = tall.dtype
    s_dy, s_state = dy_of.index(group), states_of.index(group)
    v0 += group * BV
    v_column += group * BV
    if HAS_DHT:
        dh = gl.load(state_tile(dht, entering, v0, 0, of_state, BK, V, BV, V_FIRST)).to(gl.float32)
    else:
        dh = gl.zeros([BV, BK], gl.float32, of_state)
    nothing = gl.zeros([BV, BT], gl.float32, of_chunk)
    for i in range(slots):
        slot = i % STAGES
        at = slots - 1 - i
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        entered = dh.to(dtype)
        tma.store_wait(1)  # the buffer of the last state is free now; that of dy may not be
        s_state.permute((1, 0)).store(entered)
        fence_async_shared()
        async_store(dstates, [table + at * step, v0], s_state)
        for j in gl.static_range(ROWS // BT - 1, -1, -1):
            b_do = of_v.index(slot * GROUPS + group).slice(j * BT, BT).permute((1, 0))
            b_P = square.index(slot * 3).slice(j * BT, BT)
            b_T = square.index(slot * 3 + 1).slice(j * BT, BT)
            b_low = square.index(slot * 3 + 2).slice(j * BT, BT)
            b_b = tall.index(slot * 3).slice(j * BT, BT).permute((1, 0))
            b_q = tall.index(slot * 3 + 1).slice(j * BT, BT)
            b_a = tall.index(slot * 3 + 2).slice(j * BT, BT)
            dx = warpgroup_mma(b_do, b_P, nothing, use_acc=False, is_async=True)
            dx = warpgroup_mma(gl.convert_layout(entered, left), b_b, dx, is_async=True)
            dh = dh * factors.index(slot).slice(j * BK, BK).load(gl.SliceLayout(0, of_state))[None, :]
            dh = warpgroup_mma(b_do, b_q, dh, is_async=True)
            dx = warpgroup_mma_wait(1, [dx])
            # As in dplr_reverse, the rounding errors of both operands are added with two more products.
            high = dx.to(dtype)
            low = gl.convert_layout((dx - high.to(gl.float32)).to(dtype), left)
            high = gl.convert_layout(high, left)
            y = warpgroup_mma(high, b_T, nothing, use_acc=False, is_async=True)
            y = warpgroup_mma(low, b_T, y, is_async=True)
            y = warpgroup_mma(high, b_low, y, is_async=True)
            dh, y = warpgroup_mma_wait(0, [dh, y])
            b_y = y.to(dtype)
            dh = warpgroup_mma(gl.convert_layout(b_y, left_of_state), b_a, dh, is_async=True)
            if j == ROWS // BT - 1:
                tma.store_wait(1)  # the buffer of the last dy is free now; that of the state may not be
            s_dy.slice(j * BT, BT).permute((1, 0)).store(b_y)
            dh = warpgroup_mma_wait(0, [dh])
            entered = dh.to(dtype)
        barrier()  # all warps must have read the slot before one thread signals
        mbarrier.arrive(empty.index(slot), count=1)
        fence_async_shared()
        async_store(dy, [row0 + at * ROWS, v_column], s_dy)
    tma.store_wait(0)
    if HAS_DH0:
        if leaving >= 0:
            zero = gl.minimum(slots, 0)  # a known 0 would make the compiler keep dht's addresses until here
            gl.store(state_tile(dh0, leaving, v0, zero, of_state, BK, V, BV, V_FIRST), dh)


@described(
    **dict.fromkeys(("b_out", "q_in", "a_in"), lambda x: (x["HV"] * x["BK"], 64, x["BK"])),
    **dict.fromkeys(("P", "T_", "T_low"), lambda x: (x["HV"] * x["BT"], 64, x["BT"])),
    **dict.fromkeys(("do", "dy"), lambda x: (x["HV"] * x["V"], 64, x["BV"])),
    dstates=lambda x: (x["V"], x["BK"], x["BV"], x["slots"] * x["HV"] * x["BK"]))
@gluon.jit(do_not_specialize=["T", "L", "rows", "slots"])
def dplr_overlapped_back(
    b_out, q_in, a_in,  # [rows, HV, K]
    P, T_, T_low,  # [rows, HV, BT]
    do,  # [rows, HV, V], of the dtype of the operands
    G,  # [rows, HV, K], fp32: decays summed within each chunk
    dht,  # [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K]
    dy,  # [rows, HV, V]
    dh0,  # [N, HV, K, V] or, with V_FIRST, [N, HV, V, K], fp32
    dstates,  # [slots, HV, K, V], one for each ROWS rows
    undivided,  # [N, HV], int32, or None
    T,  # tokens of a sequence, a multiple of ROWS
    HV, L,
    rows,  # number of rows in the batch
    slots,  # number of entries of dstates
    V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, HAS_DHT: gl.constexpr, HAS_DH0: gl.constexpr, V_FIRST: gl.constexpr,
):
    """Run the reverse scan in Gluon: write dy, dstates and dh0, like dplr_reverse.

    One program computes GROUPS (1 or 2) times BV columns of the state of one head. BK is K.
    """
    v0, i_h, n, row0, count, entering, leaving = own_rows(undivided, T, HV, L, V, GROUPS * BV, ROWS, True)
    column, step = i_h * V + v0, HV * BK
    place = (v0, row0, count, entering, leaving, column, (row0 // ROWS + n) * step + i_h * BK, step)
    talls, squares = (b_out, q_in, a_in), (P, T_, T_low)
    ring = ring_of(talls, squares, do, BT, BK, BV, GROUPS, STAGES)
    s_dy = gl.allocate_shared_memory(do.dtype, [GROUPS, ROWS, BV], dy.layout)
    s_state = gl.allocate_shared_memory(do.dtype, [GROUPS, BK, BV], dstates.layout)
    if GROUPS == 1:
        gl.warp_specialize(
            [(multiply_back, (0, ring, place, dy, dstates, dht, dh0, s_dy, s_state, BT, BK, V, BV, GROUPS,
                              HAS_DHT, HAS_DH0, V_FIRST, STAGES)),
             (load, (ring, talls, squares, do, G, row0, i_h, column, count, step, BT, BK, BV, GROUPS, STAGES,
                     True))],
            [1], [40])
    else:  # see delta_overlapped for the registers
        gl.warp_specialize(
            [(multiply_back, (0, ring, place, dy, dstates, dht, dh0, s_dy, s_state, BT, BK, V, BV, GROUPS,
                              HAS_DHT, HAS_DH0, V_FIRST, STAGES)),
             (multiply_back, (1, ring, place, dy, dstates, dht, dh0, s_dy, s_state, BT, BK, V, BV, GROUPS,
                              HAS_DHT, HAS_DH0, V_FIRST, STAGES)),
             (load, (ring, talls, squares, do, G, row0, i_h, column, count, step, BT, BK, BV, GROUPS, STAGES,
                     True))],
            [4, 1], [232, 40])
