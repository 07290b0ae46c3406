"""User-style Triton kernels for the tests of shield. They do not use flashlin."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled(x, o, T, B, H: tl.constexpr, BT: tl.constexpr):
    """Compute o = 2 x + 1 for tensors [B, H, T], where the 1 is added only if the batch index is below B.

    The grid has the usual layout: blocks of T on axis 0, batch times heads on axis 1.
    """
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b = i_bh // H
    t = i_t * BT + tl.arange(0, BT)
    b_x = tl.load(x + i_bh * T + t, mask=t < T, other=0.0)
    tl.store(o + i_bh * T + t, (b_x * 2 + (i_b < B)).to(o.dtype.element_ty), mask=t < T)


@triton.jit
def running(x, o, T, N: tl.constexpr):
    """Add up the row sums of T tiles [N, N], and store the total [N] of all earlier tiles for each tile."""
    n = tl.arange(0, N)
    total = tl.zeros([N], dtype=tl.float32)
    for t in range(T):
        tl.store(o + t * N + n, total)
        total += tl.sum(tl.load(x + t * N * N + n[:, None] * N + n[None, :]), 1)


@triton.jit
def states(k, v, w, h, g, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr):
    """Store the state [K, V] of a delta rule before each chunk of BT tokens.

    Users report Triton's reshapeOuts failure with kernels of this form.
    """
    i_bh = tl.program_id(0)
    b_h = tl.zeros([K, V], dtype=tl.float32)
    rows, columns, t = tl.arange(0, K), tl.arange(0, V), tl.arange(0, BT)
    for i_t in range(tl.cdiv(T, BT)):
        at = i_bh * T + i_t * BT + t
        tl.store(h + (i_bh * tl.cdiv(T, BT) + i_t) * K * V + rows[:, None] * V + columns[None, :],
                 b_h.to(h.dtype.element_ty))
        b_w = tl.load(w + at[:, None] * K + rows[None, :])
        b_k = tl.load(k + at[None, :] * K + rows[:, None])
        b_v = tl.load(v + at[:, None] * V + columns[None, :])
        b_v -= tl.dot(b_w, b_h.to(b_w.dtype)).to(b_v.dtype)
        b_h = b_h * tl.exp(tl.load(g + i_bh * T + i_t)) + tl.dot(b_k, b_v)


@triton.jit
def product(a, b, c, N, BN: tl.constexpr):
    """Multiply two matrices [N, N] of any dtype; the accumulator is not rescaled."""
    i, j = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, BN)
    acc = tl.zeros([BN, BN], dtype=tl.float32)
    for s in range(0, N, BN):
        acc += tl.dot(tl.load(a + (i * BN + n)[:, None] * N + s + n[None, :]),
                      tl.load(b + (s + n)[:, None] * N + j * BN + n[None, :]))
    tl.store(c + (i * BN + n)[:, None] * N + j * BN + n[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def square(x):
    return tl.dot(x, x)


@triton.jit
def through_a_helper(x, o, BN: tl.constexpr):
    n = tl.arange(0, BN)
    tl.store(o + n[:, None] * BN + n[None, :], square(tl.load(x + n[:, None] * BN + n[None, :])))


@triton.jit
def precise(x, o, BN: tl.constexpr):
    n = tl.arange(0, BN).to(tl.int64)
    b_x = tl.load(x + n[:, None] * BN + n[None, :])
    tl.store(o + n[:, None] * BN + n[None, :], tl.dot(b_x, b_x, input_precision="ieee"))


@triton.jit
def keyed(x, BK: tl.constexpr, n, o, m):
    """Compute o = x + m for the first n elements.

    The autotuner's key n comes after BK, which only configurations provide. The autotuner of Triton 3.0 and
    3.1 then looks the key up at a wrong position.
    """
    at = tl.arange(0, BK)
    tl.store(o + at, tl.load(x + at, mask=at < n, other=0.0) + m, mask=at < n)


@triton.jit
def usual(x, o, B=4):
    """Compute o = x + B with one program per element; B has a default."""
    at = tl.program_id(0)
    tl.store(o + at, tl.load(x + at) + B)
