"""Backward of the elementwise ops, whose definitions and symbols are in forward.py.

In these formulas, A', b', c', u', x_i' and D' are the gradients of the parameters for each row. The gradient
of a parameter is their sum over all rows. The gradients of A, and of a D with one element per head, are also
summed over the columns of a head. But silu' is the derivative of silu.

    gate         dg = -e^A sigmoid(z) dy,  A' = dy y,          b' = dg     where z = g + b
      bounded    dg = L s (1 - s) e^A dy,  A' = z dg,          b' = dg     where s = sigmoid(e^A z)
    mix          dh = sum_i dy_i,  ddelta = sum_i x_i dy_i,    x_i' = delta dy_i
    key          dk = (1 + (a - 1) c) dy,  da = k c dy,        c' = k (a - 1) dy
    correction   do = p,  dv = s p,  dr = q k u,  dk = q r u,  dg = (o + s v) dy,  u' = q r k
                 where p = g dy, q = sum over columns of p v
    scale        dx = s dy,  ds = sum over a head's columns of x dy
    skip         do = p,  dx = D p,  dz = dy (o + D x) silu'(z),  D' = x p     where p = silu(z) dy
    read         do_{t-1} = d_t p_t,  dx = c p,  dz = dy (d_t o_{t-1} + c x) silu'(z),
                 dc, dd = sums over a head's columns of x p, o_{t-1} p

With marks (see nonfinite.py), a scale adds the gradient of the marks to dx and to the products x dy. A skip
stores 0 for elements of do that are not finite, and NaN in the gradient of the marks of their rows.

A program with parameters processes several blocks of BT rows of its strip, in a grid-stride loop. It keeps
its partial sums of the gradients of the parameters in registers. The partial sums are [parameters, programs
of a strip, D] in fp32, and torch adds them. The kernels use no atomics, and a plan fixes the order of
summation, so the results are deterministic.
"""

from itertools import zip_longest

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.elementwise import cdiv
from flashlin.kernels.pointwise.forward import (
    NAMES,
    OUTPUTS,
    above,
    arguments,
    contained,
    line,
    of_head,
    of_rows,
    opened,
    put,
    strip_of,
    tile,
)
from flashlin.kernels.pointwise.recipe import CORRECTION, GATE, KEY, MIX, READ, SCALE, SKIP, strip_width
from flashlin.kernels.recurrent.forward import softplus


@triton.jit
def put_share(shares, total, parameter: tl.constexpr, share, count, cols, there, D: tl.constexpr):
    """Store a program's partial sum of the gradient of a parameter: ``total`` [BT, BD], summed over its rows.

    parameter: index of the parameter. share: index of the program among the ``count`` programs of its strip.
    """
    tl.store(shares + (count.to(tl.int64) * parameter + share) * D + cols, tl.sum(total, 0), mask=there)


