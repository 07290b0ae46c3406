"""Differentiable torch path of the elementwise ops.

It is used for CPUs, float64 tensors, and GPUs that no Triton release supports. torch.compile also uses it, to
fuse the ops with the surrounding code. All functions compute in float64 if any tensor is, else in fp32.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.pointwise.nonfinite import contained, released
from flashlin.kernels.pointwise.recipe import CORRECTION, GATE, KEY, MIX, READ, SCALE, SKIP
from flashlin.kernels.sequences import wide


def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None = None) -> Tensor:
    """Return -e^A_log softplus(g + dt_bias), or with a bound: bound sigmoid(e^A_log (g + dt_bias)).

    The result is the log decay of a raw gate g, in float32 or wider. The shapes of A_log and dt_bias must
    broadcast with that of g; None means 0.
    """
    g, A_log, dt_bias = wide(g, A_log, dt_bias)
    z = g if dt_bias is None else g + dt_bias
    if bound is not None:
        return bound * (z if A_log is None else A_log.exp() * z).sigmoid()
    return -F.softplus(z) if A_log is None else -A_log.exp() * F.softplus(z)


def mix(h: Tensor, delta: Tensor, *xs: Tensor | None) -> tuple[Tensor, ...]:
    """Return h + delta x for each x [D] that is not None."""
    h, delta, *wide_xs = wide(h, delta, *xs)
    return tuple(h + delta * x for x in wide_xs if x is not None)


def key(k: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """Return k (1 + (a - 1) c), the key of RWKV-7; k, a [..., D], c [D]."""
    k, a, c = wide(k, a, c)
    return k * (1 + (a - 1) * c)


def correction(o: Tensor, r: Tensor, k: Tensor, u: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Return (o + v sum(r k u)) g, with the sum over K; all tensors are [..., H, K], but u is [H, K]."""
    o, r, k, u, v, g = wide(o, r, k, u, v, g)
    return (o + (r * k * u).sum(-1, keepdim=True) * v) * g


def scale(x: Tensor, step: Tensor) -> Tensor:
    """Return x times step; x [..., H, K], step [..., H]."""
    x, step = wide(x, step)
    return x * step[..., None]


def skip(o: Tensor, x: Tensor | None, D: Tensor | None, z: Tensor | None, marks: Tensor | None) -> Tensor:
    """Return (o + marks + D x) silu(z) [..., H, K]; terms and factors that are None are absent.

    o, x, z: [..., H, K]. D: [H] or [H, K]. marks: [...], 0 or NaN for each row.
    """
    o, x, D, z = wide(o, x, D, z)
    y = o if marks is None else released(o, marks)
    if x is not None and D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]) * x
    return y if z is None else y * F.silu(z)


def read(o: Tensor, x: Tensor, c: Tensor, z: Tensor | None, d: Tensor) -> Tensor:
    """Return (d_t o_{t-1} + c_t x_t) silu(z_t) for each row t, [..., H, K].

    o, x, z: [..., H, K]; z may be None. c, d: [..., H]. Where d is 0, the previous row is not used. The
    caller must set d to 0 in row 0 of the whole batch, which has no previous row.
    """
    o, x, c, z, d = wide(o, x, c, z, d)
    above = o.flatten(0, -3).roll(1, 0).view(o.shape)
    d = d[..., None]
    y = torch.addcmul(c[..., None] * x, d, torch.where(d == 0, 0, above))
    return y if z is None else y * F.silu(z)


# The functions that have one output and no options other than a bound.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {GATE: gate, KEY: key, CORRECTION: correction, SKIP: skip,
                                             READ: read}


def compute(family: str, tensors: tuple[Any, ...], bound: float | None,
        dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the outputs of an elementwise op in ``dtype``, as ``launch_forward`` of forward.py does.

    tensors: the inputs of the op, in the order of NAMES in forward.py. Parameters may have any shape that
        broadcasts.
    bound: lower bound of a gate, or None.
    """
    if family == MIX:
        return tuple(y.to(dtype) for y in mix(*tensors))
    if family != SCALE:
        return (FUNCTIONS[family](*tensors, *([bound] if family == GATE else [])).to(dtype),)
    x, step, marks = tensors
    y = scale(x, step).to(dtype)
    if marks is None:
        return (y,)
    (y,), met = contained((y,))
    return y, marks + met
