"""HGRN's recurrence h_t = e^{g_t} h_{t-1} + x_t, forward, and what both directions share. Tensors in, tensors
out.

A program is one warp with a strip of channels of one segment of a sequence, and walks it in blocks of BT
tokens, of which the next is always being loaded. Within a block the tokens are scanned as pairs (a, x), each
of which turns h into a h + x: products of decays are all there is, so nothing is divided by one, and e^-inf
is 0. Segments start from what those before leave behind, which is a scan of pairs like any other. Backward
walks from the last token to the first; a walk's i-th token is row ``origin + STEP * i``.
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
    """The pair (a, x), which turns h into a h + x, that does what the first one and then the second one
    do."""
    return a1 * a2, a2 * x1 + x2


@triton.jit
def last(x, BT: tl.constexpr):
    """The last row of [BT, BD]."""
    return tl.sum(tl.where((tl.arange(0, BT) == BT - 1)[:, None], x, 0.0), 0)


@triton.jit
def walked(
    x,  # [rows, D]
    origin,  # row of the walk's 0-th token
    i0,  # number of the first token here
    low,  # begin of the tokens that count
    high,  # end of the tokens that count
    cols,  # [BD]
    other,  # for the others
    D: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr,
):
    """[BT, BD]: tokens i0 .. i0 + BT of a walk, ``other`` for those outside low .. high."""
    i = tl.arange(0, BT)
    mask = ((i0 + i >= low) & (i0 + i < high))[:, None] & (cols < D)[None, :]
    return tl.load(x + (origin + STEP * i0) * D + (STEP * D * i[:, None] + cols[None, :]), mask=mask,
                   other=other)


@triton.jit
def put_walked(
    x,  # [rows, D]
    value,  # [BT, BD]
    origin,  # row of the walk's 0-th token
    i0,  # number of the first token here
    high,  # end of the tokens that count
    cols,  # [BD]
    D: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr,
):
    """Store a walk's results [BT, BD] for its tokens i0 .. i0 + BT."""
    i = tl.arange(0, BT)
    mask = (i0 + i < high)[:, None] & (cols < D)[None, :]
    tl.store(x + (origin + STEP * i0) * D + (STEP * D * i[:, None] + cols[None, :]),
             value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def decay(g):
    return tl.exp(g.to(tl.float32))


@triton.jit
def segment_of(s, S, length, BT: tl.constexpr):
    """(begin, end) of segment s of S. A segment is whole blocks of BT tokens, so the last ones may be
    empty."""
    size = ((length + S - 1) // S + BT - 1) // BT * BT
    begin = tl.minimum(s * size, length)
    return begin, tl.minimum(begin + size, length)


@triton.jit(do_not_specialize=["T", "S"])
def hgrn_ends(
    x, g,  # [rows, D]
    decays, ends,  # [N, S - 1, D], fp32
    bounds,  # [N + 1] or None
    T,
    S,  # segments of a sequence
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, VARLEN: tl.constexpr,
):
    """decays, ends [N, S - 1, D] fp32: each segment but the last as a pair. STEP -1: segments of the backward
    walk, x being the gradient of o. A program: BD channels of a segment."""
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
def carried(
    h,  # [BD]
    decays, ends,  # [N, S - 1, D], fp32
    n,  # this sequence
    s,  # this segment
    S,  # segments of a sequence
    cols,  # [BD]: columns
    D: tl.constexpr, BT: tl.constexpr,
):
    """h after the first s segments of sequence n."""
    origin = n.to(tl.int64) * (S - 1)
    for i0 in range(0, s, BT):
        a, sums = tl.associative_scan((
            walked(decays, origin, i0, 0, s, cols, 1.0, D=D, BT=BT, STEP=1),
            walked(ends, origin, i0, 0, s, cols, 0.0, D=D, BT=BT, STEP=1)), 0, both)
        h = last(a * h[None, :] + sums, BT)
    return h


@triton.jit(do_not_specialize=["T", "N", "S"])
def hgrn_forward(
    x, g,  # [rows, D]
    decays, ends,  # [N, S - 1, D], fp32
    h0,  # [N, D] or None
    o,  # [rows, D]
    ht,  # [N, D], fp32, or None
    bounds,  # [N + 1] or None
    T, N,
    S,  # segments of a sequence
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, VARLEN: tl.constexpr, GAPS: tl.constexpr,
):
    """o [rows, D] and ht. A program: BD channels of a segment of a sequence."""
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
    """(o [B, T, D] in x's dtype, final state [N, D] in fp32 or None). x, g [B, T, D], h0 [N, D],
    contiguous."""
    N = x.shape[0] if bounds is None else bounds.shape[0] - 1
    split = parts(plan, N)
    o = torch.empty_like(x) if fills_gaps(split, bounds) else torch.zeros_like(x)
    ht = x.new_empty((N, x.shape[2]), dtype=torch.float32) if has_ht else None
    if N == 0:  # no program would run to write them
        return o.zero_(), ht
    walk(plan, hgrn_forward, 1, split, "x", x=x, g=g, o=o, bounds=bounds, h0=h0, ht=ht)
    return o, ht


def fills_gaps(split: list[slice], bounds: Tensor | None) -> bool:
    """Whether the kernels write every row. One launch of packed sequences zeroes the rows outside them
    itself; a part of several cannot, since to it the other parts' rows are outside."""
    return bounds is None or len(split) == 1


def walk(plan: Plan, kernel: Any, step: int, split: list[slice], walked: str, **tensors: Any) -> None:
    """Start a kernel that walks all segments, for each part of the batch, after ``hgrn_ends`` where sequences
    have more than one.

    step: 1 or -1, as of hgrn_ends. walked: the name of what states are made of. tensors: the kernel's, by
    name.
    """
    _, T, D = tensors["g"].shape
    S, packed = segments(plan.problem, plan.target), tensors["bounds"] is not None
    launch = plan.launch(kernel.fn.__name__)
    strips = -(-D // launch.block("BD"))
    for part in split:
        n = part.stop - part.start
        own = cut(tensors, part) if len(split) > 1 else tensors
        # what each segment but the last leaves behind; of whole sequences nothing, which nobody reads
        decays, ends = torch.empty(2, n, S - 1, D, dtype=torch.float32, device=tensors["g"].device)
        sizes = dict(decays=decays, ends=ends, T=T, S=S, D=D)
        if S > 1:
            start(plan.launch("hgrn_ends"), hgrn_ends, n * (S - 1) * strips, dict(
                sizes, x=own[walked], g=own["g"], bounds=own["bounds"], STEP=step, VARLEN=packed))
        start(launch, kernel, n * S * strips, dict(
            own, **sizes, N=n, VARLEN=packed, GAPS=packed and len(split) == 1))
