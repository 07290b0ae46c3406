"""Reference of the norms in float64, for tests of all implementations."""
from __future__ import annotations

import torch
from torch import Tensor


def normalise(kind: str, x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None,
              bias: Tensor | None = None, eps: float = 1e-5, groups: int = 1, gate: Tensor | None = None,
              activation: str = "swish") -> tuple[Tensor, Tensor]:
    """Return the normalised rows y and x + residual, both in float64 and differentiable.

    kind: ``layer``, ``rms`` or ``l2``.
    x, residual, gate: [..., D].
    weight, bias: [D].
    groups: number of equal slices of each row that are normalised separately.
    activation: activation of the gate, ``swish`` or ``sigmoid``.
    """
    s = x.double() if residual is None else x.double() + residual.double()
    slices = []
    for part in s.chunk(groups, -1):
        D = part.shape[-1]
        centred = part - part.sum(-1, keepdim=True) / D if kind == "layer" else part
        squares = (centred * centred).sum(-1, keepdim=True)
        slices.append(centred / (squares / (1 if kind == "l2" else D) + eps).sqrt())
    y = torch.cat(slices, -1)
    y = y if weight is None else y * weight.double()
    y = y if bias is None else y + bias.double()
    if gate is not None:
        opening = 1 / (1 + (-gate.double()).exp())
        y = y * opening if activation == "sigmoid" else y * gate.double() * opening
    return y, s
