"""Gradients of the chunks that fit one decay reference for Hopper, in Gluon, for one writing vector.

It computes the formulas of ``one_reference.py``, with one program for each chunk and head. TMA loads the rows
do, x and dy once, and the states and their gradients in strips of BK channels. The next strip arrives while
a strip is computed. Two programs fit a multiprocessor, so one computes while the other waits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlin.compat.descriptors import described
from flashlin.kernels.gla.decays import but_last
from flashlin.kernels.gluon_ops import async_load, barrier


@gluon.jit
def add(x, y):
    """Combine two adjacent ranges of rows, for a running sum."""
    return x + y


@gluon.jit
def load_strip(states, dstates, ring_h, ring_dh, full, table, i, BK: gl.constexpr, BV: gl.constexpr):
    """Load strip i of the channels of a chunk's state and its gradient, whose first row is ``table``."""
    bar = full.index(i % 2)
    mbarrier.expect(bar, 4 * BK * BV)
    async_load(states, [table + i * BK, 0], bar, ring_h.index(i % 2))
    async_load(dstates, [table + i * BK, 0], bar, ring_dh.index(i % 2))


@described(
    **dict.fromkeys(("do", "x", "dy"), lambda x: (x["HV"] * x["BV"], x["BT"], x["BV"])),
    **dict.fromkeys(("states", "dstates"),
                    lambda x: (x["BV"], x["BK"], x["BV"], x["slots"] * x["HV"] * x["K"])))
