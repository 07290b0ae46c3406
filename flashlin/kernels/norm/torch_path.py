"""Differentiable torch path of the norms, for CPUs, float64 and GPUs that no Triton release supports."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.norm.recipe import L2, LAYER, NO_GATE, SIGMOID
from flashlin.kernels.sequences import widest


def compute(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
            gate: Tensor | None, eps: float, kind: int, activation: int = NO_GATE,
            groups: int = 1) -> tuple[Tensor, Tensor]:
    """Return the normalised rows y and x + residual, both in float64 if any tensor is, else in fp32.

    The arguments are described in ``launch_forward`` of forward.py.

    groups: number of groups of a group norm, whose x is [..., groups, D].
    """
    compute = widest(x, residual, weight, bias, gate)
    s = x.to(compute) if residual is None else x.to(compute) + residual
    centred, _, rstd = statistics(s, eps, kind)
    y = centred * rstd
    if groups > 1:
        weight, bias = (None if line is None else line.unflatten(0, (groups, -1)) for line in (weight, bias))
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    if gate is not None:
        z = gate.to(compute)
        y = y * (z.sigmoid() if activation == SIGMOID else z * z.sigmoid())
    return y, s


def statistics(s: Tensor, eps: float, kind: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return, for each row: s minus its mean, the mean, and the factor that normalises the row.

    Only a layer norm subtracts the mean. For other norms the first result is s, and the second is None.
    """
    mean = s.mean(-1, keepdim=True) if kind == LAYER else None
    centred = s if mean is None else s - mean
    reduce = torch.sum if kind == L2 else torch.mean
    return centred, mean, torch.rsqrt(reduce(centred.square(), -1, keepdim=True) + eps)
