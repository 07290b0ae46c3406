"""The cross entropy in float64, row by row, written from the mathematics. Everything else is checked against
it."""
from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float = 0.0, logit_scale: float = 1.0,
                  lse_square_scale: float = 0.0, logit_softcapping: float | None = None,
                  ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """(loss, z_loss), each [N] in float64: what the softmax of the logits says of a target that is smoothed
    towards all V columns, plus z_loss, which has no gradient of its own."""
    V = logits.shape[1]
    losses, z_losses = [], []
    for x, t in zip(logits.double(), target.tolist(), strict=True):
        if t == ignore_index:
            losses.append(x.nan_to_num().sum() * 0)
            z_losses.append(x.new_zeros(()))
            continue
        x = x * logit_scale
        if logit_softcapping is not None:
            x = logit_softcapping * torch.tanh(x / logit_softcapping)
        highest = x.max().detach()
        size = (x - highest).exp().sum()
        wanted = torch.full((V,), label_smoothing / V, dtype=torch.float64)
        wanted[t] += 1 - label_smoothing
        z = lse_square_scale * (highest + size.log()) ** 2
        losses.append(-(wanted * torch.where(wanted > 0, x - highest - size.log(), 0)).sum() + z)
        z_losses.append(z.detach())
    if not losses:
        return logits.double().sum(1), logits.double().sum(1).detach()
    return torch.stack(losses), torch.stack(z_losses)
