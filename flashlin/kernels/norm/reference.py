"""The norms in float64, written from the mathematics. Everything else is checked against it."""
from __future__ import annotations

import torch


def normalise(kind: str, x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None,
              bias: torch.Tensor | None = None, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, x + residual) in float64, differentiable. kind: ``layer``, ``rms`` or ``l2``. x [..., D], weight and bias [D]."""
    s = x.double() if residual is None else x.double() + residual.double()
    D = s.shape[-1]
    centred = s - s.sum(-1, keepdim=True) / D if kind == "layer" else s
    squares = (centred * centred).sum(-1, keepdim=True)
    y = centred / (squares / (1 if kind == "l2" else D) + eps).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double(), s