@triton.jit(do_not_specialize=["rows", "bound"])
def pointwise_gate_backward(
    g, A_log, dt_bias, dy, dg, shares, bound, rows, D: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BOUNDED: tl.constexpr, SUMS: tl.constexpr,
):
    """Compute dg [rows, D], the gradient of the input of a gate; a head of K columns has one A_log.

    If SUMS, the kernel also stores the partial sums of the gradients of A_log and dt_bias in ``shares``.

    g: [rows, D].
    A_log: [D // K].
    dt_bias: [D].
    dy, dg: [rows, D].
    shares: partial sums [parameters, programs, D], fp32, or None.
    """
    share, count, cols, there = strip_of(D, W, BD)
    first = share.to(tl.int64) * BT
    step = count.to(tl.int64) * BT
    of_A = tl.zeros([BT, BD], dtype=tl.float32)
    of_bias = tl.zeros([BT, BD], dtype=tl.float32)
    for _ in range((rows - first + step - 1) // step):
        z, rate = opened(g, A_log, dt_bias, first, rows, cols, there, D=D, K=K, BT=BT, BD=BD)
        b_dy = tile(dy, first, rows, cols, there, D, BT)
        if BOUNDED:
            dz = b_dy * rate * (bound * tl.sigmoid(rate * z) * tl.sigmoid(-rate * z))
            of_A += dz * z
        else:
            dz = -b_dy * rate * tl.sigmoid(z)
            of_A -= b_dy * rate * softplus(z)
        of_bias += dz
        put(dg, dz, first, rows, cols, there, D, BT)
        first += step
    if SUMS:
        put_share(shares, of_A, 0, share, count, cols, there, D)
        put_share(shares, of_bias, 1, share, count, cols, there, D)


@triton.jit
def unmixed(dy, x, delta, dh, ddelta, total, first, rows, cols, there, D: tl.constexpr, BT: tl.constexpr):
    """Add the contributions of one output y = h + delta x of the op mix to the gradients of h, delta and x.

    Returns the three sums, each [BT, BD].

    total: gradient of x [BT, BD], before its sum over rows. The shape of delta, dh and ddelta is [BT, BD].
    first: the program's first row. cols, there: the columns, and True for columns that exist, [BD].
    """
    b_dy = tile(dy, first, rows, cols, there, D, BT)
    return dh + b_dy, ddelta + b_dy * line(x, cols, there), total + b_dy * delta


@triton.jit(do_not_specialize=["rows"])
def pointwise_mix_backward(
    delta, xr, xw, xk, xv, xa, xg, dyr, dyw, dyk, dyv, dya, dyg, dh, ddelta, shares, rows, D: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SUMS: tl.constexpr,
):
    """Compute dh and ddelta [rows, D] of a mix, whose outputs are y_i = h + delta x_i for five or six x_i.

    If SUMS, the kernel also stores the partial sums of the gradients of all x_i in ``shares``.

    delta: [rows, D].
    xr, xw, xk, xv, xa, xg: [D].
    dyr, dyw, dyk, dyv, dya, dyg, dh, ddelta: [rows, D].
    shares: partial sums [parameters, programs, D], fp32, or None.
    """
    share, count, cols, there = strip_of(D, W, BD)
    first = share.to(tl.int64) * BT
    step = count.to(tl.int64) * BT
    of_r = tl.zeros([BT, BD], dtype=tl.float32)
    of_w = tl.zeros([BT, BD], dtype=tl.float32)
    of_k = tl.zeros([BT, BD], dtype=tl.float32)
    of_v = tl.zeros([BT, BD], dtype=tl.float32)
    of_a = tl.zeros([BT, BD], dtype=tl.float32)
    of_g = tl.zeros([BT, BD], dtype=tl.float32)
    for _ in range((rows - first + step - 1) // step):
        b_delta = tile(delta, first, rows, cols, there, D, BT)
        b_dh = tl.zeros([BT, BD], dtype=tl.float32)
        b_ddelta = tl.zeros([BT, BD], dtype=tl.float32)
        b_dh, b_ddelta, of_r = unmixed(dyr, xr, b_delta, b_dh, b_ddelta, of_r, first, rows, cols, there=there,
                                       D=D, BT=BT)
        b_dh, b_ddelta, of_w = unmixed(dyw, xw, b_delta, b_dh, b_ddelta, of_w, first, rows, cols, there=there,
                                       D=D, BT=BT)
        b_dh, b_ddelta, of_k = unmixed(dyk, xk, b_delta, b_dh, b_ddelta, of_k, first, rows, cols, there=there,
                                       D=D, BT=BT)
        b_dh, b_ddelta, of_v = unmixed(dyv, xv, b_delta, b_dh, b_ddelta, of_v, first, rows, cols, there=there,
                                       D=D, BT=BT)
        b_dh, b_ddelta, of_a = unmixed(dya, xa, b_delta, b_dh, b_ddelta, of_a, first, rows, cols, there=there,
                                       D=D, BT=BT)
        if xg is not None:
            b_dh, b_ddelta, of_g = unmixed(dyg, xg, b_delta, b_dh, b_ddelta, of_g, first, rows, cols,
                                           there=there, D=D, BT=BT)
        put(dh, b_dh, first, rows, cols, there, D, BT)
        put(ddelta, b_ddelta, first, rows, cols, there, D, BT)
        first += step
    if SUMS:
        put_share(shares, of_r, 0, share, count, cols, there, D)
        put_share(shares, of_w, 1, share, count, cols, there, D)
        put_share(shares, of_k, 2, share, count, cols, there, D)
        put_share(shares, of_v, 3, share, count, cols, there, D)
        put_share(shares, of_a, 4, share, count, cols, there, D)
        if xg is not None:
            put_share(shares, of_g, 5, share, count, cols, there, D)


@triton.jit(do_not_specialize=["rows"])
def pointwise_key_backward(
    k, a, c, dy, dk, da, shares, rows, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Compute dk and da [rows, D], the gradients of y = k (1 + (a - 1) c).

    If SUMS, the kernel also stores the partial sums of the gradient of c in ``shares``.

    k, a: [rows, D].
    c: [D].
    dy, dk, da: [rows, D].
    shares: partial sums [parameters, programs, D], fp32, or None.
    """
    share, count, cols, there = strip_of(D, W, BD)
    first = share.to(tl.int64) * BT
    step = count.to(tl.int64) * BT
    b_c = line(c, cols, there)
    total = tl.zeros([BT, BD], dtype=tl.float32)
    for _ in range((rows - first + step - 1) // step):
        b_dy = tile(dy, first, rows, cols, there, D, BT)
        b_k = tile(k, first, rows, cols, there, D, BT)
        less = tile(a, first, rows, cols, there, D, BT) - 1
        put(dk, b_dy * (1 + less * b_c), first, rows, cols, there, D, BT)
        put(da, b_dy * b_k * b_c, first, rows, cols, there, D, BT)
        total += b_dy * b_k * less
        first += step
    if SUMS:
        put_share(shares, total, 0, share, count, cols, there, D)


@triton.jit(do_not_specialize=["rows"])
def pointwise_correction_backward(
    o, r, k, u, v, g, dy, do, dr, dk, dv, dg, shares, rows, D: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, SUMS: tl.constexpr,
):
    """Compute do, dr, dk, dv and dg [rows, D], the gradients of y = (o + s v) g.

    s is the sum of r k u over the columns of a head. If SUMS, the kernel also stores the partial sums of the
    gradient of u in ``shares``.

    o, r, k: [rows, D].
    u: [D].
    v, g, dy, do, dr, dk, dv, dg: [rows, D].
    shares: partial sums [parameters, programs, D], fp32, or None.
    """
    share, count, cols, there = strip_of(D, W, BD)
    first = share.to(tl.int64) * BT
    step = count.to(tl.int64) * BT
    b_u = line(u, cols, there)
    total = tl.zeros([BT, BD], dtype=tl.float32)
    for _ in range((rows - first + step - 1) // step):
        b_dy = tile(dy, first, rows, cols, there, D, BT)
        b_v = tile(v, first, rows, cols, there, D, BT)
        b_r = tile(r, first, rows, cols, there, D, BT)
        b_k = tile(k, first, rows, cols, there, D, BT)
        s = tl.sum(b_r * b_k * b_u, 1)[:, None]
        put(dg, b_dy * (tile(o, first, rows, cols, there, D, BT) + s * b_v), first, rows, cols, there, D, BT)
        p = b_dy * tile(g, first, rows, cols, there, D, BT)
        put(do, p, first, rows, cols, there, D, BT)
        put(dv, p * s, first, rows, cols, there, D, BT)
        q = tl.sum(p * b_v, 1)[:, None]
        put(dr, q * b_k * b_u, first, rows, cols, there, D, BT)
        put(dk, q * b_r * b_u, first, rows, cols, there, D, BT)
        total += q * b_r * b_k
        first += step
    if SUMS:
        put_share(shares, total, 0, share, count, cols, there, D)


@triton.jit(do_not_specialize=["rows"])
def pointwise_scale_backward(
    x, s, dy, dmarks, dx, ds, x_n, rows, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Compute dx [rows, D] and ds [rows, D // W], the gradients of y = x s.

    A program computes BT rows of one head, which is a strip of W columns. dmarks, the gradient of the marks,
    is added to dx, and to each product x dy that ds sums.

    x: [rows, D].
    s: [rows, D // W].
    dy: [rows, D].
    dmarks: [rows], fp32, or None.
    dx: [rows, D].
    ds: [rows, D // W].
    x_n: elements from one row of x to the next.
    """
    block, _, cols, there = strip_of(D, W, BD)
    first = block.to(tl.int64) * BT
    places, known = of_head(first, rows, D, W, BT)
    b_s = tl.load(s + places, mask=known, other=0.0)[:, None]
    b_dy = tile(dy, first, rows, cols, there, D, BT)
    b_dx = b_dy * b_s
    products = b_dy * tile(x, first, rows, cols, there, x_n, BT)
    if dmarks is not None:
        b_dmarks = of_rows(dmarks, first, rows, BT)
        b_dx += b_dmarks
        products += b_dmarks
    put(dx, b_dx, first, rows, cols, there, D, BT)
    tl.store(ds + places, tl.sum(products, 1), mask=known)


@triton.jit(do_not_specialize=["rows"])
def pointwise_skip_backward(
    dy, o, x, skip, z, marks, do, dx, dz, dmarks, shares, x_n, z_n, rows, D: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SUMS: tl.constexpr,
):
    """Compute do, dx and dz [rows, D], the gradients of y = (o + marks + skip x) silu(z).

    If SUMS, the kernel also stores the partial sums of the gradient of ``skip`` in ``shares``. Without z and
    marks, do is equal to dy and is not stored. With marks, elements of do that are not finite become 0, and
    dmarks of their rows becomes NaN; the caller initialises dmarks with zeros.

    dy, o, x: [rows, D].
    skip: [D // K] or None.
    z: [rows, D] or None.
    marks: [rows], fp32, or None.
    do, dx, dz: [rows, D].
    dmarks: [rows], fp32, or None.
    shares: partial sums [parameters, programs, D], fp32, or None.
    x_n, z_n: elements from one row of x, and of z, to the next.
    """
    share, count, cols, there = strip_of(D, W, BD)
    first = share.to(tl.int64) * BT
    step = count.to(tl.int64) * BT
    total = tl.zeros([BT, BD], dtype=tl.float32)
    for _ in range((rows - first + step - 1) // step):
        p = tile(dy, first, rows, cols, there, D, BT)
        b_x = tl.zeros([BT, BD], dtype=tl.float32)
        b_skip = tl.zeros([1, BD], dtype=tl.float32)
        if skip is not None:
            b_x = tile(x, first, rows, cols, there, x_n, BT)
            b_skip = line(skip, cols // K, there)
        if z is not None:
            b_z = tile(z, first, rows, cols, there, z_n, BT)
            on = tl.sigmoid(b_z)
            value = tile(o, first, rows, cols, there, D, BT) + b_skip * b_x
            if marks is not None:
                value += of_rows(marks, first, rows, BT)
            put(dz, p * value * on * (1 + b_z * (1 - on)), first, rows, cols, there, D, BT)
            p *= b_z * on
        if marks is not None:
            put(do, contained(p, dmarks, do, first, rows, there, BT), first, rows, cols, there, D, BT)
        elif z is not None:
            put(do, p, first, rows, cols, there, D, BT)
        if skip is not None:
            put(dx, p * b_skip, first, rows, cols, there, D, BT)
            total += p * b_x
        first += step
    if SUMS:
        put_share(shares, total, 0, share, count, cols, there, D)


@triton.jit(do_not_specialize=["rows"])
def pointwise_read_backward(
    dy, o, x, c, z, d, do, dx, dc, dz, dd, x_n, z_n, rows, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Compute the gradients of y_t = (d_t o_{t-1} + c_t x_t) silu(z_t).

    They are do [1 + rows, D], dx and dz [rows, D], and dc and dd [rows, D // W].

    Row t of do is the gradient of o_{t-1}, so do has one more row than o. A program computes BT rows of one
    head, which is a strip of W columns.

    dy, o, x: [rows, D].
    c: [rows, D // W].
    z: [rows, D] or None.
    d: [rows, D // W].
    do: [1 + rows, D]: row t is the gradient of o_{t-1}.
    dx: [rows, D].
    dc: [rows, D // W].
    dz: [rows, D] or None.
    dd: [rows, D // W].
    x_n, z_n: elements from one row of x, and of z, to the next.
    """
    block, _, cols, there = strip_of(D, W, BD)
    first = block.to(tl.int64) * BT
    places, known = of_head(first, rows, D, W, BT)
    b_c = tl.load(c + places, mask=known, other=0.0)[:, None]
    b_d = tl.load(d + places, mask=known, other=0.0)
    p = tile(dy, first, rows, cols, there, D, BT)
    b_x = tile(x, first, rows, cols, there, x_n, BT)
    b_o = above(o, b_d, first, cols, there, D, BT)
    if z is not None:
        b_z = tile(z, first, rows, cols, there, z_n, BT)
        on = tl.sigmoid(b_z)
        value = b_d[:, None] * b_o + b_c * b_x
        put(dz, p * value * on * (1 + b_z * (1 - on)), first, rows, cols, there, D, BT)
        p *= b_z * on
    put(do, tl.where((b_d != 0)[:, None], p * b_d[:, None], 0.0), first, rows, cols, there, D, BT)
    put(dx, p * b_c, first, rows, cols, there, D, BT)
    tl.store(dc + places, tl.sum(p * b_x, 1), mask=known)
    tl.store(dd + places, tl.sum(p * b_o, 1), mask=known)


KERNELS = {GATE: pointwise_gate_backward, MIX: pointwise_mix_backward, KEY: pointwise_key_backward,
           CORRECTION: pointwise_correction_backward, SCALE: pointwise_scale_backward,
           SKIP: pointwise_skip_backward, READ: pointwise_read_backward}
# Indices of the inputs that are parameters, in the order of their partial sums.
PARAMETERS = {GATE: (1, 2), MIX: (2, 3, 4, 5, 6, 7), KEY: (2,), CORRECTION: (3,), SCALE: (), SKIP: (2,),
              READ: ()}
UNREAD = {MIX: "h", SCALE: "marks"}  # inputs that backward does not need


def launch_backward(plan: Plan, tensors: tuple[Tensor | None, ...], dys: tuple[Tensor, ...],
                    bound: float | None, sums: bool) -> list[Tensor | None]:
    """Launch the backward kernel of an elementwise op; return the gradient of each input, or None.

    A gradient has the dtype and shape of its input. Gradients of parameters are None unless sums is True.

    tensors: the inputs of launch_forward. The h of a mix may be None, because no gradient needs its values.
        For the same reason, the o of a skip without z may be None if it is float32.
    dys: the contiguous gradients of the outputs.
    bound: lower bound of a gate, or None.
    """
    family, launch, dy = plan.problem.family, plan.launches[-1], dys[0]
    D, parameters = plan.problem.H * plan.problem.K, PARAMETERS[family]
    grads = [None if x is None or at in parameters else torch.empty(x.shape, dtype=x.dtype, device=x.device)
             for at, x in enumerate(tensors)]
    if family == MIX:
        grads[0] = torch.empty_like(dy)
    if family == SCALE and tensors[2] is not None:
        grads[2] = dys[1]
    if family == SKIP and tensors[4] is not None:
        grads[0] = torch.empty_like(dy, dtype=torch.float32) if tensors[0] is None else grads[0]
        grads[4] = torch.zeros_like(tensors[4])
    of_above = None
    if family == READ:  # the last row of o is never read, so its gradient is 0
        assert tensors[0] is not None
        of_above = tensors[0].new_empty((1 + plan.problem.T, D))
        of_above[-1:] = 0
        grads[0] = of_above[1:].view(dy.shape)
    shares = None
    if sums:
        count = launch.grid[0] // max(cdiv(D, strip_width(plan.problem, launch.block("BD"))), 1)
        shares = dy.new_empty((len(parameters), count, D), dtype=torch.float32)
    if dy.numel():
        named = arguments(plan, launch, tensors, bound, sums if parameters else None)
        if family in UNREAD:
            del named[UNREAD[family]]
        named.update((f"d{name}", y) for name, y in zip_longest(OUTPUTS[family], dys))
        named.update((f"d{name}", grads[at]) for at, name in enumerate(NAMES[family]) if at not in parameters)
        if family == READ:
            named["do"] = of_above
        if parameters:
            named["shares"] = shares
        start(launch, KERNELS[family], launch.grid[0], named)
    if shares is not None:
        totals = shares.sum(1) if dy.numel() else shares.new_zeros((len(parameters), D))
        for at, total in zip(parameters, totals, strict=True):
            parameter = tensors[at]
            if parameter is not None:
                total = total if parameter.numel() == D else total.view(parameter.numel(), -1).sum(1)
                grads[at] = total.view(parameter.shape).to(parameter.dtype)
    if family == SKIP and grads[0] is None:
        grads[0] = dy.float()
    return grads
