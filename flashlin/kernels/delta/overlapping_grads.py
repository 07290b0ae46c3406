"""The kernel of ``backward.py`` that computes the gradients of a chunk, for Hopper, in Gluon.

One group of four warps computes a chunk. Its products read both operands from shared memory, and two programs
share a multiprocessor. TMA loads the state and its gradient in strips of BK channels. The next strip arrives
while one is computed.
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
from flashlin.kernels.dplr.overlapping_grads import load_strip
from flashlin.kernels.gluon_ops import async_load, barrier


@described(
    **dict.fromkeys(("do", "u", "dy"), lambda x: (x["HV"] * x["BV"], x["BT"], x["BV"])),
    **dict.fromkeys(("states", "dstates"),
                    lambda x: (x["BV"], x["BK"], x["BV"], x["slots"] * x["HV"] * x["K"])))
@gluon.jit(do_not_specialize=["T", "R", "rows", "slots", "scale"])
def delta_overlapped_grads(
    do, u, dy,  # [rows, HV, V], of the dtype of q
    states, dstates,  # [slots, HV, K, V], one entry for each chunk
    q, k,  # [rows, H, K]
    v,  # [rows, HV, V]
    betas, G,  # [HV, R], fp32
    dq, dk,  # [rows, HV, K]
    dv,  # [rows, HV, V]
    dbeta, dg,  # [rows, HV], fp32; dg or None
    scale,
    T,  # tokens of a sequence, a multiple of BT
    R,
    rows,  # number of rows in the batch
    slots,  # number of entries of states
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BT: gl.constexpr, BK: gl.constexpr,
    BV: gl.constexpr, DECAY: gl.constexpr,
):
    """Compute the gradients of all inputs of a chunk, like delta_grads without p. BV is V."""
    of_pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    of_strip: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    a_row: gl.constexpr = gl.SliceLayout(1, of_strip)
    a_channel: gl.constexpr = gl.SliceLayout(0, of_strip)
    reads_of: gl.constexpr = gl.SliceLayout(1, of_pairs)
    writes_of: gl.constexpr = gl.SliceLayout(0, of_pairs)
    of_values: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    a_value_row: gl.constexpr = gl.SliceLayout(1, of_values)
    dtype: gl.constexpr = do.dtype
    program = gl.program_id(0)
    i_h = program % HV
    chunk = program // HV
    row = chunk * BT
    slot = (chunk + chunk // (T // BT)) * HV + i_h
    s_do = gl.allocate_shared_memory(dtype, [BT, BV], do.layout)
    s_u = gl.allocate_shared_memory(dtype, [BT, BV], u.layout)
    s_dy = gl.allocate_shared_memory(dtype, [BT, BV], dy.layout)
    ring_h = gl.allocate_shared_memory(dtype, [2, BK, BV], states.layout)
    ring_dh = gl.allocate_shared_memory(dtype, [2, BK, BV], dstates.layout)
    pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BT], dtype)
    strip: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BK], dtype)
    s_ds = gl.allocate_shared_memory(dtype, [BT, BT], pairs)
    s_z = gl.allocate_shared_memory(dtype, [BT, BT], pairs)
    s_k = gl.allocate_shared_memory(dtype, [BT, BK], strip)
    s_q = gl.allocate_shared_memory(dtype, [BT, BK], strip)
    s_kb = gl.allocate_shared_memory(dtype, [BT, BK], strip)
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()
    bar = full.index(2)
    mbarrier.expect(bar, 6 * BT * BV)
    async_load(do, [row, i_h * BV], bar, s_do)
    async_load(u, [row, i_h * BV], bar, s_u)
    async_load(dy, [row, i_h * BV], bar, s_dy)
    for i in gl.static_range(2):
        load_strip(states, dstates, ring_h, ring_dh, full, slot * K, i, BK, BV)
    line = i_h.to(gl.int64) * R + row
    first = row.to(gl.int64) * HV + i_h
    tokens = gl.arange(0, BT, a_value_row)
    at_v = tokens.to(gl.int64)[:, None] * (HV * BV) + gl.arange(0, BV, gl.SliceLayout(0, of_values))[None, :]
    b_v = gl.load(v + first * BV + at_v)
    rate = gl.load(betas + line + tokens)
    # The gradients of scores, and those of v and beta.
    mbarrier.wait(bar, 0)
    none = gl.zeros([BT, BT], gl.float32, of_pairs)
    ds = warpgroup_mma(s_do, s_u.permute((1, 0)), none, use_acc=False, is_async=True)
    z = warpgroup_mma(s_dy, s_u.permute((1, 0)), none, use_acc=False, is_async=True)
    wide = s_dy.load(of_values).to(gl.float32)
    gl.store(dv + first * BV + at_v, (wide * rate[:, None]).to(dv.dtype.element_ty))
    b_dbeta = gl.convert_layout(gl.sum(wide * b_v.to(gl.float32), 1), a_row)
    i_read = gl.arange(0, BT, reads_of)
    i_write = gl.arange(0, BT, writes_of)
    below = i_read[:, None] > i_write[None, :]
    ds, z = warpgroup_mma_wait(0, [ds, z])
    diagonal = gl.sum(gl.where(i_read[:, None] == i_write[None, :], ds, 0.0), 1) * scale
    diagonal = gl.convert_layout(diagonal, a_row)
    if DECAY == 0:
        ds = gl.where(below, ds * scale, 0.0)
        z = gl.where(below, -z, 0.0)
    else:
        apart = gl.load(G + line + i_read)[:, None] - gl.load(G + line + i_write)[None, :]
        between = gl.exp2(gl.where(below, apart, float("-inf")))
        ds = ds * (between * scale)
        z = -z * between
    s_ds.store(ds.to(dtype))
    s_z.store(z.to(dtype))
    token = gl.arange(0, BT, a_row)
    column = gl.arange(0, BK, a_channel)
    b_beta = gl.load(betas + line + token)
    if DECAY == 2:
        sums = gl.load(G + line + token)
        total = gl.load(G + line + BT - 1 + 0 * token)
        entered = gl.exp2(sums)
        left_by = gl.exp2(total - sums)
        across = gl.zeros([BT], gl.float32, a_row)
        here = gl.zeros([BT], gl.float32, a_row)
        left = gl.zeros([BT], gl.float32, a_row)
    at = token.to(gl.int64)[:, None] * (HV * K) + column[None, :]
    at_qk = token.to(gl.int64)[:, None] * (H * K) + column[None, :]
    q += (row.to(gl.int64) * H + i_h // (HV // H)) * K
    k += (row.to(gl.int64) * H + i_h // (HV // H)) * K
    dq += first * K
    dk += first * K
    nothing = gl.zeros([BT, BK], gl.float32, of_strip)
    b_q, b_k = gl.load(q + at_qk), gl.load(k + at_qk)
    for i in range(K // BK):
        k0 = i * BK
        s_h, s_dh = ring_h.index(i % 2), ring_dh.index(i % 2)
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        from_h = warpgroup_mma(s_do, s_h.permute((1, 0)), nothing, use_acc=False, is_async=True)
        dy_h = warpgroup_mma(s_dy, s_h.permute((1, 0)), nothing, use_acc=False, is_async=True)
        to_h = warpgroup_mma(s_u, s_dh.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s_k.store(b_k)
        s_q.store(b_q)
        s_kb.store((b_k.to(gl.float32) * b_beta[:, None]).to(dtype))
        if DECAY == 2:  # the sum over all channels and values, of which a row holds a part
            both = gl.sum(s_h.load(of_values).to(gl.float32) * s_dh.load(of_values).to(gl.float32), 0)
            across += gl.sum(both, 0)
        fence_async_shared()
        barrier()
        q_rows = warpgroup_mma(s_ds, s_k, nothing, use_acc=False, is_async=True)
        k_rows = warpgroup_mma(s_z, s_k, nothing, use_acc=False, is_async=True)
        columns = warpgroup_mma(s_ds.permute((1, 0)), s_q, nothing, use_acc=False, is_async=True)
        columns = warpgroup_mma(s_z.permute((1, 0)), s_kb, columns, is_async=True)
        wide_q, wide_k = b_q.to(gl.float32), b_k.to(gl.float32)
        from_h, dy_h, to_h, q_rows, k_rows, columns = warpgroup_mma_wait(
            0, [from_h, dy_h, to_h, q_rows, k_rows, columns])
        barrier()  # all warps must have read the strip, k and q
        if i + 2 < K // BK:
            load_strip(states, dstates, ring_h, ring_dh, full, slot * K, i + 2, BK, BV)
        after = gl.minimum(k0 + BK, K - BK)
        b_q, b_k = gl.load(q + after + at_qk), gl.load(k + after + at_qk)
        from_h *= scale
        if DECAY == 2:
            from_h *= entered[:, None]
            dy_h *= entered[:, None]
            to_h *= left_by[:, None]
        q_rows += from_h
        k_rows -= dy_h
        b_dbeta += gl.sum(wide_k * k_rows, 1)
        k_rows *= b_beta[:, None]
        if DECAY == 2:
            here += gl.sum(wide_q * q_rows + wide_k * (k_rows - columns), 1)
            left += gl.sum(wide_k * to_h, 1)
        gl.store(dq + k0 + at, (q_rows + diagonal[:, None] * wide_k).to(dq.dtype.element_ty))
        b_dk = to_h + k_rows + columns + diagonal[:, None] * wide_q
        gl.store(dk + k0 + at, b_dk.to(dk.dtype.element_ty))
    gl.store(dbeta + first + token * HV, b_dbeta)
    if DECAY == 2:
        here = gl.convert_layout(here, reads_of)
        left = gl.convert_layout(left, reads_of)
        sums_of = gl.sum(gl.where(i_read[:, None] >= i_write[None, :], here[:, None], left[:, None]), 0)
        crossing = gl.convert_layout(across * gl.exp2(total), writes_of)
        gl.store(dg + first + i_write * HV, sums_of + crossing)
