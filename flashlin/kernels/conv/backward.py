"""Backward of the short convolution.

Let z be the sum before the activation act, and dz = dy act'(z). Then:

    dW_w = sum_t dz_t x_{t - W + 1 + w}
    db = sum_t dz_t
    dx_s = sum_w W_w dz_{s + W - 1 - w}

The same formulas give the gradient of the initial state, which precedes the first token. The gradient of the
final state is added to dx of the tokens that this state contains.

There are two passes over the rows, because dx of a row needs dz of later rows. The first pass recomputes z
and stores dz. It also sums partial gradients of W and b: each program stores one partial sum over all its
rows, and torch adds the partial sums. Without an activation, dz is dy. The kernels use no atomics, and a plan
fixes the order of summation, so the results are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start, start_planned
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import row_stride
from flashlin.kernels.conv.forward import (
    before_each,
    convolved,
    filters_of,
    of_tap,
    rows_first,
    sequences_of,
    span_of,
    tap,
)


@triton.jit(do_not_specialize=["T", "N", "R"])
def conv_backward_weights(
    x, weight, bias, h0, before, bounds, dy, dz, dweight, dbias, T, N, R, stride, D: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_H0: tl.constexpr, HAS_DWEIGHT: tl.constexpr, HAS_DBIAS: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Compute dz [R, D] and partial sums of dweight and dbias, the gradients of the filters and the bias.

    dz is the gradient of the sum before the activation. It is stored only if there is an activation. A
    program computes BD channels for several blocks of BT rows, in a grid-stride loop, and stores one partial
    sum.

    x: [R, D].
    weight: [D, W].
    bias: [D].
    h0: [N, W, D].
    before: [R] if packed, else None: number of sequences that begin at or before each row.
    bounds: [N + 1] or None.
    dy, dz: [R, D].
    dweight: [programs, W, D], fp32.
    dbias: [programs, D], fp32.
    R: number of rows in the batch.
    stride: elements from one row of x to the next.
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    share = (tl.program_id(0) // STRIPS).to(tl.int64)
    step = (tl.num_programs(0) // STRIPS).to(tl.int64) * BT
    cols = tl.program_id(0) % STRIPS * BD + tl.arange(0, BD)
    ahead = tl.arange(0, BT)
    taps = tl.arange(0, BW)
    filters = filters_of(weight, cols, D, W, BW)
    dw = tl.zeros([BW, BD], dtype=tl.float32)
    db = tl.zeros([BD], dtype=tl.float32)
    begin = share * BT
    for _ in range((R - begin + step - 1) // step):
        n, behind, left = sequences_of(before, bounds, begin, T, N, R, BT, VARLEN)
        offsets = ahead[:, None] * D + cols[None, :]
        channels = (cols < D)[None, :]
        u = tl.load(dy + begin * D + offsets, mask=(left > 0)[:, None] & channels, other=0.0).to(tl.float32)
        if SILU:
            z = convolved(x, filters, bias, h0, begin, n, behind, left, cols, stride=stride, D=D, W=W, BT=BT,
                          BD=BD, BW=BW, HAS_BIAS=HAS_BIAS, HAS_H0=HAS_H0)
            sigmoid = tl.sigmoid(z)
            u *= sigmoid * (1 + z * (1 - sigmoid))
            tl.store(dz + begin * D + offsets, u.to(dz.dtype.element_ty),
                     mask=(begin + ahead < R)[:, None] & channels)
        if HAS_DBIAS:
            db += tl.sum(u, 0)
        if HAS_DWEIGHT:
            for w in tl.static_range(W):
                of_w = tl.sum(u * tap(
                    x, h0, begin, n, behind, left, cols, stride, w=w, D=D, W=W, BT=BT, HAS_H0=HAS_H0), 0)
                dw += tl.where((taps == w)[:, None], of_w[None, :], 0.0)
        begin += step
    if HAS_DWEIGHT:
        tl.store(dweight + share * (D * W) + (taps[:, None] * D + cols[None, :]), dw,
                 mask=(taps < W)[:, None] & (cols < D)[None, :])
    if HAS_DBIAS:
        tl.store(dbias + share * D + cols, db, mask=cols < D)


@triton.jit(do_not_specialize=["T", "N", "R"])
def conv_backward_x(
    dz, weight, dht, before, bounds, dx, T, N, R, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, BW: tl.constexpr, HAS_DHT: tl.constexpr, VARLEN: tl.constexpr,
):
    """Compute dx [R, D], the gradient of the input; a program computes BT rows and BD channels.

    dz is the gradient of the sum before the activation. dht, the gradient of the final state, is [N, W, D],
    so that its channels are contiguous like those of dx.

    dz: [R, D].
    weight: [D, W].
    dht: [N, W, D].
    before: [R] if packed, else None: number of sequences that begin at or before each row.
    bounds: [N + 1] or None.
    dx: [R, D].
    R: number of rows in the batch.
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    begin = (tl.program_id(0) // STRIPS).to(tl.int64) * BT
    cols = tl.program_id(0) % STRIPS * BD + tl.arange(0, BD)
    n, behind, left = sequences_of(before, bounds, begin, T, N, R, BT, VARLEN)
    ahead = tl.arange(0, BT)
    offsets = ahead[:, None] * D + cols[None, :]
    channels = (cols < D)[None, :]
    filters = filters_of(weight, cols, D, W, BW)
    total = tl.zeros([BT, BD], dtype=tl.float32)
    for w in tl.static_range(W):
        seen = tl.load(dz + begin * D + offsets + (W - 1 - w) * D,
                       mask=(left > W - 1 - w)[:, None] & channels, other=0.0)
        total += seen.to(tl.float32) * of_tap(filters, w, BW)
    if HAS_DHT:
        slot = n.to(tl.int64) * W + (W - left)
        total += tl.load(dht + (slot[:, None] * D + cols[None, :]),
                         mask=((left > 0) & (left <= W))[:, None] & channels, other=0.0).to(tl.float32)
    tl.store(dx + begin * D + offsets, total.to(dx.dtype.element_ty),
             mask=(begin + ahead < R)[:, None] & channels)


@triton.jit(do_not_specialize=["T"])
def conv_backward_state(
    dz, weight, dht, bounds, dh0, T, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
    HAS_DHT: tl.constexpr, VARLEN: tl.constexpr,
):
    """Compute dh0 [N, D, W], the gradient of the initial state; a program computes BD channels of a sequence.

    Tap w of token t reads slot t + 1 + w of the state. The final state of a sequence shorter than W also
    contains slots of the initial state.

    dz: [R, D].
    weight: [D, W].
    dht: [N, D, W].
    bounds: [N + 1] or None.
    dh0: [N, D, W].
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    n = tl.program_id(0) // STRIPS
    cols = tl.program_id(0) % STRIPS * BD + tl.arange(0, BD)
    slots = tl.arange(0, BW)[None, :]
    mask = (cols < D)[:, None] & (slots < W)
    first, length = span_of(bounds, n, T, VARLEN)
    state = n.to(tl.int64) * (D * W)
    total = tl.zeros([BD, BW], dtype=tl.float32)
    for w in tl.static_range(W):
        t = slots - 1 - w
        seen = tl.load(dz + (first + t) * D + cols[:, None], mask=mask & (t >= 0) & (t < length),
                       other=0.0).to(tl.float32)
        total += seen * tl.load(weight + cols * W + w, mask=cols < D, other=0.0).to(tl.float32)[:, None]
    if HAS_DHT:
        total += tl.load(dht + state + (cols[:, None] * W + (slots - length)), mask=mask & (slots >= length),
                         other=0.0).to(tl.float32)
    tl.store(dh0 + state + (cols[:, None] * W + slots), total.to(dh0.dtype.element_ty), mask=mask)


def launch_backward(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, h0: Tensor | None,
                    bounds: Tensor | None, dy: Tensor, dht: Tensor | None, silu: bool, needs_dx: bool,
                    needs_dweight: bool, needs_dbias: bool,
                    needs_dh0: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Launch the backward kernels of the convolution and return (dx, dweight, dbias, dh0).

    A gradient that is not needed is None. dweight and dbias are in fp32; dx and dh0 have the dtypes of x and
    h0. x, weight, bias, h0 and bounds are the arguments of launch_forward. The gradients dy [B, T, D] of y
    and dht [N, D, W] of the final state are contiguous.
    """
    B, T, D = x.shape
    N, W = B if bounds is None else bounds.shape[0] - 1, weight.shape[1]
    rows, packed = B * T, bounds is not None
    before = before_each(bounds, T)
    dweight = dbias = None
    dz = torch.empty((B, T, D), dtype=x.dtype, device=x.device) if silu else dy
    if silu or needs_dweight or needs_dbias:
        launch = plan.launch("conv_backward_weights")
        shares = launch.grid[0] // -(-D // launch.block("BD"))
        dweight = torch.empty((shares, W, D), dtype=torch.float32, device=x.device) if needs_dweight else None
        dbias = torch.empty((shares, D), dtype=torch.float32, device=x.device) if needs_dbias else None
        if x.numel():
            start(launch, conv_backward_weights, launch.grid[0], dict(
                x=x, weight=weight, bias=bias, h0=rows_first(h0), before=before,
                bounds=bounds, dy=dy, dz=dz, dweight=dweight, dbias=dbias,
                T=T, N=N, R=rows, stride=row_stride(x),
                D=D, W=W, SILU=silu, HAS_BIAS=bias is not None, HAS_H0=h0 is not None,
                HAS_DWEIGHT=needs_dweight, HAS_DBIAS=needs_dbias, VARLEN=packed))
    facts = dict(D=D, W=W, HAS_DHT=dht is not None, VARLEN=packed)
    dx = torch.empty((B, T, D), dtype=x.dtype, device=x.device) if needs_dx else None
    if dx is not None and x.numel():
        start_planned(plan, conv_backward_x, dict(
            dz=dz, weight=weight, dht=rows_first(dht), before=before,
            bounds=bounds, dx=dx, T=T, N=N, R=rows, **facts))
    dh0 = torch.empty_like(h0) if needs_dh0 and h0 is not None else None
    if dh0 is not None and N:
        start_planned(plan, conv_backward_state, dict(
            dz=dz, weight=weight, dht=dht, bounds=bounds, dh0=dh0, T=T, **facts))
    return dx, None if dweight is None else dweight.sum(0).mT, None if dbias is None else dbias.sum(0), dh0
