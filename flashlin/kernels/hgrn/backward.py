"""Backward of HGRN's recurrence, from the last token to the first.

The gradients of the inputs are:

    dx_t = do_t + e^{g_{t+1}} dx_{t+1}
    dg_t = dx_t e^{g_t} h_{t-1}

For the last token, the gradient of the final state replaces e^{g_{t+1}} dx_{t+1}. The states h are the output
o of forward. If o is rounded to 16 bits, dg is as precise as a 16-bit tensor can be. The difference
o_t - x_t is equal to e^{g_t} h_{t-1}, but would suffer from cancellation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import parts
from flashlin.kernels.hgrn.forward import both, carried, decay, fills_gaps, last, put_walked, segment_of, walk, walked
from flashlin.kernels.tile_ops import sequence_of, zero_gaps


@triton.jit(do_not_specialize=["T", "N", "S"])
def hgrn_backward(
    do, g, decays, ends, o, h0, dht, dx, dg, dh0, bounds, T, N, S, D: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr,
):
    """Compute dx and dg [rows, D], the gradients of x and g, and dh0 [N, D] unless it is None.

    A program computes BD channels of one segment of a sequence, from its last token to its first. decays and
    ends, [N, S - 1, D], come from ``hgrn_ends``. They are the transfers of all segments but the last.

    do, g: [rows, D].
    decays, ends: [N, S - 1, D], fp32.
    o: [rows, D].
    h0, dht: [N, D] or None.
    dx, dg: [rows, D].
    dh0: [N, D], fp32, or None.
    bounds: [N + 1] or None.
    S: number of segments of a sequence.
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    program = tl.program_id(0)
    d0 = program % STRIPS * BD
    cols = d0 + tl.arange(0, BD)
    s = program // STRIPS % S
    n = program // STRIPS // S
    first, length = sequence_of(n, bounds, T, VARLEN)
    if GAPS:
        if s == 0:
            zero_gaps(dx, bounds, n, T, N, 0, 1, D=D, d0=d0, BT=BT, BD=BD)
            zero_gaps(dg, bounds, n, T, N, 0, 1, D=D, d0=d0, BT=BT, BD=BD)
    begin, end = segment_of(s, S, length, BT)
    final = first + length - 1
    state = n.to(tl.int64) * D + cols
    next_x = walked(do, final, begin, 0, end, cols, 0.0, D=D, BT=BT, STEP=-1)
    next_g = walked(g, final + 1, begin, 1, end, cols, 0.0, D=D, BT=BT, STEP=-1)
    if dht is not None:
        dh = tl.load(dht + state, mask=cols < D, other=0.0).to(tl.float32)
    else:
        dh = tl.zeros([BD], dtype=tl.float32)
    dh = carried(dh, decays, ends, n, s, S, cols, D, BT)
    for i0 in range(begin, end, BT):
        now_x, now_g = next_x, next_g
        own_g = walked(g, final, i0, 0, end, cols, 0.0, D=D, BT=BT, STEP=-1)
        before = walked(o, final - 1, i0, 0, tl.minimum(end, length - 1), cols, 0.0, D=D, BT=BT, STEP=-1)
        next_x = walked(do, final, i0 + BT, 0, end, cols, 0.0, D=D, BT=BT, STEP=-1)
        next_g = walked(g, final + 1, i0 + BT, 1, end, cols, 0.0, D=D, BT=BT, STEP=-1)
        a, sums = tl.associative_scan((decay(now_g), now_x.to(tl.float32)), 0, both)
        b_dx = a * dh[None, :] + sums
        put_walked(dx, b_dx, final, i0, end, cols, D, BT, -1)
        h = before.to(tl.float32)
        if h0 is not None:
            h += tl.where((i0 + tl.arange(0, BT) == length - 1)[:, None],
                          tl.load(h0 + state, mask=cols < D, other=0.0)[None, :], 0.0)
        put_walked(dg, b_dx * decay(own_g) * h, final, i0, end, cols, D, BT, -1)
        dh = last(b_dx, BT)
    if dh0 is not None:
        if (end == length) & ((begin < length) | (s == 0)):
            one = decay(tl.load(g + first * D + cols, mask=cols < tl.where(length > 0, D, 0), other=0.0))
            tl.store(dh0 + state, dh * one, mask=cols < D)


def launch_backward(plan: Plan, g: Tensor, o: Tensor, h0: Tensor | None, bounds: Tensor | None, do: Tensor,
        dht: Tensor | None, needs_dh0: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the backward kernels of HGRN's recurrence; return dx, dg and dh0.

    dx has the dtype of o, dg that of g. dh0 is in fp32, or None if it is not needed.

    o: [B, T, D], the output of forward. do: its gradient.
    dht: [N, D], the gradient of the final state, or None.
    bounds: [N + 1], the boundaries of packed sequences, or None. All tensors must be contiguous.
    """
    N = o.shape[0] if bounds is None else bounds.shape[0] - 1
    split = parts(plan, N)
    new = torch.empty_like if fills_gaps(split, bounds) else torch.zeros_like
    dx, dg = new(o), new(g)
    dh0 = o.new_empty((N, o.shape[2]), dtype=torch.float32) if needs_dh0 else None
    if N == 0:
        return dx.zero_(), dg.zero_(), dh0
    walk(plan, hgrn_backward, -1, split, "do", do=do, g=g, o=o, dx=dx, dg=dg, bounds=bounds, h0=h0, dht=dht,
         dh0=dh0)
    return dx, dg, dh0
