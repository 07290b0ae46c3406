"""Rotary embeddings, forward and backward: backward turns the other way. Tensors in, tensors out.

    y_a = x_a cos - x_b sin        y_b = x_a sin + x_b cos
for R pairs (a, b) of each head's D channels: (i, R + i), or interleaved (2 i, 2 i + 1); the other channels
are copied. cos and sin are rows of tables [TR, R], by a token's place in its sequence plus the sequence's
offset. A row is a head of a token. A program owns BT rows and BR pairs of each, or 2 BR of the channels that
are copied; it reads before it writes and nobody else reads what it writes, so y may be x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import row_stride


@triton.jit
def sequences_of(bounds, token, inside, N, steps):
    """(sequence, its first token, whether there is one) of each token of a packed batch, by bisection of
    bounds."""
    low = tl.zeros_like(token)  # the sequence is the last whose bound is not behind the token
    high = low + N + 1
    for _ in range(steps):
        middle = (low + high) // 2
        begun = tl.load(bounds + middle, mask=inside, other=0).to(tl.int64) <= token
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    first = tl.load(bounds + low, mask=inside, other=0).to(tl.int64)
    return low, first, inside & (first <= token) & (low < N)


@triton.jit(do_not_specialize=["offset", "T", "N", "steps", "rows", "TR"])
def rotary(
    x,  # [B, T, H, D]
    cos, sin,  # [TR, R]
    offsets,  # [N] or None
    bounds,  # [N + 1] or None
    y,  # [B, T, H, D]
    offset,  # added to every place
    T, N,
    steps,  # of the bisection
    rows,
    TR,  # rows of the tables
    along_t,  # strides of x: by token
    along_h,  # by head
    onto_t,  # strides of y: by token
    onto_h,  # by head
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):
    """y [B, T, H, D]; BACK turns the other way. A program: BT rows, each a head of a token, and BR pairs
    of channels."""
    TURNED: tl.constexpr = (R + BR - 1) // BR
    STRIPS: tl.constexpr = TURNED + (D - 2 * R + 2 * BR - 1) // (2 * BR)
    strip = tl.program_id(0) % STRIPS
    start = (tl.program_id(0) // STRIPS).to(tl.int64) * BT
    ahead = tl.arange(0, BT)
    inside = start + ahead < rows
    before = start // H
    behind = (start - before * H).to(tl.int32) + ahead  # rows behind the first one of token ``before``
    token = before + behind // H
    if bounds is not None:
        n, first, belongs = sequences_of(bounds, token, inside, N, steps)
    else:
        n = token // T
        first = n * T
        belongs = inside
    from_x = x + before * along_t
    to_y = y + before * onto_t
    at_x = behind // H * along_t + behind % H * along_h
    at_y = behind // H * onto_t + behind % H * onto_h
    if strip < TURNED:
        place = token - first + offset
        if offsets is not None:
            place += tl.load(offsets + n, mask=belongs, other=0).to(tl.int64)
        pair = strip * BR + tl.arange(0, BR)
        known = (belongs & (place >= 0) & (place < TR))[:, None] & (pair < R)[None, :]
        turn = place[:, None] * R + pair[None, :]
        # past the tables nothing is right, and NaN says so; before them is padding
        beyond = tl.where(belongs & (place >= TR), float("nan"), 0.0)[:, None]
        c = tl.load(cos + turn, mask=known, other=0.0).to(tl.float32) + beyond
        s = tl.load(sin + turn, mask=known, other=0.0).to(tl.float32) + beyond
        if BACK:
            s = -s
        if INTERLEAVED:
            a = 2 * pair
            b = a + 1
        else:
            a = pair
            b = a + R
        there = inside[:, None] & (pair < R)[None, :]
        x_a = tl.load(from_x + (at_x[:, None] + a[None, :]), mask=there, other=0.0).to(tl.float32)
        x_b = tl.load(from_x + (at_x[:, None] + b[None, :]), mask=there, other=0.0).to(tl.float32)
        tl.store(to_y + (at_y[:, None] + a[None, :]), (x_a * c - x_b * s).to(y.dtype.element_ty), mask=there)
        tl.store(to_y + (at_y[:, None] + b[None, :]), (x_a * s + x_b * c).to(y.dtype.element_ty), mask=there)
    else:
        col = 2 * R + (strip - TURNED) * 2 * BR + tl.arange(0, 2 * BR)
        left = inside[:, None] & (col < D)[None, :]  # not "there", whose shape is another
        value = tl.load(from_x + (at_x[:, None] + col[None, :]), mask=left & belongs[:, None], other=0.0)
        tl.store(to_y + (at_y[:, None] + col[None, :]), value.to(y.dtype.element_ty), mask=left)


def launch_forward(
    plan: Plan,
    x: Tensor, cos: Tensor, sin: Tensor,
    offset: int,
    offsets: Tensor | None, bounds: Tensor | None,
    interleaved: bool, back: bool, in_place: bool,
) -> Tensor:
    """y [B, T, H, D] in x's dtype, which is x itself if in_place. x [B, T, H, D] with evenly spaced tokens
    and contiguous channels; cos, sin [TR, R] contiguous, of any dtype; offsets [N] and bounds [N + 1]
    contiguous or None, the latter within 0 .. T and rising. back: backward."""
    B, T, H, D = x.shape
    TR, R = cos.shape
    N = B if bounds is None else bounds.shape[0] - 1
    y = x if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch = plan.launches[0]
        start(launch, rotary, launch.grid[0], dict(
            x=x, cos=cos, sin=sin, offsets=offsets, bounds=bounds, y=y,
            offset=offset, T=T, N=N, steps=(N + 1).bit_length(), rows=B * T * H, TR=TR,
            along_t=row_stride(x), along_h=x.stride(2), onto_t=row_stride(y), onto_h=y.stride(2),
            H=H, D=D, R=R, INTERLEAVED=interleaved, BACK=back))
    return y
