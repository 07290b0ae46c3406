"""The cross entropy in plain torch, for CPUs, float64 and cards that no Triton compiles for. Names and
arguments as in forward.py."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.sequences import widest


def compute(logits: Tensor, target: Tensor, scale: float, cap: float | None, smoothing: float, squares: float,
        ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, z_loss, L), each [N] in fp32, or in float64 if logits are; differentiable."""
    t, counts = _targets(target, logits.shape[1], ignore_index)
    # else NaN in a row that does not count reaches its gradient
    x, _ = _shaped(torch.where(counts[:, None], logits.to(widest(logits)), 0), scale, cap)
    lse = x.logsumexp(1)
    z = squares * lse.square()
    chosen = x.gather(1, t[:, None])[:, 0]
    if smoothing > 0:
        chosen = (1 - smoothing) * chosen + smoothing * x.mean(1)
    return torch.where(counts, lse - chosen + z, 0), torch.where(counts, z, 0), lse


def gradients(
    logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor,
    scale: float,
    cap: float | None,
    smoothing: float, squares: float,
    ignore_index: int,
) -> Tensor:
    """dlogits in logits' dtype, by the formula in backward.py: for where there is no autograd."""
    t, counts = _targets(target, logits.shape[1], ignore_index)
    x, slope = _shaped(logits.to(widest(logits)), scale, cap)
    d = (x - lse[:, None]).exp() * (1 + 2 * squares * lse)[:, None] - smoothing / logits.shape[1]
    d.scatter_add_(1, t[:, None], d.new_full((len(t), 1), smoothing - 1))
    return torch.where(counts[:, None], d * slope * (dloss * scale)[:, None], 0).to(logits.dtype)


def _targets(target: Tensor, V: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Targets as columns that exist, and which rows count."""
    counts = (target >= 0) & (target < V) & (target != ignore_index)
    return torch.where(counts, target, 0).long(), counts


def _shaped(logits: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor | float]:
    """x, and its derivative but for the scale."""
    if cap is None:
        return logits * scale, 1.0
    th = (logits * (scale / cap)).tanh()
    return cap * th, 1 - th.square()
