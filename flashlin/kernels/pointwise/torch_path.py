"""The elementwise ops in plain, differentiable torch, for CPUs, float64, cards that no Triton compiles for,
and torch.compile, which fuses them with whatever is around them. Everything is computed in fp32, or in
float64 where a tensor is."""
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
    """-e^{A_log} softplus(g + dt_bias), or bound sigmoid(e^{A_log} (g + dt_bias)). A_log and dt_bias of
    shapes that g's broadcasts with."""
    g, A_log, dt_bias = wide(g, A_log, dt_bias)
    z = g if dt_bias is None else g + dt_bias
    if bound is not None:
        return bound * (z if A_log is None else A_log.exp() * z).sigmoid()
    return -F.softplus(z) if A_log is None else -A_log.exp() * F.softplus(z)


def mix(h: Tensor, delta: Tensor, *xs: Tensor | None) -> tuple[Tensor, ...]:
    """h + delta x for each x [D] that there is."""
    h, delta, *wide_xs = wide(h, delta, *xs)
    return tuple(h + delta * x for x in wide_xs if x is not None)


def key(k: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """k (1 + (a - 1) c)"""
    k, a, c = wide(k, a, c)
    return k * (1 + (a - 1) * c)


def correction(o: Tensor, r: Tensor, k: Tensor, u: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """(o + v sum(r k u)) g, all [..., H, K] but u [H, K], the sum over K."""
    o, r, k, u, v, g = wide(o, r, k, u, v, g)
    return (o + (r * k * u).sum(-1, keepdim=True) * v) * g


def scale(x: Tensor, step: Tensor) -> Tensor:
    """x step, x [..., H, K], step [..., H]."""
    x, step = wide(x, step)
    return x * step[..., None]


def skip(o: Tensor, x: Tensor | None, D: Tensor | None, z: Tensor | None, marks: Tensor | None) -> Tensor:
    """(o + D x) silu(z), all [..., H, K] but D [H] or [H, K] and marks [...]; x and D, z, or marks may be
    None."""
    o, x, D, z = wide(o, x, D, z)
    y = o if marks is None else released(o, marks)
    if x is not None and D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]) * x
    return y if z is None else y * F.silu(z)


def read(o: Tensor, x: Tensor, c: Tensor, z: Tensor | None, d: Tensor) -> Tensor:
    """(d o + c x) silu(z), where o is that of the row above, all [..., H, K] but c and d [..., H]; z may be
    None. Where d is 0, as for the first of all, nothing above is read."""
    o, x, c, z, d = wide(o, x, c, z, d)
    above = o.flatten(0, -3).roll(1, 0).view(o.shape)
    d = d[..., None]
    y = torch.addcmul(c[..., None] * x, d, torch.where(d == 0, 0, above))
    return y if z is None else y * F.silu(z)


# of one output, which depends on nothing else
FUNCTIONS: dict[str, Callable[..., Tensor]] = {GATE: gate, KEY: key, CORRECTION: correction, SKIP: skip,
                                             READ: read}


def compute(family: str, tensors: tuple[Any, ...], bound: float | None,
        dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What launch_forward gives. Parameters may have any shape that broadcasts."""
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
