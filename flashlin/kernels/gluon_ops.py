"""Functions that the Gluon kernels for Hopper share (``*/overlapping*.py``).

The scans have a ring of STAGES slots in shared memory. One warp loads the slots in turn with TMA, and groups
of four warps multiply. The gradients' kernels (``overlapping_grads.py``) have no loading warp.

Gluon came with Triton 3.5, so only these kernels import this module.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Triton 3.7 and 3.8 renamed these functions, and 3.9 removed the old names.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Triton 3.9 renamed _reinterpret to reinterpret.
REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpreted(x, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Return a view of shared memory with another dtype, shape and layout."""
    if REINTERPRET:
        return x.reinterpret(dtype, shape, layout)
    else:
        return x._reinterpret(dtype, shape, layout)


@gluon.jit
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr, READERS: gl.constexpr):
    """Return the barriers ``full`` and ``empty`` of a ring, one of each per slot.

    ARRIVALS: 1 for the bytes of TMA or for a group that writes to the slot, 2 if the loading warp also writes
    to it. READERS: groups that read a slot.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=ARRIVALS)
        mbarrier.init(empty.index(slot), count=READERS)
    fence_async_shared()
    return full, empty


@gluon.jit
def state_tile(x, nh, v0, k0, layout: gl.constexpr, BK: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
               V_FIRST: gl.constexpr):
    """Return pointers to a [BV, BK] tile of state nh, stored [K, V] or, with V_FIRST, [V, K]; K is BK."""
    rows = gl.arange(0, BV, gl.SliceLayout(1, layout))[:, None]
    columns = (k0 + gl.arange(0, BK, gl.SliceLayout(0, layout)))[None, :]
    state = x + nh.to(gl.int64) * (BK * V)
    if V_FIRST:
        return state + v0 * BK + (rows * BK + columns)
    else:
        return state + v0 + (rows + columns * V)


@gluon.jit
def packed_rows(undivided, bounds, T, N, H, L, V: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr,
                REVERSE: gl.constexpr):
    """Return the place of a program, like ``own_rows``, for packed sequences.

    Rows after the last ROWS rows of a sequence are left out. Segments are numbered as in
    ``sequence_split.part_of``.

    bounds: [N + 1].
    """
    NV: gl.constexpr = V // COLUMNS
    program = gl.program_id(0)
    own = program // NV
    i_h = own % H
    n = own // H
    i_part = n * 0
    if L < T:
        i_p = n
        n = i_p * 0
        high = gl.minimum(i_p, N - 1)
        while n < high:
            middle = (n + high + 1) // 2
            before = (gl.load(bounds + middle) // L).to(gl.int32) + middle <= i_p
            n = gl.where(before, middle, n)
            high = gl.where(before, high, middle - 1)
        i_part = i_p - n - (gl.load(bounds + n) // L).to(gl.int32)
    row0 = gl.load(bounds + n).to(gl.int32)
    whole = gl.load(bounds + n + 1).to(gl.int32) - row0
    last = gl.maximum((whole - 1) // L, 0)
    length = gl.maximum(gl.minimum(whole - i_part * L, L), 0)
    ends = i_part == (0 if REVERSE else last)
    entering = own
    if undivided is not None:
        if gl.load(undivided + n * H + i_h) != 0:
            length = gl.where(i_part == 0, whole, 0)
            ends = i_part == 0
            if REVERSE:
                entering = gl.where(ends, own + last * H, own)
    leaving = gl.where(ends, n * H + i_h, -1)
    return program % NV * COLUMNS, i_h, n, row0 + i_part * L, length // ROWS, entering, leaving


@gluon.jit
def own_rows(undivided, T, H, L, V: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr,
             REVERSE: gl.constexpr):
    """Return the place of a program that computes COLUMNS columns of one head in one segment of a sequence.

    The values are: v0, the first column; i_h, the head; n, the sequence; row0, the first row; how many times
    ROWS rows follow; the number of the state that enters the program; and the number of the state that it
    leaves, or a negative number if that state is not needed. With REVERSE, it runs from the last row to the
    first.

    undivided: [N, H] or None. The program of the first segment computes all of an undivided head.
    """
    NV: gl.constexpr = V // COLUMNS
    program = gl.program_id(0)
    own = program // NV
    i_h = own % H
    i_p = own // H
    parts = gl.maximum((T - 1) // L + 1, 1)
    n = i_p // parts
    i_part = i_p % parts
    length = gl.minimum(T - i_part * L, L)
    entering = own
    ends = i_part == 0 if REVERSE else i_part == parts - 1
    if undivided is not None:
        whole = gl.load(undivided + n * H + i_h) != 0
        length = gl.where(whole, gl.where(i_part == 0, T, 0), length)
        if REVERSE:
            entering = gl.where(whole & (i_part == 0), own + (parts - 1) * H, own)
        else:
            ends = gl.where(whole, i_part == 0, ends)
    leaving = gl.where(ends, n * H + i_h, -1)
    return program % NV * COLUMNS, i_h, n, n * T + i_part * L, length // ROWS, entering, leaving
