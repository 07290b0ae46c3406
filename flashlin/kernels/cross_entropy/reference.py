"""Reference of the cross entropy, row by row in float64, for tests of all implementations."""
from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float = 0.0, logit_scale: float = 1.0,
                  lse_square_scale: float = 0.0, logit_softcapping: float | None = None,
                  ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return the loss and z_loss of each row, both [N] in float64.

    The loss is the cross entropy between the softmax of the logits and the smoothed target, plus z_loss.
    Label smoothing spreads the target over all V columns. z_loss is lse_square_scale times the squared
    log-sum-exp; the returned z_loss is detached. Both are zero for rows whose target is
    ignore_index.
    """
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
        wanted = torch.full_like(x, label_smoothing / len(x))
        wanted[t] += 1 - label_smoothing
        z = lse_square_scale * (highest + size.log()) ** 2
        losses.append(-(wanted * torch.where(wanted > 0, x - highest - size.log(), 0)).sum() + z)
        z_losses.append(z.detach())
    if not losses:
        return logits.double().sum(1), logits.double().sum(1).detach()
    return torch.stack(losses), torch.stack(z_losses)
