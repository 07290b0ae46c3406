"""Forward of the scalar-decay family: one fused scan over chunks. (Token by token it is kernels/recurrent.)
Tensors in, tensors out.

With the decay G_i = g_1 + ... + g_i inside a chunk and the state h entering it (row i of a matrix is token
i):
    o_i = scale (e^{G_i} q_i h + sum_{j <= i} e^{G_i - G_j} (q_i . k_j) v_j)          h' = e^{G_L} h + sum_j e^{G_L - G_j} k_j^T v_j
A program owns one sequence, one head and BV columns of the state, which stays in registers while it walks the
chunks; outputs are written on the way, so nothing but q, k, v and o moves. Differences of G are masked before
exp, so no factor exceeds a decay.
"""

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.problem import Plan
from flashlin.kernels.configs import BLOCK
from flashlin.kernels.pieces import (
    decay_of,
    decays,
    fills_gaps,
    parts,
    precision,
    put,
    scaled_decay,
    sequence_of,
    sliced,
    state_offsets,
    summed,
    tile,
    within,
    zero_gaps,
)
from flashlin.kernels.recurrent import forward as recurrent
from flashlin.kernels.recurrent.inputs import Inputs


@triton.jit(do_not_specialize=["T", "N", "R", "scale"])
def simple_gla_scan(
    q,  # [rows, H // GROUP, K]
    k,  # [rows, H // GROUP, K]
    v,  # [rows, H, V]
    G,  # [H, R], fp32
    gamma,  # [H]
    h0,  # [N, H, K, V] or, with V_FIRST, [N, H, V, K]
    o,  # [rows, H, V]
    ht,  # like h0, fp32
    bounds,  # [N + 1] or None
    scale,
    T,  # tokens of a sequence
    N,  # sequences
    H,  # heads
    R,  # elements of a line
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_H0: tl.constexpr,
    HAS_HT: tl.constexpr,
    V_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
    GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """o [rows, H, V] and ht. A program: BV columns of one head's state, kept in registers from chunk to
    chunk."""
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v0 = program % NV * BV
    nh = program // NV
    i_h = nh % H
    n = nh // H
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:
        zero_gaps(o, bounds, n, T, N, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
    at, inside = state_offsets(nh, 0, v0, K, V, BK, BV, V_FIRST)
    if HAS_H0:
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
            b_w = (b_v * tl.exp2(total - D)[:, None]).to(b_v.dtype)  # the narrower side: less to move
            h *= tl.exp2(total)
        b_o += tl.dot(s.to(b_v.dtype), b_v, input_precision=PRECISION)
        h += tl.dot(tl.trans(b_k), b_w, input_precision=PRECISION)
        put(o, b_o, first, t0, length, i_h, H, D=V, d0=v0, BT=BT, BD=BV)
    if HAS_HT:
        tl.store(ht + at, h, mask=inside)


def run(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    gamma: torch.Tensor | None,
    h0: torch.Tensor | None,
    bounds: torch.Tensor | None,
    scale: float,
    has_ht: bool,
    v_first: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, final state or None). q, k [B, T, G, K], v [B, T, H, V], contiguous, one dtype; head j of v reads
    head j // (H / G) of q and k. g [B, T, H]; gamma [H]; h0 [N, H, K, V] or, with v_first, [N, H, V, K];
    bounds [N + 1], rising, within 0 .. T. Rows outside bounds are zeros. Starts the plan's launches."""
    if plan.problem.mode == "fused_recurrent":
        x = Inputs(q, k, v, g=g, gamma=gamma, h0=h0, bounds=bounds)
        o, ht, _ = recurrent.run(plan, x, ("v_first",) if v_first else (), scale, has_ht, out_dtype)
        return o, ht
    (B, T, H, V), K = v.shape, q.shape[3]
    N = B if bounds is None else bounds.numel() - 1
    split, launch = parts(plan, N), plan.launch("simple_gla_scan")
    o = (torch.empty if fills_gaps(split, bounds) else torch.zeros)(B, T, H, V, dtype=out_dtype,
                                                                    device=q.device)
    ht = torch.empty((N, H, V, K) if v_first else (N, H, K, V), dtype=torch.float32,
                     device=q.device) if has_ht else None
    if N == 0 or H == 0:  # no program would run to write them
        return o.zero_(), ht
    constants = dict(K=K, V=V, DECAY=decay_of(g, gamma), HAS_H0=h0 is not None, HAS_HT=has_ht,
                     V_FIRST=v_first, GROUP=H // q.shape[2], VARLEN=bounds is not None,
                     GAPS=bounds is not None and len(split) == 1)
    for part in split:
        n = part.stop - part.start
        q_, k_, v_, g_, o_ = (within(x, part, bounds) for x in (q, k, v, g, o))
        h0_, ht_, bounds_ = sliced(h0, part), sliced(ht, part), sliced(bounds,
                                                                       slice(part.start, part.stop + 1))
        start(launch, simple_gla_scan, n * H * -(-V // launch.block("BV")), dict(
            q=q_, k=k_, v=v_, G=summed(plan, g_, bounds_, n),
            gamma=gamma, h0=h0_, o=o_, ht=ht_, bounds=bounds_,
            scale=scale, T=T, N=n, H=H, R=B * T if bounds is not None else n * T,
            **constants, BLOCK=BLOCK, PRECISION=precision(plan)))
    return o, ht
