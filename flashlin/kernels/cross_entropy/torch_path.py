"""Torch path of the cross entropy, for CPUs, float64 and GPUs that no Triton release supports.

Names and arguments have the same meaning as in forward.py.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.sequences import widest


def compute(logits: Tensor, target: Tensor, scale: float, cap: float | None, smoothing: float, squares: float,
        ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, z_loss and log-sum-exp of each row, each [N], in float64 if logits are, else in fp32.

    All results are differentiable. The arguments are described in ``launch_forward`` of forward.py.
    """
    t, counts = _targets(target, logits.shape[1], ignore_index)
    # Rows that do not count are set to 0 first. Otherwise a NaN in them would reach their gradient.
    x, _ = _shaped(torch.where(counts[:, None], logits.to(widest(logits)), 0), scale, cap)
    lse = x.logsumexp(1)
    z = squares * lse.square()
    chosen = x.gather(1, t[:, None])[:, 0]
    if smoothing > 0:
        chosen = (1 - smoothing) * chosen + smoothing * x.mean(1)
    return torch.where(counts, lse - chosen + z, 0), torch.where(counts, z, 0), lse


def gradients(logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, scale: float, cap: float | None,
              smoothing: float, squares: float, ignore_index: int) -> Tensor:
    """Return dlogits in the dtype of logits, by the formula in backward.py.

    It is used where autograd is not available.

    lse, dloss: [N], the log-sum-exp of each row, and the gradient of its loss.
    """
    t, counts = _targets(target, logits.shape[1], ignore_index)
    x, slope = _shaped(logits.to(widest(logits)), scale, cap)
    d = (x - lse[:, None]).exp() * (1 + 2 * squares * lse)[:, None] - smoothing / logits.shape[1]
    d.scatter_add_(1, t[:, None], d.new_full((len(t), 1), smoothing - 1))
    return torch.where(counts[:, None], d * slope * (dloss * scale)[:, None], 0).to(logits.dtype)


def _targets(target: Tensor, V: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the target column of each row, and True for each row that counts; both are [N].

    The column is 0 for a row that does not count, so that it is always a valid index.
    """
    counts = (target >= 0) & (target < V) & (target != ignore_index)
    return torch.where(counts, target, 0).long(), counts


def _shaped(logits: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor | float]:
    """Return x, the scaled and capped logits, and dx/dlogits without the factor ``scale``."""
    if cap is None:
        return logits * scale, 1.0
    th = (logits * (scale / cap)).tanh()
    return cap * th, 1 - th.square()
