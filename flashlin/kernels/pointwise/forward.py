"""Forward of the elementwise ops, which compute in fp32 for tensors of any dtype.

The ops are:

    gate         y = -e^A softplus(g + b), or with a lower bound L: y = L sigmoid(e^A (g + b))
    mix          y_i = h + delta x_i, for five or six x
    key          y = k (1 + (a - 1) c)
    correction   y = (o + s v) g,  s = sum over a head's columns of r k u
    scale        y = x s
    skip         y = (o + D x) silu(z)
    read         y_t = (d_t o_{t-1} + c_t x_t) silu(z_t)

The parameters b, x_i, u and the c of a key have one element per column. A has one per head, and D has one per
column or per head. The s of a scale and the c and d of a read have one element per row and head. A read does
not load the previous row where d is 0.

Some calls have marks, 0 or NaN for each row (see nonfinite.py). Then a scale stores 0 for values that are not
finite, and marks their rows. A skip adds the mark of a row to o.

A program computes BT rows and a strip of BD columns. For a correction, a scale and a read, a strip is one
head, because these kernels sum over the columns of a head.
"""

from itertools import zip_longest
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Launch, Plan
from flashlin.kernels.pointwise.recipe import CORRECTION, GATE, KEY, MIX, READ, SCALE, SKIP, strip_width
from flashlin.kernels.recurrent.forward import softplus


@triton.jit
def strip_of(D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr):
    """Return this program's strip of W columns, and its index among the programs of the strip.

    Returns (index of the program, number of programs of the strip, columns [BD], mask [BD]). The mask is
    True for columns that exist and belong to the strip.
    """
    STRIPS: tl.constexpr = (D + W - 1) // W
    ahead = tl.arange(0, BD)
    cols = tl.program_id(0) % STRIPS * W + ahead
    return tl.program_id(0) // STRIPS, tl.num_programs(0) // STRIPS, cols, (ahead < W) & (cols < D)


@triton.jit
def tile(x, first, rows, cols, there, apart, BT: tl.constexpr):
    """Load a tile [BT, BD] of x in fp32, starting at row ``first``; zeros outside.

    apart: stride between rows, in elements. cols, there: columns, and the mask of columns that exist, both
        [BD].
    """
    row = tl.arange(0, BT)
    known = (first + row < rows)[:, None] & there[None, :]
    return tl.load(x + first * apart + (row[:, None] * apart + cols[None, :]), mask=known,
                   other=0.0).to(tl.float32)


@triton.jit
def put(x, value, first, rows, cols, there, D: tl.constexpr, BT: tl.constexpr):
    """Store a tile ``value`` [BT, BD] in x [rows, D], starting at row ``first``.

    cols, there: columns, and the mask of columns that exist, both [BD].
    """
    row = tl.arange(0, BT)
    tl.store(x + first * D + (row[:, None] * D + cols[None, :]), value.to(x.dtype.element_ty),
             mask=(first + row < rows)[:, None] & there[None, :])


@triton.jit
def line(x, cols, there):
    """Load a parameter that has one element per column: [1, BD] in fp32, zeros outside.

    Every program reads it, so it should stay in the cache.
    """
    return tl.load(x + cols, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)[None, :]


