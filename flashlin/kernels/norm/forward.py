"""Forward of the row-wise normalisations: layer norm, RMS norm and l2 norm, each after an optional residual.

A row has D elements and is s = x + residual in fp32. Let m = mean(s) for a layer norm, and 0 otherwise. Then:

    y = ((s - m) r w + b) a(z)
    r = rsqrt(mean((s - m)^2) + eps)

An l2 norm has the sum instead of the mean. The gate z has the shape of x. Its activation a(z) is z sigmoid(z)
or sigmoid(z); without a gate, a(z) is 1. A group norm with G groups has G rows per token, so w and b are [G,
D], and row n uses row n % G of them.

A program keeps BT whole rows in registers, so it reads each element once. It reads rows that are longer than
BD twice, in blocks of BD: first for the statistics and then, mostly from the cache, for y.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start_planned
from flashlin.guards.plan_types import Plan
from flashlin.kernels.norm.recipe import LAYER


@triton.jit
def tile(x, first, rows, d0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVICT: tl.constexpr):
    """Load a tile [BT, BD] of x [rows, D], starting at row ``first`` and column d0; zeros outside."""
    row = tl.arange(0, BT)
    col = d0 + tl.arange(0, BD)
    return tl.load(x + first * D + (row[:, None] * D + col[None, :]),
                   mask=(first + row < rows)[:, None] & (col < D)[None, :], other=0.0, eviction_policy=EVICT)


@triton.jit
def put(x, value, first, rows, d0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Store a tile ``value`` [BT, BD] in x [rows, D], starting at row ``first`` and column d0."""
    row = tl.arange(0, BT)
    col = d0 + tl.arange(0, BD)
    tl.store(x + first * D + (row[:, None] * D + col[None, :]), value.to(x.dtype.element_ty),
             mask=(first + row < rows)[:, None] & (col < D)[None, :])


@triton.jit
def line(x, first, d0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, GROUPS: tl.constexpr):
    """Load the weight or bias x [GROUPS, D] for BT rows of the input: [BT, BD] in fp32, zeros outside.

    Every program reads it, so it should stay in the cache. Each of the BT rows gets its own copy, even if
    they all use the same row of x. A tile [1, BD] would be distributed over other threads than the rows. To
    combine the two, whole tiles would have to pass through shared memory.
    """
    row = (first + tl.arange(0, BT)) % GROUPS
    col = d0 + tl.arange(0, BD)
    offsets = row[:, None] * D + col[None, :]
    return tl.load(x + offsets, mask=(col < D)[None, :], other=0.0,
                   eviction_policy="evict_last").to(tl.float32)


@triton.jit
def summed(x, residual, first, rows, d0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
           HAS_RESIDUAL: tl.constexpr, EVICT: tl.constexpr):
    """Load a tile [BT, BD] of s = x + residual in fp32; s = x if HAS_RESIDUAL is False.

    x, residual: [rows, D].
    first: the program's first row.
    """
    s = tile(x, first, rows, d0, D, BT, BD, EVICT).to(tl.float32)
    if HAS_RESIDUAL:
        s += tile(residual, first, rows, d0, D, BT, BD, EVICT).to(tl.float32)
    return s


