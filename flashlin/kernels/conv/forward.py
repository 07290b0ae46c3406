"""Forward of the short convolution, its final state, and its step for decoding.

For each channel separately, with silu or no activation as act:

    y_t = act(b + sum_w W_w x_{t - W + 1 + w}) + residual_t

A row is one token, and rows are counted through the whole batch. A program computes BT rows and BD channels.
It loads its tile W times, once for each tap; all loads but the first hit the cache. Tokens before a sequence
come from its state [D, W]; slot w contains token w - W. The filters are also [D, W].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start_planned
from flashlin.guards.plan_types import Plan
from flashlin.kernels.batch import row_stride


@triton.jit
def sequences_of(before, bounds, start, T, N, R, BT: tl.constexpr, VARLEN: tl.constexpr):
    """Locate the rows start .. start + BT in their sequences; return (n, behind, left), each [BT].

    n: index of the row's sequence.
    behind: number of the sequence's rows before this row.
    left: number of the sequence's rows from this row to its end, or 0 for a row of no sequence.

    before: [R] if packed: number of sequences that begin at or before each row. N, R: number of sequences and
        rows.
    """
    ahead = tl.arange(0, BT)
    inside = start + ahead < R
    if VARLEN:
        n = tl.load(before + start + ahead, mask=inside, other=0) - 1
        belongs = (n >= 0) & (n < N)
        behind = (start + ahead - tl.load(bounds + n, mask=belongs, other=0)).to(tl.int32)
        left = tl.where(belongs, (tl.load(bounds + n + 1, mask=belongs,
                                          other=0) - start - ahead).to(tl.int32), 0)
    else:
        skipped = start // T
        local = (start - skipped * T).to(tl.int32) + ahead
        n = (skipped + local // T).to(tl.int32)
        behind = local % T
        left = tl.where(inside, T - behind, 0)
    return n, behind, left


@triton.jit
def tap(x, h0, start, n, behind, left, cols, stride, w: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
        BT: tl.constexpr, HAS_H0: tl.constexpr):
    """Load the input of tap w, one of W, for each row: [BT, BD] in fp32.

    The input is a row of x, or a slot of the state h0 if the input precedes the sequence. h0 is [N, W, D], so
    that its channels are contiguous like those of x.

    x: [R, D].
    h0: [N, W, D].
    start: first row.
    n: [BT]: index of the row's sequence.
    behind: [BT]: number of the sequence's rows before the row.
    left: [BT]: number of the sequence's rows from the row to its end.
    cols: [BD]: columns.
    stride: elements from one row of x to the next.
    """
    BACK: tl.constexpr = W - 1 - w
    ahead = tl.arange(0, BT) - BACK
    channels = (cols < D)[None, :]
    seen = tl.load(x + start * stride + (ahead[:, None] * stride + cols[None, :]),
                   mask=((left > 0) & (behind >= BACK))[:, None] & channels, other=0.0).to(tl.float32)
    if HAS_H0:
        if BACK > 0:
            slot = n.to(tl.int64) * W + (behind + (W - BACK))
            seen += tl.load(h0 + (slot[:, None] * D + cols[None, :]),
                            mask=((left > 0) & (behind < BACK))[:, None] & channels, other=0.0).to(tl.float32)
    return seen


@triton.jit
def filters_of(weight, cols, D: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """Load the filters of BD channels from weight [D, W]: [BD, BW] in fp32, zeros outside.

    All taps of a channel are loaded at once, because they are adjacent in memory. A load of a single tap
    would read a few bytes from a different cache line for each channel.
    """
    slots = tl.arange(0, BW)[None, :]
    return tl.load(weight + (cols[:, None] * W + slots), mask=(cols < D)[:, None] & (slots < W), other=0.0,
                   eviction_policy="evict_last").to(tl.float32)


@triton.jit
def of_tap(filters, w: tl.constexpr, BW: tl.constexpr):
    """Return the weights of tap w, [1, BD], from filters [BD, BW]."""
    return tl.sum(tl.where(tl.arange(0, BW)[None, :] == w, filters, 0.0), 1)[None, :]


@triton.jit
def convolved(x, filters, bias, h0, start, n, behind, left, cols, stride, D: tl.constexpr, W: tl.constexpr,
              BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, HAS_BIAS: tl.constexpr,
              HAS_H0: tl.constexpr):
    """Return z [BT, BD] in fp32, the sum of the bias and W taps before the activation.

    filters: [BD, BW]. bias: [D]. ``tap`` explains the other parameters.
    """
    z = tl.zeros([BT, BD], dtype=tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + cols, mask=cols < D, other=0.0,
                     eviction_policy="evict_last").to(tl.float32)[None, :]
    for w in tl.static_range(W):
        z += tap(
            x, h0, start, n, behind, left, cols, stride,
            w=w, D=D, W=W, BT=BT, HAS_H0=HAS_H0) * of_tap(filters, w, BW)
    return z


@triton.jit(do_not_specialize=["T", "N", "R"])
def conv_forward(
    x, weight, bias, residual, h0, before, bounds, y, T, N, R, stride, D: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_H0: tl.constexpr, VARLEN: tl.constexpr,
):
    """Compute y [R, D], the output of the convolution; a program computes BT rows and BD channels.

    x: [R, D].
    weight: [D, W].
    bias: [D].
    residual: [R, D].
    h0: [N, W, D].
    before: [R] if packed, else None: number of sequences that begin at or before each row.
    bounds: [N + 1] or None.
    y: [R, D].
    R: number of rows in the batch.
    stride: elements from one row of x to the next.
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    start = (tl.program_id(0) // STRIPS).to(tl.int64) * BT
    cols = tl.program_id(0) % STRIPS * BD + tl.arange(0, BD)
    n, behind, left = sequences_of(before, bounds, start, T, N, R, BT, VARLEN)
    z = convolved(x, filters_of(weight, cols, D, W, BW), bias, h0, start, n, behind, left, cols,
                  stride=stride, D=D, W=W, BT=BT, BD=BD, BW=BW, HAS_BIAS=HAS_BIAS, HAS_H0=HAS_H0)
    if SILU:
        z *= tl.sigmoid(z)
    ahead = tl.arange(0, BT)
    if VARLEN:  # the bias was also added to rows of no sequence
        z = tl.where((left > 0)[:, None], z, 0.0)
    offsets = ahead[:, None] * D + cols[None, :]
    mask = (start + ahead < R)[:, None] & (cols < D)[None, :]
    if HAS_RESIDUAL:
        z += tl.load(residual + start * D + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + start * D + offsets, z.to(y.dtype.element_ty), mask=mask)


@triton.jit
def span_of(bounds, n, T, VARLEN: tl.constexpr):
    """Return the first row and the number of rows of sequence n, in int64."""
    if VARLEN:
        first = tl.load(bounds + n).to(tl.int64)
        length = tl.load(bounds + n + 1).to(tl.int64) - first
    else:
        first = n.to(tl.int64) * T
        length = T.to(tl.int64)
    return first, length


@triton.jit(do_not_specialize=["T"])
def conv_state(
    x, h0, bounds, ht, T, stride, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
    HAS_H0: tl.constexpr, VARLEN: tl.constexpr,
):
    """Store each sequence's last W tokens as its final state ht [N, D, W].

    A sequence shorter than W also keeps the last tokens of its initial state h0, or zeros without h0. A
    program computes BD channels of one sequence.

    x: [R, D].
    h0: [N, D, W].
    bounds: [N + 1] or None.
    ht: [N, D, W].
    stride: elements from one row of x to the next.
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    n = tl.program_id(0) // STRIPS
    cols = (tl.program_id(0) % STRIPS * BD + tl.arange(0, BD))[:, None]
    slots = tl.arange(0, BW)[None, :]
    mask = (cols < D) & (slots < W)
    first, length = span_of(bounds, n, T, VARLEN)
    t = length - W + slots
    state = n.to(tl.int64) * (D * W)
    kept = tl.load(x + (first + t) * stride + cols, mask=mask & (t >= 0), other=0.0).to(tl.float32)
    if HAS_H0:
        kept += tl.load(h0 + state + cols * W + (length + slots), mask=mask & (t < 0),
                        other=0.0).to(tl.float32)
    tl.store(ht + state + (cols * W + slots), kept.to(ht.dtype.element_ty), mask=mask)


@triton.jit
def conv_update(
    x, weight, bias, residual, cache, y, along_n, along_w, ALONG_D: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Shift each sequence's cache by one token, put x into its last slot, and convolve the cache.

    A program updates BD channels of one sequence. ALONG_D is the cache's stride by channel, in elements. It
    is a constexpr, so that Triton can store the adjacent slots of a channel with one instruction if the
    stride is W. All loads precede all stores, because a decoding step is limited by memory latency.

    x: [N, D].
    weight: [D, W].
    bias: [D].
    residual: [N, D].
    cache: [N, D, W].
    y: [N, D].
    along_n: stride of the cache by sequence, in elements.
    along_w: stride of the cache by slot.
    """
    STRIPS: tl.constexpr = (D + BD - 1) // BD
    n = (tl.program_id(0) // STRIPS).to(tl.int64)
    cols = tl.program_id(0) % STRIPS * BD + tl.arange(0, BD)
    slots = tl.arange(0, BW)[None, :]
    channels = cols < D
    mask = channels[:, None] & (slots < W)
    places = cache + n * along_n + (cols.to(tl.int64)[:, None] * ALONG_D + slots * along_w)
    token = tl.load(x + n * D + cols, mask=channels, other=0.0).to(tl.float32)
    window = tl.load(places + along_w, mask=mask & (slots < W - 1), other=0.0).to(tl.float32)
    window = tl.where(slots == W - 1, token[:, None], window)
    z = tl.sum(window * tl.load(weight + (cols[:, None] * W + slots), mask=mask, other=0.0).to(tl.float32), 1)
    if HAS_BIAS:
        z += tl.load(bias + cols, mask=channels, other=0.0).to(tl.float32)
    if SILU:
        z *= tl.sigmoid(z)
    if HAS_RESIDUAL:
        z += tl.load(residual + n * D + cols, mask=channels, other=0.0).to(tl.float32)
    tl.debug_barrier()  # wait for the loads of other threads, because this thread overwrites their slots
    tl.store(places, window.to(cache.dtype.element_ty), mask=mask)
    tl.store(y + n * D + cols, z.to(y.dtype.element_ty), mask=channels)


def rows_first(state: Tensor | None) -> Tensor | None:
    """Return a state [N, D, W] as contiguous rows of channels [N, W, D], as tap() reads it."""
    return None if state is None else state.mT.contiguous()


def before_each(bounds: Tensor | None, T: int) -> Tensor | None:
    """Return the number of sequences that begin at or before each of T packed rows, [T] int32.

    This count minus 1 is the index of the row's own sequence. Return None if the batch is not packed (bounds
    is None).
    """
    if bounds is None:
        return None
    return torch.searchsorted(bounds, torch.arange(T, dtype=bounds.dtype, device=bounds.device), right=True,
                              out_int32=True)


def launch_forward(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                   h0: Tensor | None, bounds: Tensor | None, silu: bool, has_ht: bool,
                   dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Launch the forward kernels; return y [B, T, D] and the final state [N, D, W] or None, in ``dtype``.

    x: [B, T, D] with contiguous channels and a constant stride from each row to the next.
    weight [D, W], bias [D], residual [B, T, D], h0 [N, D, W]: contiguous. All tensors may have any dtypes.
    bounds: [N + 1], the boundaries of packed sequences, ascending within 0 .. T; or None.
    silu: True for silu as activation, False for none.
    has_ht: True if the final state is needed.
    """
    B, T, D = x.shape
    N, W = B if bounds is None else bounds.shape[0] - 1, weight.shape[1]
    y = torch.empty((B, T, D), dtype=dtype, device=x.device)
    ht = torch.empty((N, D, W), dtype=dtype, device=x.device) if has_ht else None
    stride, facts = row_stride(x), dict(D=D, W=W, HAS_H0=h0 is not None, VARLEN=bounds is not None)
    if x.numel():
        start_planned(plan, conv_forward, dict(
            x=x, weight=weight, bias=bias, residual=residual, h0=rows_first(h0),
            before=before_each(bounds, T), bounds=bounds, y=y,
            T=T, N=N, R=B * T, stride=stride,
            **facts, SILU=silu, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None))
    if ht is not None and N:
        start_planned(plan, conv_state, dict(x=x, h0=h0, bounds=bounds, ht=ht, T=T, stride=stride, **facts))
    return y, ht


def update(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
           cache: Tensor, silu: bool, dtype: torch.dtype) -> Tensor:
    """Put one token x [N, D] into the cache [N, D, W], and return the convolution y [N, D] in ``dtype``.

    The cache may have any strides. x, weight [D, W], bias [D] and residual [N, D] must be contiguous.
    """
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        start_planned(plan, conv_update, dict(
            x=x, weight=weight, bias=bias, residual=residual, cache=cache, y=y,
            along_n=cache.stride(0), along_w=cache.stride(2), ALONG_D=cache.stride(1),
            D=x.shape[1], W=weight.shape[1], SILU=silu,
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None))
    return y
