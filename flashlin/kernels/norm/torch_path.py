"""The norms in plain, differentiable torch, for CPUs, float64 and cards that no Triton compiles for."""
from __future__ import annotations

import torch

from flashlin.kernels.norm.recipe import L2, LAYER, NO_GATE, SIGMOID


def run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    eps: float,
    kind: int,
    activation: int = NO_GATE,
    groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, x + residual), both in fp32, or in float64 if any tensor is. Arguments as forward.run."""
    given = [tensor for tensor in (x, residual, weight, bias, gate) if tensor is not None]
    compute = torch.float64 if any(tensor.dtype == torch.float64 for tensor in given) else torch.float32
    s = x.to(compute) if residual is None else x.to(compute) + residual.to(compute)
    centred, _, rstd = statistics(s, eps, kind)
    y = centred * rstd
    if groups > 1:
        weight, bias = (None if line is None else line.unflatten(0, (groups, -1)) for line in (weight, bias))
    y = y if weight is None else y * weight.to(compute)
    y = y if bias is None else y + bias.to(compute)
    if gate is not None:
        z = gate.to(compute)
        y = y * (z.sigmoid() if activation == SIGMOID else z * z.sigmoid())
    return y, s


def statistics(s: torch.Tensor, eps: float,
               kind: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(s less its mean, that mean, what a row is multiplied by), of each row; a layer norm only takes the
    mean off."""
    mean = s.mean(-1, keepdim=True) if kind == LAYER else None
    centred = s if mean is None else s - mean
    squares = centred.square()
    return centred, mean, torch.rsqrt((squares.sum(-1, keepdim=True) if kind == L2
                                       else squares.mean(-1, keepdim=True)) + eps)
