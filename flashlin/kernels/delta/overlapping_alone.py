"""The first step of split sequences (``parts.py``) for Hopper, in Gluon, structured like ``overlapping.py``.

The kernel computes y, u and the state as the forward scan does. For a transfer matrix, it sets v = 0 and
starts from the identity. Segments may have windows (``dplr/windows.py``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlin.compat.descriptors import described
from flashlin.kernels.delta.overlapping import load, ring_of
from flashlin.kernels.gluon_ops import barrier, state_tile


@gluon.jit
def multiply_alone(group: gl.constexpr, ring, work, V: gl.constexpr, GROUPS: gl.constexpr,
                   DECAY: gl.constexpr, V_FIRST: gl.constexpr, HALF: gl.constexpr):
    """Compute all chunks for BV columns of a state or transfer; this is the program of a group of four warps.

    work: a tuple of
        alone, transfer: the two results
        own: the number of the segment and head
        v0: the program's first column in a state
        c0: its first column in the transfer matrix, negative if it computes a state
        chunks: number of its chunks
    """
    alone, transfer, own, v0, c0, chunks = work
    ring_q, ring_k, ring_v, ring_A, ring_low, lines, full, empty = ring
    dtype: gl.constexpr = ring_k.dtype
    STAGES: gl.constexpr = ring_k.shape[0]
    BT: gl.constexpr = ring_k.shape[1]
    BK: gl.constexpr = ring_k.shape[2]
    BV: gl.constexpr = ring_v.shape[2]
    LINES: gl.constexpr = 5 if DECAY == 2 else 1
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    a_column: gl.constexpr = gl.SliceLayout(0, of_chunk)
    v0 += group * BV
    c0 += group * BV
    columns = c0 + gl.arange(0, BV, gl.SliceLayout(1, of_state))
    h = gl.where(columns[:, None] == gl.arange(0, BK, gl.SliceLayout(0, of_state))[None, :], 1.0, 0.0)
    nothing = gl.zeros([BV, BT], gl.float32, of_chunk)
    none = gl.zeros([BV, BK], gl.float32, of_state)
    for i in range(chunks):
        slot = i % STAGES
        b_k, line = ring_k.index(slot), slot * LINES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        entered = gl.convert_layout(h.to(dtype), left)
        y = warpgroup_mma(entered, b_k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        b_v = ring_v.index(slot * GROUPS + group).permute((1, 0)).load(of_chunk).to(gl.float32)
        b_v = gl.where(c0 < 0, b_v, 0.0)
        y = warpgroup_mma_wait(0, [y])
        if DECAY == 2:
            y = y * lines.index(line + 2).load(a_column)[None, :]
            h = h * lines.index(line + 4).load(gl.SliceLayout(1, of_state))[:, None]
        y = (b_v - y) * lines.index(line).load(a_column)[None, :]
        high = y.to(dtype)
        low = gl.convert_layout((y - high.to(gl.float32)).to(dtype), left)
        high = gl.convert_layout(high, left)
        b_A = ring_A.index(slot).permute((1, 0))
        u = warpgroup_mma(high, b_A, nothing, use_acc=False, is_async=True)
        if HALF:
            u = warpgroup_mma(low, b_A, u, is_async=True)
            u = warpgroup_mma(high, ring_low.index(slot).permute((1, 0)), u, is_async=True)
        u = warpgroup_mma_wait(0, [u])
        if DECAY == 2:
            u = u * lines.index(line + 3).load(a_column)[None, :]
        # a separate accumulator, for the reason in ``sequence_split.added``
        w = gl.convert_layout(u.to(dtype), left_of_state)
        w = warpgroup_mma(w, b_k, none, use_acc=False, is_async=True)
        h = h + warpgroup_mma_wait(0, [w])
        barrier()  # all warps must have read the slot before one thread signals
        mbarrier.arrive(empty.index(slot), count=1)
    if chunks > 0:
        zero = gl.minimum(chunks, 0)  # a known 0 would make the compiler keep addresses during the loop
        if c0 < 0:
            gl.store(state_tile(alone, own, v0, zero, of_state, BK, V, BV, V_FIRST), h)
        elif c0 < BK:
            gl.store(state_tile(transfer, own, c0, zero, of_state, BK, BK, BV, False), h)


@described(
    k=lambda x: (x["H"] * x["BK"], x["BT"], x["BK"]),
    v=lambda x: (x["HV"] * x["V"], x["BT"], x["BV"]),
    A=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]),
    A_low=lambda x: (x["HV"] * x["BT"], x["BT"], x["BT"]))
@gluon.jit(do_not_specialize=["T", "R", "L", "rows"])
def delta_overlapped_alone(
    k, v, A, A_low, betas, G, alone, transfer, undivided, windows, windows_back, T, H, HV, R, L, rows,
    V: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, DECAY: gl.constexpr, HAS_H0: gl.constexpr, HAS_DHT: gl.constexpr,
    V_FIRST: gl.constexpr, HALF: gl.constexpr,
):
    """Write ``alone`` and the transfer of each segment, and set ``undivided`` to zero, like delta_alone.

    One program computes GROUPS (1 or 2) times BV columns of one of the two results for one head. BK is K.

    windows, windows_back: see ``dplr_alone``.

    k: [rows, H, K].
    v: [rows, HV, V].
    A, A_low: [rows, HV, BT].
    betas, G: [HV, R], fp32.
    alone: [segments, HV, K, V] or, with V_FIRST, [segments, HV, V, K], fp32.
    transfer: [segments, HV, K, K], fp32.
    undivided: [N, HV], int32.
    windows, windows_back: [segments, HV], int32, or None.
    T: tokens of a sequence, a multiple of BT.
    rows: number of rows in the batch.
    """
    COLUMNS: gl.constexpr = GROUPS * BV
    NV: gl.constexpr = V // COLUMNS
    STRIPS: gl.constexpr = NV + (BK + COLUMNS - 1) // COLUMNS
    program = gl.program_id(0)
    strip = program % STRIPS
    own = program // STRIPS
    i_h = own % HV
    parts = gl.maximum((T - 1) // L + 1, 1)
    n = own // HV // parts
    i_part = own // HV % parts
    if (i_part == 0) & (strip == 0):
        gl.store(undivided + n * HV + i_h, 0)
    chunks = gl.minimum(T - i_part * L, L) // BT
    row0 = n * T + i_part * L
    ends = i_part == parts - 1
    first = i_part == 0
    unused = (ends & (not HAS_DHT)) | (first & (not HAS_H0))  # true if no launch reads the transfer
    start = 0
    if windows is not None:
        window = gl.load(windows + own)
        forgets = ends | (window != 0)
        if windows_back is not None:
            forgets = forgets & (first | (gl.load(windows_back + own) != 0))
        unused = unused | forgets
        start = gl.where(window == 0, 0, gl.maximum(chunks - gl.maximum(window, 0), 0))
    c0 = (strip - NV) * COLUMNS
    v0 = gl.where(c0 < 0, strip * COLUMNS, 0)
    start = gl.where(c0 < 0, start, 0)
    chunks = gl.where(gl.where(c0 < 0, ends, unused), 0, chunks - start)
    row0 += start * BT
    ring = ring_of(None, k, v, A, A_low if HALF else None, BT=BT, BK=BK, BV=BV, GROUPS=GROUPS, STAGES=STAGES,
                   DECAY=DECAY)
    reads = (None, k, v, A, A_low if HALF else None, betas, G)
    columns = (i_h // (HV // H) * BK, i_h * V + v0, i_h * BT)
    work = (alone, transfer, own, v0, c0, chunks)
    line = i_h.to(gl.int64) * R + row0
    if GROUPS == 1:
        gl.warp_specialize(
            [(multiply_alone, (0, ring, work, V, GROUPS, DECAY, V_FIRST, HALF)),
             (load, (ring, reads, row0, line, columns, chunks, GROUPS, DECAY, False))], [1], [40])
    else:  # see delta_overlapped for the registers
        gl.warp_specialize(
            [(multiply_alone, (0, ring, work, V, GROUPS, DECAY, V_FIRST, HALF)),
             (multiply_alone, (1, ring, work, V, GROUPS, DECAY, V_FIRST, HALF)),
             (load, (ring, reads, row0, line, columns, chunks, GROUPS, DECAY, False))], [4, 1], [232, 40])
