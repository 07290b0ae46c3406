"""Rotary embeddings, forward and backward; backward is a rotation in the opposite direction.

R pairs (a, b) of the D channels of each head are rotated:

    y_a = x_a cos - x_b sin
    y_b = x_a sin + x_b cos

A pair consists of the channels i and R + i or, if interleaved, of 2 i and 2 i + 1. The other channels are
copied. cos and sin are tables [TR, R]. A token uses the row given by its position in its sequence plus the
offset of the sequence.

In these kernels, a row is one head of one token. A program computes BT rows, with BR rotated pairs or 2 BR
copied channels. It reads its elements before it writes them, and no other program reads them, so y may be x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start_planned
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import row_stride


@triton.jit
def sequences_of(bounds, token, inside, N, steps):
    """Find the sequences of tokens of a packed batch, by a binary search in bounds [N + 1].

    token: indices of the tokens. inside: mask of tokens that exist. steps: number of steps of the search.

    Returns, for each token: the index of its sequence, the index of the sequence's first token, and True if
    the token belongs to a sequence.
    """
    low = tl.zeros_like(token)  # the result is the last sequence that begins at or before the token
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
    x, cos, sin, offsets, bounds, y, offset, T, N, steps, rows, TR, along_t, along_h, onto_t, onto_h,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):
    """Compute y [B, T, H, D], the rotated x; BACK rotates in the opposite direction.

    A program computes BT rows, each one head of one token, with BR rotated pairs or 2 BR copied channels.

    x: [B, T, H, D].
    cos, sin: [TR, R].
    offsets: [N] or None.
    bounds: [N + 1] or None.
    y: [B, T, H, D].
    offset: added to every position.
    steps: steps of the binary search in bounds.
    TR: number of rows of the tables.
    along_t, along_h, onto_t, onto_h: strides of x and of y by token and by head.
    """
    TURNED: tl.constexpr = (R + BR - 1) // BR
    STRIPS: tl.constexpr = TURNED + (D - 2 * R + 2 * BR - 1) // (2 * BR)
    strip = tl.program_id(0) % STRIPS
    start = (tl.program_id(0) // STRIPS).to(tl.int64) * BT
    ahead = tl.arange(0, BT)
    inside = start + ahead < rows
    before = start // H
    behind = (start - before * H).to(tl.int32) + ahead  # rows since the first row of token ``before``
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
        # Positions after the end of the tables have no valid result, so they get NaN. Positions before the
        # tables are padding, and get 0.
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
        left = inside[:, None] & (col < D)[None, :]  # not "there": a name needs one shape in both branches
        value = tl.load(from_x + (at_x[:, None] + col[None, :]), mask=left & belongs[:, None], other=0.0)
        tl.store(to_y + (at_y[:, None] + col[None, :]), value.to(y.dtype.element_ty), mask=left)


def launch_forward(plan: Plan, x: Tensor, cos: Tensor, sin: Tensor, offset: int, offsets: Tensor | None,
                   bounds: Tensor | None, interleaved: bool, back: bool, in_place: bool) -> Tensor:
    """Launch the rotary kernel, and return y [B, T, H, D] in x's dtype.

    x: [B, T, H, D] with contiguous channels and one stride between all tokens.
    cos, sin: [TR, R], contiguous, of any dtype.
    offset: added to the positions of all tokens.
    offsets: [N], contiguous: added to the positions of each sequence; or None.
    bounds: [N + 1], contiguous: the boundaries of packed sequences, ascending within 0 .. T; or None.
    interleaved: True if the pairs are (2 i, 2 i + 1), False if they are (i, R + i).
    back: True to rotate in the opposite direction, for backward.
    in_place: True to store y in x.
    """
    B, T, H, D = x.shape
    TR, R = cos.shape
    N = B if bounds is None else bounds.shape[0] - 1
    y = x if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        start_planned(plan, rotary, dict(
            x=x, cos=cos, sin=sin, offsets=offsets, bounds=bounds, y=y,
            offset=offset, T=T, N=N, steps=(N + 1).bit_length(), rows=B * T * H, TR=TR,
            along_t=row_stride(x), along_h=x.stride(2), onto_t=row_stride(y), onto_h=y.stride(2),
            H=H, D=D, R=R, INTERLEAVED=interleaved, BACK=back))
    return y