@triton.jit
def lines(weight, bias, first, d0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, GROUPS: tl.constexpr,
          HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Load the weight and bias of BT rows as tiles; one that is absent becomes a placeholder scalar.

    weight, bias: [GROUPS, D].
    first: the program's first row.
    """
    w = d0
    b = d0
    if HAS_WEIGHT:
        w = line(weight, first, d0, D, BT, BD, GROUPS)
    if HAS_BIAS:
        b = line(bias, first, d0, D, BT, BD, GROUPS)
    return w, b


@triton.jit
def scaled(y, w, b, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return y w + b [BT, BD]; w and b apply only if HAS_WEIGHT and HAS_BIAS."""
    if HAS_WEIGHT:
        y *= w
    if HAS_BIAS:
        y += b
    return y


@triton.jit
def opened(gate, GATE: tl.constexpr):
    """Return the activation of a gate tile and its derivative, both [BT, BD] in fp32.

    GATE selects the activation: 1 is z sigmoid(z), 2 is sigmoid(z).
    """
    z = gate.to(tl.float32)
    sigmoid = tl.sigmoid(z)
    if GATE == 1:
        factor = z * sigmoid
        slope = sigmoid + factor * (1 - sigmoid)
    else:
        factor = sigmoid
        slope = sigmoid * (1 - sigmoid)
    return factor, slope


@triton.jit(do_not_specialize=["rows", "eps"])
def norm_forward(
    x, residual,  # [rows, D]
    weight, bias,  # [GROUPS, D]
    gate, y, total,  # [rows, D]
    mean, rstd,  # [rows], fp32
    eps,
    rows,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr,
    GROUPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_TOTAL: tl.constexpr, HAS_STATS: tl.constexpr,
):
    """Compute the normalised rows y [rows, D]; a program computes BT rows.

    The kernel can also store total = x + residual [rows, D] (HAS_TOTAL), and the statistics mean and rstd
    [rows] (HAS_STATS). KIND is 0 for a layer norm, 1 for an RMS norm and 2 for an l2 norm.
    """
    COUNT: tl.constexpr = 1 if KIND == 2 else D
    first = tl.program_id(0).to(tl.int64) * BT
    inside = tl.arange(0, BD) < D
    if BD >= D:
        # Loads with "evict_first" are 3 to 5 % slower here (benchmarks/results/norms-*).
        s = summed(x, residual, first, rows, 0, D=D, BT=BT, BD=BD, HAS_RESIDUAL=HAS_RESIDUAL, EVICT="")
        # The weight is loaded before the sums, so that the load runs while the threads of a sum wait for each
        # other. With a bias, weight and bias are loaded after the sums. Otherwise they would use registers
        # that the rows in flight need.
        if not HAS_BIAS:
            w, b = lines(weight, bias, first, 0, D=D, BT=BT, BD=BD, GROUPS=GROUPS, HAS_WEIGHT=HAS_WEIGHT,
                         HAS_BIAS=HAS_BIAS)
        if HAS_TOTAL:
            put(total, s, first, rows, 0, D, BT, BD)
        if KIND == 0:
            m = tl.sum(s, 1) / D
            s = tl.where(inside[None, :], s - m[:, None], 0.0)
        r = tl.rsqrt(tl.sum(s * s, 1) / COUNT + eps)
        if HAS_BIAS:
            w, b = lines(weight, bias, first, 0, D=D, BT=BT, BD=BD, GROUPS=GROUPS, HAS_WEIGHT=HAS_WEIGHT,
                         HAS_BIAS=HAS_BIAS)
        out = scaled(s * r[:, None], w, b, HAS_WEIGHT, HAS_BIAS)
        if GATE != 0:
            factor, _ = opened(tile(gate, first, rows, 0, D, BT, BD, ""), GATE)
            out *= factor
        put(y, out, first, rows, 0, D, BT, BD)
    else:
        m = tl.zeros([BT], dtype=tl.float32)
        squares = tl.zeros([BT], dtype=tl.float32)
        for d0 in range(0, D, BD):
            s = summed(x, residual, first, rows, d0, D=D, BT=BT, BD=BD, HAS_RESIDUAL=HAS_RESIDUAL,
                       EVICT="evict_last")
            if HAS_TOTAL:
                put(total, s, first, rows, d0, D, BT, BD)
            # Combine means and squares of blocks without cancellation (Chan, Golub and LeVeque 1979).
            if KIND == 0:
                here = tl.minimum(D - d0, BD) * 1.0
                block = tl.sum(s, 1) / here
                s = tl.where((d0 + tl.arange(0, BD) < D)[None, :], s - block[:, None], 0.0)
                squares += (block - m) * (block - m) * (d0 * here / (d0 + here))
                m += (block - m) * (here / (d0 + here))
            squares += tl.sum(s * s, 1)
        r = tl.rsqrt(squares / COUNT + eps)
        for d0 in range(0, D, BD):
            s = summed(x, residual, first, rows, d0, D=D, BT=BT, BD=BD, HAS_RESIDUAL=HAS_RESIDUAL,
                       EVICT="evict_first")
            w, b = lines(weight, bias, first, d0, D=D, BT=BT, BD=BD, GROUPS=GROUPS, HAS_WEIGHT=HAS_WEIGHT,
                         HAS_BIAS=HAS_BIAS)
            out = scaled((s - m[:, None]) * r[:, None], w, b, HAS_WEIGHT, HAS_BIAS)
            if GATE != 0:
                factor, slope = opened(tile(gate, first, rows, d0, D, BT, BD, "evict_first"), GATE)
                out *= factor
            put(y, out, first, rows, d0, D, BT, BD)
    if HAS_STATS:
        row = tl.arange(0, BT)
        tl.store(rstd + first + row, r, mask=first + row < rows)
        if KIND == 0:
            tl.store(mean + first + row, m, mask=first + row < rows)


def launch_forward(plan: Plan, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
                   gate: Tensor | None, eps: float, kind: int, activation: int, y_dtype: torch.dtype,
                   total_dtype: torch.dtype | None,
                   stats: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Launch the forward kernel of a norm; return (y, x + residual, mean, rstd).

    A result that is not needed is None.

    x, residual, gate: [..., D]; for a group norm [..., G, D], where G is the plan's number of heads.
    weight, bias: [D]; for a group norm [G * D]. All tensors are contiguous and may have any dtypes.
    kind: LAYER, RMS or L2 of norm/recipe.py.
    activation: activation of the gate: NO_GATE, SWISH or SIGMOID of norm/recipe.py.
    total_dtype: dtype of the returned x + residual, or None if it is not needed.
    stats: True if backward needs rstd and, for a layer norm, the mean; both are [...] in fp32.
    """
    D = x.shape[-1]
    y = torch.empty_like(x, dtype=y_dtype)
    total = None if total_dtype is None else torch.empty_like(x, dtype=total_dtype)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if stats else None
    mean = torch.empty_like(rstd) if rstd is not None and kind == LAYER else None
    if x.numel():
        start_planned(plan, norm_forward, dict(
            x=x, residual=residual, weight=weight, bias=bias,
            gate=gate, y=y, total=total, mean=mean, rstd=rstd,
            eps=eps, rows=x.numel() // D,
            D=D, KIND=kind, GATE=activation, GROUPS=plan.problem.H,
            HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None, HAS_TOTAL=total is not None, HAS_STATS=stats))
    return y, total, mean, rstd
