"""Small kernels that each show one known issue of Triton.

The module proof_table.py lists the launch that shows each known issue. The kernels are only compiled, so they
need no masks. The number of rows of every tile is a power of two.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False,
# disallow-untyped-calls=False
from __future__ import annotations

import triton
import triton.language as tl

# --- GPUs and assemblers: blackwell-unknown-32, sm103-ptxas, sm110-ptxas, sm121-ptxas, ptxas-127-32,
# ptxas-13-34; bf16 below sm_80: bf16-pre-ampere-32, both-halves-39

@triton.jit
def cast(x, o):
    n = tl.arange(0, 64)
    tl.store(o + n, tl.load(x + n).to(o.dtype.element_ty))


# --- any matrix product: half-dot-33-pre-ampere, half-dot-34-pre-ampere, tf32-dot-turing-32, bf16-pre-ampere-32,
# sm120-dot-330, sm103-llvm-33

@triton.jit
def product(a, b, o, N: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    tl.store(o + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def ieee_product(a, b, o, N: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    tl.store(o + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


# --- mma-to-mma-volta: a sum of products, one of them of transposed operands

@triton.jit
def mixed_sum(a, b, o, N: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    b_a, b_b = tl.load(a + at), tl.load(b + at)
    tl.store(o + at, tl.dot(b_a, b_b) + tl.dot(tl.trans(b_a), tl.trans(b_b)))


# --- v-first-volta: a product reads a state with contiguous columns, and another product is added to it

@triton.jit
def column_state(a, h, o, T, N: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    b_h = tl.load(h + n[:, None] + n[None, :] * N)
    for t in range(T):
        b_a = tl.load(a + t * N * N + at)
        tl.store(o + t * N * N + at, tl.dot(b_a, b_h.to(b_a.dtype)))
        b_h += tl.dot(tl.trans(b_a), b_a)


# --- half-dot-volta-32: a vector in the slice layout of the rows of a matrix product

@triton.jit
def row_sums(a, b, o, N: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    tl.store(o + n, tl.sum(tl.dot(tl.load(a + at), tl.load(b + at)), 1))


@triton.jit
def ieee_row_sums(a, b, o, N: tl.constexpr):
    n = tl.arange(0, N)
    at = n[:, None] * N + n[None, :]
    tl.store(o + n, tl.sum(tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"), 1))


# --- mma-to-mma-31, reshape-outs-32, stmatrix-33 (eight warps), tall-state-32, narrow-state-32: the results
# of matrix products are operands of other products

@triton.jit
def scan(q, k, v, o, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr):
    """Compute o = q h + (q k^T) v for each chunk of BT rows, then update h = h / 2 + k^T v."""
    t, x, y = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, V)
    h = tl.zeros([K, V], dtype=tl.float32)
    for t0 in range(0, T, BT):
        b_q = tl.load(q + (t0 + t)[:, None] * K + x[None, :])
        b_k = tl.load(k + (t0 + t)[:, None] * K + x[None, :])
        b_v = tl.load(v + (t0 + t)[:, None] * V + y[None, :])
        b_o = tl.dot(b_q, h.to(b_q.dtype))
        b_o += tl.dot(tl.dot(b_q, tl.trans(b_k)).to(b_v.dtype), b_v)
        tl.store(o + (t0 + t)[:, None] * V + y[None, :], b_o)
        h = h * 0.5 + tl.dot(tl.trans(b_k), b_v)


# --- hoist-tmem-34, hoist-tmem-34-tf32, latencies-35-tf32: the difference of two products is added to a
# state, and one of these products depends on the state

@triton.jit
def reverse_scan(q, w, k, v, o, T, N: tl.constexpr):
    n = tl.arange(0, N)
    tile = n[:, None] * N + n[None, :]
    h = tl.zeros([N, N], dtype=tl.float32)
    for t in range(T - 1, -1, -1):
        at = t * N * N + tile
        tl.store(o + at, h.to(o.dtype.element_ty))
        b_v = tl.load(v + at)
        b_u = tl.dot(tl.load(k + at), h.to(b_v.dtype)).to(b_v.dtype)
        h = h * 0.5 + (tl.dot(tl.load(q + at), b_v) - tl.dot(tl.load(w + at), b_u))


# --- dominance-35: a loop of constant length that adds a product to a tile it has just loaded

@triton.jit
def added_to_loaded(a, b, o, N: tl.constexpr):
    n = tl.arange(0, N)
    tile = n[:, None] * N + n[None, :]
    b_a = tl.load(a + tile)
    for t in range(2):
        at = t * N * N + tile
        b_o = tl.load(o + at)
        b_o += tl.dot(b_a, tl.load(b + at))
        tl.store(o + at, b_o)


# --- blackwell-chained-acc: two products into one accumulator

@triton.jit
def chained(a, b, o, T, N: tl.constexpr):
    n = tl.arange(0, N)
    tile = n[:, None] * N + n[None, :]
    acc = tl.zeros([N, N], dtype=tl.float32)
    for t in range(T):
        b_a = tl.load(a + t * N * N + tile)
        b_b = tl.load(b + t * N * N + tile)
        acc += tl.dot(b_a, b_b)
        acc += tl.dot(b_b, b_a)
    tl.store(o + tile, acc)


# --- row-sums-read-twice: a loop accumulates row sums, and two stores read them after the loop

@triton.jit
def summed_twice(x, o, T, N: tl.constexpr):
    n = tl.arange(0, N)
    total = tl.zeros([N], dtype=tl.float32)
    for t in range(T):
        total += tl.sum(tl.load(x + t * N * N + n[:, None] * N + n[None, :]), 1)
    tl.store(o + n, total)
    tl.store(o + N + n, total * 2)


@triton.jit
def summed_at_the_end(x, o, T, N: tl.constexpr):
    n = tl.arange(0, N)
    tile = tl.zeros([N, N], dtype=tl.float32)
    for t in range(T):
        tile += tl.load(x + t * N * N + n[:, None] * N + n[None, :])
    total = tl.sum(tile, 1)
    tl.store(o + n, total)
    tl.store(o + N + n, total * 2)


# --- functions of triton.language that only some releases have: block-pointers-39, gather-32, descriptors-33, bf16-atomics-33

@triton.jit
def block_pointer(x, o):
    tl.store(o + tl.arange(0, 64), tl.load(tl.make_block_ptr(x, (64,), (1,), (0,), (64,), (0,))))


@triton.jit
def gathered(x, o):
    n = tl.arange(0, 64)
    tl.store(o + n, tl.gather(tl.load(x + n), 63 - n, 0))


@triton.jit
def described(x, o):
    tl.store(o + tl.arange(0, 64), tl.make_tensor_descriptor(x, [64], [1], [64]).load([0]))


@triton.jit
def added(x, o):
    n = tl.arange(0, 64)
    tl.atomic_add(o + n, tl.load(x + n))