@gluon.jit(do_not_specialize=["T", "rows", "slots", "scale"])
def dplr_overlapped_grads(
    do, x, dy,  # [rows, HV, V], of the dtype of q
    states, dstates,  # [slots, HV, K, V], one entry for each chunk
    q, k,  # [rows, H, K]
    v,  # [rows, HV, V]
    a,  # [rows, HV, K]: with ERASE_RATE the erase rates, else None
    beta,  # [rows, HV], or None with ERASE_RATE
    G,  # [rows, HV, K], fp32: decays summed within each chunk
    dq, dk,  # [rows, HV, K]
    dv,  # [rows, HV, V]
    da,  # [rows, HV, K], or None
    dbeta,  # [rows, HV], fp32, or None
    dg,  # [rows, HV, K], fp32
    served,  # [slots, HV], int32: 1 for chunks that fit one decay reference
    scale,
    T,  # tokens of a sequence, a multiple of BT
    rows,  # number of rows in the batch
    slots,  # number of entries of states
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr,
    BV: gl.constexpr, ERASE_RATE: gl.constexpr,
):
    """Compute the gradients of the chunks that fit one decay reference, like dplr_grads_one.

    BV is V. The numbers of heads are constants, because otherwise addresses need too many registers.
    """
    of_pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    of_strip: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    a_row: gl.constexpr = gl.SliceLayout(1, of_strip)
    a_channel: gl.constexpr = gl.SliceLayout(0, of_strip)
    of_sums: gl.constexpr = gl.BlockedLayout([16, 1], [4, 8], [1, 4], [1, 0])  # a warp has all rows
    of_values: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = do.dtype
    program = gl.program_id(0)
    i_h = program % HV
    chunk = program // HV
    row = chunk * BT
    slot = (chunk + chunk // (T // BT)) * HV + i_h
    if gl.load(served + slot) > 0:
        s_do = gl.allocate_shared_memory(dtype, [BT, BV], do.layout)
        s_x = gl.allocate_shared_memory(dtype, [BT, BV], x.layout)
        s_dy = gl.allocate_shared_memory(dtype, [BT, BV], dy.layout)
        ring_h = gl.allocate_shared_memory(dtype, [2, BK, BV], states.layout)
        ring_dh = gl.allocate_shared_memory(dtype, [2, BK, BV], dstates.layout)
        pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BT], dtype)
        strip: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BK], dtype)
        s_P = gl.allocate_shared_memory(dtype, [BT, BT], pairs)
        s_L = gl.allocate_shared_memory(dtype, [BT, BT], pairs)
        s_k = gl.allocate_shared_memory(dtype, [BT, BK], strip)
        s_q = gl.allocate_shared_memory(dtype, [BT, BK], strip)
        full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(3):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        barrier()
        bar = full.index(2)
        mbarrier.expect(bar, 6 * BT * BV)
        async_load(do, [row, i_h * BV], bar, s_do)
        async_load(x, [row, i_h * BV], bar, s_x)
        async_load(dy, [row, i_h * BV], bar, s_dy)
        for i in gl.static_range(2):
            load_strip(states, dstates, ring_h, ring_dh, full, slot * K, i, BK, BV)
        first = row.to(gl.int64) * HV + i_h
        tokens = gl.arange(0, BT, gl.SliceLayout(1, of_values)).to(gl.int64)
        at_v = tokens[:, None] * (HV * BV) + gl.arange(0, BV, gl.SliceLayout(0, of_values))[None, :]
        b_v = gl.load(v + first * BV + at_v)
        # Scores of pairs, and the gradients of v and beta.
        mbarrier.wait(bar, 0)
        none = gl.zeros([BT, BT], gl.float32, of_pairs)
        P = warpgroup_mma(s_do, s_x.permute((1, 0)), none, use_acc=False, is_async=True)
        L = warpgroup_mma(s_dy, s_x.permute((1, 0)), none, use_acc=False, is_async=True)
        P, L = warpgroup_mma_wait(0, [P, L])
        reads = gl.arange(0, BT, gl.SliceLayout(1, of_pairs))[:, None]
        writes = gl.arange(0, BT, gl.SliceLayout(0, of_pairs))[None, :]
        qb = gl.convert_layout(gl.sum(gl.where(reads == writes, P, 0.0), 1) * scale, a_row)
        s_P.store(gl.where(reads > writes, P * scale, 0.0).to(dtype))
        s_L.store(gl.where(reads > writes, L, 0.0).to(dtype))
        b_y = s_dy.load(of_values)
        b_dbeta = gl.zeros([BT], gl.float32, a_row)
        if ERASE_RATE:
            gl.store(dv + first * BV + at_v, b_y.to(dv.dtype.element_ty))
        else:
            wide = b_y.to(gl.float32)
            of_token = gl.load(beta + first + tokens * HV)
            gl.store(dv + first * BV + at_v, (wide * of_token[:, None]).to(dv.dtype.element_ty))
            b_dbeta = gl.convert_layout(gl.sum(wide * b_v.to(gl.float32), 1), a_row)
        token = gl.arange(0, BT, a_row).to(gl.int64)
        column = gl.arange(0, BK, a_channel).to(gl.int64)
        at = token[:, None] * (HV * K) + column[None, :]
        at_qk = token[:, None] * (H * K) + column[None, :]
        q += (row.to(gl.int64) * H + i_h // (HV // H)) * K
        k += (row.to(gl.int64) * H + i_h // (HV // H)) * K
        G += first * K
        dq += first * K
        dk += first * K
        dg += first * K
        b_rate = gl.zeros([BT], gl.float32, a_row)
        if ERASE_RATE:
            a += first * K
            da += first * K
        else:
            b_rate = gl.load(beta + first + token * HV)
        at_dg = gl.arange(0, BT, gl.SliceLayout(1, of_sums)).to(gl.int64)[:, None] * (HV * K) + gl.arange(
            0, BK, gl.SliceLayout(0, of_sums))[None, :]
        nothing = gl.zeros([BT, BK], gl.float32, of_strip)
        b_G, b_q, b_k = gl.load(G + at), gl.load(q + at_qk), gl.load(k + at_qk)
        for i in range(K // BK):
            k0 = i * BK
            begin = gl.load(G + k0 + column)
            total = gl.load(G + k0 + (BT - 1) * HV * K + column)
            rate = b_rate[:, None]
            if ERASE_RATE:
                rate = gl.load(a + k0 + at).to(gl.float32)
            s_h, s_dh = ring_h.index(i % 2), ring_dh.index(i % 2)
            mbarrier.wait(full.index(i % 2), (i // 2) & 1)
            b_dq = warpgroup_mma(s_do, s_h.permute((1, 0)), nothing, use_acc=False, is_async=True)
            b_da = warpgroup_mma(s_dy, s_h.permute((1, 0)), nothing, use_acc=False, is_async=True)
            b_db = warpgroup_mma(s_x, s_dh.permute((1, 0)), nothing, use_acc=False, is_async=True)
            across = gl.sum(s_h.load(of_values).to(gl.float32) * s_dh.load(of_values).to(gl.float32), 1)
            middle = (begin + total) * 0.5
            written = gl.exp2(middle[None, :] - b_G)
            reading = gl.exp2(b_G - middle[None, :])
            wide_q, wide_k = b_q.to(gl.float32), b_k.to(gl.float32)
            X_b = (wide_k * written).to(dtype)
            X_q = (wide_q * reading).to(dtype)
            b_a = wide_k * -rate
            X_a = (b_a * reading).to(dtype)
            b_dq, b_da, b_db = warpgroup_mma_wait(0, [b_dq, b_da, b_db])
            s_k.store(X_b)
            s_q.store(X_q)
            fence_async_shared()
            barrier()
            by_P = warpgroup_mma(s_P, s_k, nothing, use_acc=False, is_async=True)
            by_L = warpgroup_mma(s_L, s_k, nothing, use_acc=False, is_async=True)
            back = warpgroup_mma(s_P.permute((1, 0)), s_q, nothing, use_acc=False, is_async=True)
            entered = reading * gl.exp2(middle)[None, :]
            left = written * gl.exp2(total - middle)[None, :]
            b_dq *= entered * scale
            b_da *= entered
            b_db *= left
            here = wide_q * b_dq + b_a * b_da
            sent = wide_k * b_db
            by_P, by_L, back = warpgroup_mma_wait(0, [by_P, by_L, back])
            barrier()  # all warps must have read the strip, X_b and X_q
            s_k.store(X_a)
            fence_async_shared()
            if i + 2 < K // BK:
                load_strip(states, dstates, ring_h, ring_dh, full, slot * K, i + 2, BK, BV)
            barrier()
            back = warpgroup_mma(s_L.permute((1, 0)), s_k, back, is_async=True)
            # The term of a pair is added at the row that reads and subtracted at the row that writes, as the
            # same product of the same rounded numbers.
            here += X_q.to(gl.float32) * by_P + X_a.to(gl.float32) * by_L
            b_dq += by_P * reading + qb[:, None] * wide_k
            b_da += by_L * reading
            gl.store(dq + k0 + at, b_dq.to(dq.dtype.element_ty))
            if ERASE_RATE:
                gl.store(da + k0 + at, (-wide_k * b_da).to(da.dtype.element_ty))
            else:
                b_dbeta -= gl.sum(wide_k * b_da, 1)
            back = warpgroup_mma_wait(0, [back])
            here -= X_b.to(gl.float32) * back
            b_db += back * written + qb[:, None] * wide_q
            gl.store(dk + k0 + at, (b_db - rate * b_da).to(dk.dtype.element_ty))
            sent = gl.convert_layout(sent, of_sums)
            after = gl.minimum(k0 + BK, K - BK)  # the next strip arrives while this one's sums are computed
            b_G, b_q, b_k = gl.load(G + after + at), gl.load(q + after + at_qk), gl.load(k + after + at_qk)
            later = gl.associative_scan(gl.convert_layout(here, of_sums), 0, add, reverse=True)
            earlier, last = gl.associative_scan((gl.zeros_like(sent), sent), 0, but_last)
            across = gl.convert_layout(across, gl.SliceLayout(0, of_sums))
            kept = gl.exp2(gl.convert_layout(total, gl.SliceLayout(0, of_sums)))
            gl.store(dg + k0 + at_dg, later + earlier + (kept * across)[None, :])
            barrier()  # all warps must have read X_a
        if not ERASE_RATE:
            gl.store(dbeta + first + token * HV, b_dbeta)
