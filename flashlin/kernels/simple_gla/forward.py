"""Forward kernel of the scalar-decay family: one fused scan over chunks.

The token-by-token mode uses ``kernels/recurrent``. G_i = g_1 + ... + g_i is the sum of decays inside a chunk
of L tokens, and h is the state that enters it. Row i of a matrix is token i:

    o_i = scale (e^{G_i} q_i h + sum_{j <= i} e^{G_i - G_j} (q_i . k_j) v_j)
    h' = e^{G_L} h + sum_j e^{G_L - G_j} k_j^T v_j

One program computes BV columns of the state of one head and one sequence or segment. The state stays in
registers while the program walks over the chunks and writes the outputs. So only q, k, v and o pass through
memory. Differences of G with j > i are positive. They are masked before exp, because exp could overflow.
"""

import torch
import triton
import triton.language as tl

from flashlin.compat.traits import OVERLAPPED
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import Batch, precision, summed
from flashlin.kernels.chunked import Scalars
from flashlin.kernels.configs import BLOCK
from flashlin.kernels.recurrent import forward as recurrent
from flashlin.kernels.recurrent.inputs import Inputs as TokenByToken
from flashlin.kernels.sequence_split import by_decays, part_of
from flashlin.kernels.simple_gla.inputs import Inputs
from flashlin.kernels.simple_gla.parts import simple_gla_alone
from flashlin.kernels.tile_ops import decays, put, scaled_decay, state_offsets, tile, zero_gaps


@triton.jit(do_not_specialize=["T", "N", "R", "L", "scale"])
def simple_gla_scan(
    q, k, v, G, gamma, h0, o, ht, bounds, scale, T, N, H, R, L, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, HAS_H0: tl.constexpr,
    HAS_HT: tl.constexpr, V_FIRST: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    VARLEN: tl.constexpr, GAPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute the outputs o and the final states ht by a scan over chunks.

    One program computes BV columns of one head's state and keeps them in registers from chunk to chunk.

    h0: the states that enter the sequences or, if these are split, the segments.
    DECAY: 0 for no decay, 1 for one decay per head (gamma), 2 for one decay per token and head (G).

    q, k: [rows, H // GROUP, K].
    v: [rows, H, V].
    G: [H, R], fp32.
    gamma: [H].
    h0: [segments, H, K, V] or, with V_FIRST, [segments, H, V, K].
    o: [rows, H, V].
    ht: [N, H, K, V] or, with V_FIRST, [N, H, V, K], fp32.
    bounds: [N + 1] or None.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    own = program // NV
    i_h = own % H
    n, i_part, first, length, last = part_of(own // H, bounds, T, N, L, VARLEN)
    if GAPS:
        if i_part == 0:
            zero_gaps(o, bounds, n, T, N, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_H0:
        at, inside = state_offsets(own, 0, v0, K, V, BK, BV, V_FIRST)
        h = tl.load(h0 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BK, BV], dtype=tl.float32)
    rows = tl.arange(0, BT)
    causal = rows[:, None] >= rows[None, :]
    for t0 in range(0, length, BT):
        b_q = tile(q, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=0, BT=BT, BD=BK)
        b_k = tile(k, first, t0, length, i_h // GROUP, H // GROUP, D=K, d0=0, BT=BT, BD=BK)
        b_v = tile(v, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
        D, total = decays(G, gamma, first, t0, length, i_h, R, BT=BT, BLOCK=BLOCK, DECAY=DECAY)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_o = tl.dot(b_q, h.to(b_q.dtype), input_precision=PRECISION)
        if DECAY == 0:
            s = tl.where(causal, s * scale, 0.0)
            b_o *= scale
            b_w = b_v
        else:
            s *= scaled_decay(D, D, causal, scale)
            b_o *= (tl.exp2(D) * scale)[:, None]
            b_w = (b_v * tl.exp2(total - D)[:, None]).to(b_v.dtype)  # scales v, which is narrower than k
            h *= tl.exp2(total)
        b_o += tl.dot(s.to(b_v.dtype), b_v, input_precision=PRECISION)
        h += tl.dot(tl.trans(b_k), b_w, input_precision=PRECISION)
        put(o, b_o, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_HT:
        at, inside = state_offsets(n * H + i_h, 0, v0, K, V, BK, BV, V_FIRST)
        tl.store(ht + at, h, mask=inside & last)


def launch_forward(plan: Plan, x: Inputs, how: Scalars) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the plan's forward launches and return o [B, T, H, V] and the final states or None.

    The states are fp32, [N, H, K, V] or, with ``how.state_v_first``, [N, H, V, K].
    """
    if plan.problem.mode == "fused_recurrent":
        o, ht, _ = recurrent.launch_forward(plan, TokenByToken(**x._asdict()),
                                            ("v_first",) if how.state_v_first else (),
                                            how.scale, how.has_ht, how.out_dtype)
        return o, ht
    batch, launch = Batch(plan, x), plan.launch("simple_gla_overlapped", "simple_gla_scan")
    o, ht = batch.outputs(how.out_dtype, how.has_ht, how.state_v_first)
    constants = dict(K=batch.K, V=batch.V, DECAY=batch.decay, V_FIRST=how.state_v_first,
                     GROUP=batch.HV // max(batch.H, 1), VARLEN=batch.packed, BLOCK=BLOCK,
                     PRECISION=precision(plan))
    for part in batch.parts(launch, o=o, ht=ht, scale=how.scale, H=batch.HV):
        part.update(G=summed(plan, part["g"], part["bounds"], part["N"]), R=part["rows"])
        by_decays(batch, part, simple_gla_alone, constants, ("k", "v"))
        ends = dict(HAS_H0=part["h0"] is not None, HAS_HT=how.has_ht)
        if OVERLAPPED in launch.traits:
            from flashlin.kernels.simple_gla.overlapping import simple_gla_overlapped
            own = {name: constants[name] for name in ("V", "DECAY", "V_FIRST", "GROUP")}
            batch.scan(simple_gla_overlapped, own | ends, part)
        else:
            batch.scan(simple_gla_scan, dict(constants, **ends, GAPS=batch.gaps), part)
    return o, ht
