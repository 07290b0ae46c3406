"""The elementwise ops in plain, differentiable torch, for CPUs, float64, cards that no Triton compiles for,
and torch.compile, which fuses them with whatever is around them. Everything is computed in fp32, or in
float64 where a tensor is."""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from flashlin.kernels.pointwise.marks import contained, released
from flashlin.kernels.pointwise.recipe import CORRECTION, GATE, KEY, MIX, SCALE, SKIP

Tensor = torch.Tensor


def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None = None) -> Tensor:
    """-e^{A_log} softplus(g + dt_bias), or bound sigmoid(e^{A_log} (g + dt_bias)). A_log and dt_bias of
    shapes that g's broadcasts with."""
    z, A_log, dt_bias = _wide(g, A_log, dt_bias)
    assert z is not None
    z = z if dt_bias is None else z + dt_bias
    if bound is not None:
        return bound * (z if A_log is None else A_log.exp() * z).sigmoid()
    return -F.softplus(z) if A_log is None else -A_log.exp() * F.softplus(z)


def mix(h: Tensor, delta: Tensor, *xs: Tensor | None) -> tuple[Tensor, ...]:
    """h + delta x for each x [D] that there is."""
    wide_h, wide_delta, *wide_xs = _wide(h, delta, *xs)
    assert wide_h is not None and wide_delta is not None
    return tuple(wide_h + wide_delta * x for x in wide_xs if x is not None)


def key(k: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """k (1 + (a - 1) c)"""
    wide_k, wide_a, wide_c = _wide(k, a, c)
    assert wide_k is not None and wide_a is not None and wide_c is not None
    return wide_k * (1 + (wide_a - 1) * wide_c)


def correction(o: Tensor, r: Tensor, k: Tensor, u: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """(o + v sum(r k u)) g, all [..., H, K] but u [H, K], the sum over K."""
    o, r, k, u, v, g = (x for x in _wide(o, r, k, u, v, g) if x is not None)
    return (o + (r * k * u).sum(-1, keepdim=True) * v) * g


def scale(x: Tensor | None, step: Tensor | None) -> Tensor:
    """x step, x [..., H, K], step [..., H]."""
    wide_x, wide_step = _wide(x, step)
    assert wide_x is not None and wide_step is not None
    return wide_x * wide_step[..., None]


def skip(o: Tensor, x: Tensor | None, D: Tensor | None, z: Tensor | None, marks: Tensor | None) -> Tensor:
    """(o + D x) silu(z), all [..., H, K] but D [H] or [H, K] and marks [...]; x and D, z, or marks may be
    None."""
    y, x, D, z = _wide(o, x, D, z)
    assert y is not None
    if marks is not None:
        y = released(y, marks)
    if x is not None and D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]) * x
    return y if z is None else y * F.silu(z)


FUNCTIONS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {GATE: gate, MIX: mix, KEY: key,
                                                                    CORRECTION: correction, SKIP: skip}


def run(family: str, tensors: tuple[Tensor | None, ...], bound: float | None,
        dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What forward.run gives. Parameters may have any shape that broadcasts."""
    *given, marks = tensors
    if family == SCALE:
        y = scale(*given).to(dtype)
        if marks is None:
            return (y,)
        (y,), met = contained((y,))
        return y, marks + met
    found = FUNCTIONS[family](*tensors, bound) if family == GATE else FUNCTIONS[family](*tensors)
    return tuple(y.to(dtype) for y in (found if isinstance(found, tuple) else (found,)))


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    compute = torch.float64 if any(x is not None and x.dtype == torch.float64
                                   for x in tensors) else torch.float32
    return [None if x is None else x.to(compute) for x in tensors]
