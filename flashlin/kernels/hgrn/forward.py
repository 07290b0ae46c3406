"""Forward of HGRN's recurrence h_t = e^{g_t} h_{t-1} + x_t, and functions that backward shares.

A program is one warp. It computes some channels of one segment of a sequence in blocks of BT tokens, and
loads the next block during the computation of the current one. Within a block it scans the tokens as pairs
(a, x); a pair maps h to a h + x. The scan only multiplies decays and never divides by one, so g may be -inf
(decay 0).

A sequence may be split into S segments. A first kernel, hgrn_ends, computes the transfer of each segment,
which is also a pair (a, x). A program of the main kernel combines the pairs of all earlier segments. The
result is the state before its own segment.

Forward visits tokens from the first to the last (STEP = 1), backward from the last to the first (STEP = -1).
The i-th token in this order is row ``origin + STEP * i``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import cut, parts
from flashlin.kernels.hgrn.recipe import segments
from flashlin.kernels.tile_ops import sequence_of, zero_gaps


@triton.jit
def both(a1, x1, a2, x2):
    """Combine two pairs into the pair that has the effect of the first and then the second.

    A pair (a, x) maps a state h to a h + x.
    """
    return a1 * a2, a2 * x1 + x2


@triton.jit
def last(x, BT: tl.constexpr):
    """Return the last row of x [BT, BD]."""
    return tl.sum(tl.where((tl.arange(0, BT) == BT - 1)[:, None], x, 0.0), 0)


@triton.jit
def walked(x, origin, i0, low, high, cols, other, D: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr):
    """Load a tile [BT, BD] of x [rows, D]: the tokens i0 .. i0 + BT in the order of the recurrence.

    Token i is row origin + STEP * i, so STEP = -1 reads backward. Tokens outside low .. high have the value
    ``other``. cols: the columns, [BD].
    """
    i = tl.arange(0, BT)
    mask = ((i0 + i >= low) & (i0 + i < high))[:, None] & (cols < D)[None, :]
    return tl.load(x + (origin + STEP * i0) * D + (STEP * D * i[:, None] + cols[None, :]), mask=mask,
                   other=other)


@triton.jit
def put_walked(x, value, origin, i0, high, cols, D: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr):
    """Store a tile [BT, BD] in x [rows, D], for the tokens i0 .. i0 + BT in the order of the recurrence.

    Token i is row origin + STEP * i. Tokens from ``high`` are not stored. cols: the columns, [BD].
    """
    i = tl.arange(0, BT)
    mask = (i0 + i < high)[:, None] & (cols < D)[None, :]
    tl.store(x + (origin + STEP * i0) * D + (STEP * D * i[:, None] + cols[None, :]),
             value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def decay(g):
    """Return the decays e^g of log decays g, in fp32."""
    return tl.exp(g.to(tl.float32))


@triton.jit
def segment_of(s, S, length, BT: tl.constexpr):
    """Return the first token and the end of segment s, one of S segments of a sequence of ``length`` tokens.

    A segment consists of whole blocks of BT tokens, so the last segments may be empty.
    """
    size = ((length + S - 1) // S + BT - 1) // BT * BT
    begin = tl.minimum(s * size, length)
    return begin, tl.minimum(begin + size, length)


@triton.jit(do_not_specialize=["T", "S"])
def hgrn_ends(
    x, g, decays, ends, bounds, T, S, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Compute the transfer of each segment but the last: decays and ends, both [N, S - 1, D] in fp32.

    A segment turns a state h into decays * h + ends, so ``ends`` is its final state if it starts from zero.
    STEP = -1 is for backward: it numbers segments from the end of the sequence, and x is the gradient of o. A
    program computes BD channels of one segment.

    x, g: [rows, D].
    decays, ends: [N, S - 1, D], fp32.
    bounds: [N + 1] or None.
    S: number of segments of a sequence.
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    BACK: tl.constexpr = (1 - STEP) // 2
    program = tl.program_id(0)
    cols = program % STRIPS * BD + tl.arange(0, BD)
    s = program // STRIPS % (S - 1)
    n = program // STRIPS // (S - 1)
    first, length = sequence_of(n, bounds, T, VARLEN)
    begin, end = segment_of(s, S, length, BT)
    origin = first + BACK * (length - 1)
    h = tl.zeros([BD], dtype=tl.float32)
    total = tl.full([BD], 1.0, dtype=tl.float32)
    next_x = walked(x, origin, begin, 0, end, cols, 0.0, D=D, BT=BT, STEP=STEP)
    next_g = walked(g, origin + BACK, begin, BACK, end, cols, 0.0, D=D, BT=BT, STEP=STEP)
    for i0 in range(begin, end, BT):
        now_x, now_g = next_x, next_g
        next_x = walked(x, origin, i0 + BT, 0, end, cols, 0.0, D=D, BT=BT, STEP=STEP)
        next_g = walked(g, origin + BACK, i0 + BT, BACK, end, cols, 0.0, D=D, BT=BT, STEP=STEP)
        a, sums = tl.associative_scan((decay(now_g), now_x.to(tl.float32)), 0, both)
        h = last(a * h[None, :] + sums, BT)
        total *= last(a, BT)
    at = (n.to(tl.int64) * (S - 1) + s) * D + cols
    tl.store(decays + at, total, mask=cols < D)
    tl.store(ends + at, h, mask=cols < D)


@triton.jit
def carried(h, decays, ends, n, s, S, cols, D: tl.constexpr, BT: tl.constexpr):
    """Return the state of BD channels after the first s segments of sequence n, given its initial state h.

    decays, ends: [N, S - 1, D], the transfers of the segments, as hgrn_ends computes them.

    h: [BD].
    n: number of this sequence.
    S: number of segments of a sequence.
    cols: [BD]: columns.
    """
    origin = n.to(tl.int64) * (S - 1)
    for i0 in range(0, s, BT):
        a, sums = tl.associative_scan((
            walked(decays, origin, i0, 0, s, cols, 1.0, D=D, BT=BT, STEP=1),
            walked(ends, origin, i0, 0, s, cols, 0.0, D=D, BT=BT, STEP=1)), 0, both)
        h = last(a * h[None, :] + sums, BT)
    return h


@triton.jit(do_not_specialize=["T", "N", "S"])
def hgrn_forward(
    x, g, decays, ends, h0, o, ht, bounds, T, N, S, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    VARLEN: tl.constexpr, GAPS: tl.constexpr,
):
    """Compute the states of all tokens as o [rows, D], and the final state ht [N, D] unless it is None.

    A program computes BD channels of one segment of a sequence. decays and ends, [N, S - 1, D], come from
    ``hgrn_ends``. They are the transfers of all segments but the last.

    x, g: [rows, D].
    decays, ends: [N, S - 1, D], fp32.
    h0: [N, D] or None.
    o: [rows, D].
    ht: [N, D], fp32, or None.
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
            zero_gaps(o, bounds, n, T, N, 0, 1, D=D, d0=d0, BT=BT, BD=BD)
    begin, end = segment_of(s, S, length, BT)
    next_x = walked(x, first, begin, 0, end, cols, 0.0, D=D, BT=BT, STEP=1)
    next_g = walked(g, first, begin, 0, end, cols, 0.0, D=D, BT=BT, STEP=1)
    if h0 is not None:
        h = tl.load(h0 + n.to(tl.int64) * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BD], dtype=tl.float32)
    h = carried(h, decays, ends, n, s, S, cols, D, BT)
    for i0 in range(begin, end, BT):
        now_x, now_g = next_x, next_g
        next_x = walked(x, first, i0 + BT, 0, end, cols, 0.0, D=D, BT=BT, STEP=1)
        next_g = walked(g, first, i0 + BT, 0, end, cols, 0.0, D=D, BT=BT, STEP=1)
        a, sums = tl.associative_scan((decay(now_g), now_x.to(tl.float32)), 0, both)
        states = a * h[None, :] + sums
        put_walked(o, states, first, i0, end, cols, D, BT, 1)
        h = last(states, BT)
    if ht is not None:
        if (end == length) & ((begin < length) | (s == 0)):
            tl.store(ht + n.to(tl.int64) * D + cols, h, mask=cols < D)