@triton.jit
def opened(g, A_log, dt_bias, first, rows, cols, there, D: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
           BD: tl.constexpr):
    """Return the inputs of a gate: g + dt_bias [BT, BD], and e^A_log [1, BD].

    A head of K columns has one A_log. dt_bias and A_log may be None, which means 0.

    first: the program's first row. cols, there: the columns, and True for columns that exist, [BD].
    """
    z = tile(g, first, rows, cols, there, D, BT)
    if dt_bias is not None:
        z += line(dt_bias, cols, there)
    rate = tl.full([1, BD], 1.0, dtype=tl.float32)
    if A_log is not None:
        rate = tl.exp(line(A_log, cols // K, there))
    return z, rate


@triton.jit(do_not_specialize=["rows", "bound"])
def pointwise_gate(
    g, A_log, dt_bias, y, bound, rows, D: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, BOUNDED: tl.constexpr,
):
    """Compute y = -e^A_log softplus(g + dt_bias) [rows, D]; a head of K columns has one A_log.

    If BOUNDED, y is bound sigmoid(e^A_log (g + dt_bias)) instead.

    g: [rows, D].
    A_log: [D // K].
    dt_bias: [D].
    y: [rows, D].
    """
    block, _, cols, there = strip_of(D, W, BD)
    first = block.to(tl.int64) * BT
    z, rate = opened(g, A_log, dt_bias, first, rows, cols, there, D=D, K=K, BT=BT, BD=BD)
    if BOUNDED:
        value = bound * tl.sigmoid(rate * z)
    else:
        value = -rate * softplus(z)
    put(y, value, first, rows, cols, there, D, BT)


@triton.jit
def mixed(h, delta, x, y, first, rows, cols, there, D: tl.constexpr, BT: tl.constexpr):
    """Store one output of a mix, h + delta x, in y [rows, D]; h and delta are [BT, BD]. See ``opened``."""
    put(y, h + delta * line(x, cols, there), first, rows, cols, there, D, BT)


@triton.jit(do_not_specialize=["rows"])
def pointwise_mix(
    h, delta, xr, xw, xk, xv, xa, xg, yr, yw, yk, yv, ya, yg, rows, D: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """Compute the five or six outputs h + delta x_i of a mix, each [rows, D]; xg and yg may be None.

    h, delta: [rows, D].
    xr, xw, xk, xv, xa, xg: [D].
    yr, yw, yk, yv, ya, yg: [rows, D].
    """
    block, _, cols, there = strip_of(D, W, BD)
    first = block.to(tl.int64) * BT
    b_h = tile(h, first, rows, cols, there, D, BT)
    b_delta = tile(delta, first, rows, cols, there, D, BT)
    mixed(b_h, b_delta, xr, yr, first, rows, cols, there, D=D, BT=BT)
    mixed(b_h, b_delta, xw, yw, first, rows, cols, there, D=D, BT=BT)
    mixed(b_h, b_delta, xk, yk, first, rows, cols, there, D=D, BT=BT)
    mixed(b_h, b_delta, xv, yv, first, rows, cols, there, D=D, BT=BT)
    mixed(b_h, b_delta, xa, ya, first, rows, cols, there, D=D, BT=BT)
    if xg is not None:
        mixed(b_h, b_delta, xg, yg, first, rows, cols, there, D=D, BT=BT)


@triton.jit(do_not_specialize=["rows"])
def pointwise_key(
    k, a, c, y, rows, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Compute y = k (1 + (a - 1) c) [rows, D], the key of RWKV-7.

    k, a: [rows, D].
    c: [D].
    y: [rows, D].
    """
    block, _, cols, there = strip_of(D, W, BD)
    first = block.to(tl.int64) * BT
    b_a = tile(a, first, rows, cols, there, D, BT)
    put(y, tile(k, first, rows, cols, there, D, BT) * (1 + (b_a - 1) * line(c, cols, there)), first, rows,
        cols, there, D, BT)


@triton.jit(do_not_specialize=["rows"])
def pointwise_correction(
    o, r, k, u, v, g, y, rows, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Compute y = (o + s v) g [rows, D], where s is the sum of r k u over a head of W columns.

    o, r, k: [rows, D].
    u: [D].
    v, g, y: [rows, D].
    """
    block, _, cols, there = strip_of(D, W, BD)
    first = block.to(tl.int64) * BT
    s = tl.sum(tile(r, first, rows, cols, there, D, BT) * tile(k, first, rows, cols, there, D, BT)
               * line(u, cols, there), 1)[:, None]
    total = tile(o, first, rows, cols, there, D, BT) + s * tile(v, first, rows, cols, there, D, BT)
    put(y, total * tile(g, first, rows, cols, there, D, BT), first, rows, cols, there, D, BT)


@triton.jit
def of_head(first, rows, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr):
    """Return the offsets of this program's head in a [rows, heads] tensor, and a mask of the existing rows.

    Both are [BT], for BT rows from row ``first``. A head is a strip of W of the D columns.
    """
    row = first + tl.arange(0, BT)
    return row * (D // W) + tl.program_id(0) % (D // W), row < rows


@triton.jit
def of_rows(marks, first, rows, BT: tl.constexpr):
    """Load the marks of BT rows, starting at row ``first``: [BT, 1]. A mark is 0 or NaN."""
    row = first + tl.arange(0, BT)
    return tl.load(marks + row, mask=row < rows, other=0.0)[:, None]


@triton.jit
def contained(value, marks, stored, first, rows, there, BT: tl.constexpr):
    """Return ``value`` [BT, BD] with 0 for elements that are not finite, and mark their rows with NaN.

    An element counts as finite if it is finite in the dtype of ``stored``, the pointer to which the caller
    stores the result. Several programs may mark a row. They all write NaN, so their order does not matter.
    """
    row = first + tl.arange(0, BT)
    fine = tl.abs(value.to(stored.dtype.element_ty).to(tl.float32)) < float("inf")
    broken = ((row < rows)[:, None] & there[None, :]) & (fine == 0)
    tl.store(marks + tl.broadcast_to(row[:, None], value.shape),
             tl.full(value.shape, float("nan"), dtype=tl.float32), mask=broken)
    return tl.where(fine, value, 0.0)


@triton.jit(do_not_specialize=["rows"])
def pointwise_scale(
    x, s, marks, y, x_n, rows, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Compute y = x s [rows, D], where s has one element for each row and head of W columns.

    With marks, elements that are not finite become 0, and the marks of their rows become NaN.

    x: [rows, D].
    s: [rows, D // W].
    marks: [rows], fp32, or None.
    y: [rows, D].
    x_n: elements from one row of x to the next.
    """
    block, _, cols, there = strip_of(D, W, BD)
    first = block.to(tl.int64) * BT
    places, known = of_head(first, rows, D, W, BT)
    b_s = tl.load(s + places, mask=known, other=0.0)[:, None]
    value = tile(x, first, rows, cols, there, x_n, BT) * b_s
    if marks is not None:
        value = contained(value, marks, y, first, rows, there, BT)
    put(y, value, first, rows, cols, there, D, BT)


@triton.jit(do_not_specialize=["rows"])
def pointwise_skip(
    o, x, skip, z, marks, y, x_n, z_n, rows, D: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """Compute y = (o + marks + skip x) silu(z) [rows, D]; K columns share an element of skip.

    Marks are 0 or NaN for each row. If marks, skip or z is None, its term or factor is absent.

    o, x: [rows, D].
    skip: [D // K] or None.
    z: [rows, D] or None.
    marks: [rows], fp32, or None.
    y: [rows, D].
    x_n, z_n: elements from one row of x, and of z, to the next.
    """
    block, _, cols, there = strip_of(D, W, BD)
    first = block.to(tl.int64) * BT
    value = tile(o, first, rows, cols, there, D, BT)
    if marks is not None:
        value += of_rows(marks, first, rows, BT)
    if skip is not None:
        value += line(skip, cols // K, there) * tile(x, first, rows, cols, there, x_n, BT)
    if z is not None:
        b_z = tile(z, first, rows, cols, there, z_n, BT)
        value *= b_z * tl.sigmoid(b_z)
    put(y, value, first, rows, cols, there, D, BT)


@triton.jit
def above(x, d, first, cols, there, D: tl.constexpr, BT: tl.constexpr):
    """Load the BT rows of x [rows, D] that begin at row first - 1: the row above each row of a tile.

    The result is [BT, BD] in fp32. Rows for which d [BT] is zero are not loaded, and are zeros in it.
    """
    row = tl.arange(0, BT)
    known = ((first + row > 0) & (d != 0))[:, None] & there[None, :]
    return tl.load(x + first * D + ((row[:, None] - 1) * D + cols[None, :]), mask=known,
                   other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def pointwise_read(
    o, x, c, z, d, y, x_n, z_n, rows, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Compute y_t = (d_t o_{t-1} + c_t x_t) silu(z_t) for all rows t, [rows, D].

    c and d have one element for each row and head of W columns. Without z, the factor silu(z_t) is absent.

    o, x: [rows, D].
    c: [rows, D // W].
    z: [rows, D] or None.
    d: [rows, D // W].
    y: [rows, D].
    x_n, z_n: elements from one row of x, and of z, to the next.
    """
    block, _, cols, there = strip_of(D, W, BD)
    first = block.to(tl.int64) * BT
    places, known = of_head(first, rows, D, W, BT)
    b_c = tl.load(c + places, mask=known, other=0.0)[:, None]
    b_d = tl.load(d + places, mask=known, other=0.0)
    value = b_d[:, None] * above(o, b_d, first, cols, there, D, BT)
    value += b_c * tile(x, first, rows, cols, there, x_n, BT)
    if z is not None:
        b_z = tile(z, first, rows, cols, there, z_n, BT)
        value *= b_z * tl.sigmoid(b_z)
    put(y, value, first, rows, cols, there, D, BT)


# Largest stride between rows, in elements, with which 32-bit offsets reach all rows of any tile.
FARTHEST = 2**31 // 2048


def rows_of(x: Tensor | None, D: int) -> tuple[Tensor | None, int]:
    """Return x as rows of D columns [rows, D], and the stride between rows in elements.

    x is copied only if the columns are not contiguous, or if the stride is more than FARTHEST. None gives
    (None, 0).
    """
    if x is None:
        return None, 0
    rows = x.reshape(-1, D)
    if rows.stride(1) != 1 or rows.stride(0) > FARTHEST:
        rows = rows.contiguous()
    return rows, rows.stride(0)


KERNELS = {GATE: pointwise_gate, MIX: pointwise_mix, KEY: pointwise_key, CORRECTION: pointwise_correction,
           SCALE: pointwise_scale, SKIP: pointwise_skip, READ: pointwise_read}
# Names of the kernels' inputs and outputs.
NAMES = {
    GATE: ("g", "A_log", "dt_bias"),
    MIX: ("h", "delta", "xr", "xw", "xk", "xv", "xa", "xg"),
    KEY: ("k", "a", "c"),
    CORRECTION: ("o", "r", "k", "u", "v", "g"),
    SCALE: ("x", "s", "marks"),
    SKIP: ("o", "x", "skip", "z", "marks"),
    READ: ("o", "x", "c", "z", "d"),
}
OUTPUTS = {GATE: ("y",), MIX: ("yr", "yw", "yk", "yv", "ya", "yg"), KEY: ("y",), CORRECTION: ("y",),
           SCALE: ("y", "marks"), SKIP: ("y",), READ: ("y",)}
STRIDED = {SCALE: ("x",), SKIP: ("x", "z"), READ: ("x", "z")}  # inputs with any row stride


def arguments(plan: Plan, launch: Launch, tensors: tuple[Tensor | None, ...], bound: float | None,
              sums: bool | None = None) -> dict[str, Any]:
    """Return the arguments, by name, that the forward and the backward kernel of an op share.

    tensors: the inputs of the op, in the order of NAMES.
    bound: lower bound of a gate, or None.
    sums: for backward, True if it computes gradients of parameters; None for kernels without this option.
    """
    problem, family = plan.problem, plan.problem.family
    D = problem.H * problem.K
    named: dict[str, Any] = dict(zip(NAMES[family], tensors, strict=True), rows=problem.T, D=D,
                                 W=strip_width(problem, launch.block("BD")))
    if sums is not None:
        named["SUMS"] = sums
    for name in STRIDED.get(family, ()):
        named[name], named[f"{name}_n"] = rows_of(named[name], D)
    if family == GATE:
        named.update(bound=bound or 0.0, K=problem.K, BOUNDED=bound is not None)
    if family == SKIP:  # K is the number of columns per element of skip
        named["K"] = 1 if named["skip"] is None else D // named["skip"].numel()
    return named


def launch_forward(plan: Plan, tensors: tuple[Tensor | None, ...], bound: float | None,
        dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Launch the forward kernel of an elementwise op, and return its outputs in ``dtype``.

    tensors: the inputs of the op, in the order of NAMES and of any dtypes. They are contiguous, but the
        inputs in STRIDED may have any strides. A gate accepts None for A_log and dt_bias, a mix for its sixth
        x, a read for z. A skip accepts None for x and skip (D), for z, or for marks [rows].
    bound: lower bound of a gate, or None.

    If a scale has marks [rows], its outputs are y and the new marks, in fp32.
    """
    x, family, launch = tensors[0], plan.problem.family, plan.launches[0]
    assert x is not None
    outputs = tuple(torch.empty(x.shape, dtype=dtype, device=x.device)
                    for of in (tensors[2:] if family == MIX else tensors[:1]) if of is not None)
    if family == SCALE and tensors[2] is not None:
        outputs = (*outputs, tensors[2].clone())
    if x.numel():
        named = arguments(plan, launch, tensors, bound)
        named.update(zip_longest(OUTPUTS[family], outputs))
        start(launch, KERNELS[family], launch.grid[0], named)
    return outputs
