"""The norms in plain, differentiable torch, for CPUs, float64 and cards that no Triton compiles for."""
from __future__ import annotations

import torch

from flashlin.kernels.norm.recipe import L2, LAYER


def run(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
        kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, x + residual), both in fp32, or in float64 if any tensor is. Arguments as forward.run."""
    given = [tensor for tensor in (x, residual, weight, bias) if tensor is not None]
    compute = torch.float64 if any(tensor.dtype == torch.float64 for tensor in given) else torch.float32
    s = x.to(compute) if residual is None else x.to(compute) + residual.to(compute)
    centred = s - s.mean(-1, keepdim=True) if kind == LAYER else s
    squares = centred.square()
    y = centred * torch.rsqrt((squares.sum(-1, keepdim=True) if kind == L2 else squares.mean(-1, keepdim=True)) + eps)
    y = y if weight is None else y * weight.to(compute)
    return y if bias is None else y + bias.to(compute), s