def launch_forward(plan: Plan, x: Tensor, g: Tensor, h0: Tensor | None, bounds: Tensor | None,
        has_ht: bool) -> tuple[Tensor, Tensor | None]:
    """Launch the forward kernels; return o [B, T, D] in x's dtype and the final state [N, D] in fp32.

    The final state is None unless has_ht.

    x, g: [B, T, D], contiguous.
    h0: [N, D], the initial state, contiguous; or None for zeros.
    bounds: [N + 1], the boundaries of packed sequences, or None.
    """
    N = x.shape[0] if bounds is None else bounds.shape[0] - 1
    split = parts(plan, N)
    o = torch.empty_like(x) if fills_gaps(split, bounds) else torch.zeros_like(x)
    ht = x.new_empty((N, x.shape[2]), dtype=torch.float32) if has_ht else None
    if N == 0:  # no program would write o
        return o.zero_(), ht
    walk(plan, hgrn_forward, 1, split, "x", x=x, g=g, o=o, bounds=bounds, h0=h0, ht=ht)
    return o, ht


def fills_gaps(split: list[slice], bounds: Tensor | None) -> bool:
    """Return True if the kernels write every row of the output.

    split: the slices of the batch that run in separate launches.

    A single launch of packed sequences also stores zeros in the rows of no sequence. One of several launches
    cannot do so, because it would also overwrite the rows of the other launches.
    """
    return bounds is None or len(split) == 1


def walk(plan: Plan, kernel: Any, step: int, split: list[slice], walked: str, **tensors: Any) -> None:
    """Launch hgrn_forward or hgrn_backward for each slice of the batch, after ``hgrn_ends`` if necessary.

    ``hgrn_ends`` is necessary if sequences have more than one segment.

    step: STEP of hgrn_ends: 1 for forward, -1 for backward.
    split: the slices of the batch.
    walked: name of the tensor from which states are computed: "x" in forward, "do" in backward.
    tensors: tensor arguments of the kernel, by name.
    """
    _, T, D = tensors["g"].shape
    S, packed = segments(plan.problem, plan.target), tensors["bounds"] is not None
    launch = plan.launch(kernel.fn.__name__)
    strips = -(-D // launch.block("BD"))
    for part in split:
        n = part.stop - part.start
        own = cut(tensors, part) if len(split) > 1 else tensors
        # The transfers of all segments but the last. They are empty if sequences are not split.
        decays, ends = torch.empty(2, n, S - 1, D, dtype=torch.float32, device=tensors["g"].device)
        sizes = dict(decays=decays, ends=ends, T=T, S=S, D=D)
        if S > 1:
            start(plan.launch("hgrn_ends"), hgrn_ends, n * (S - 1) * strips, dict(
                sizes, x=own[walked], g=own["g"], bounds=own["bounds"], STEP=step, VARLEN=packed))
        start(launch, kernel, n * S * strips, dict(
            own, **sizes, N=n, VARLEN=packed, GAPS=packed and len(split) == 1))
