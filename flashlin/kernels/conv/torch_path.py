"""The short convolution in plain, differentiable torch, for CPUs, float64 and cards that no Triton compiles
for.

Every sequence gets its state's W tokens in front, so a row is a sum of W shifts of one tensor, and the last W
rows are the final state.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.sequences import sequences_of, widest


def compute(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, h0: Tensor | None,
        bounds: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    """(y [B, T, D], final state [N, D, W]), both in fp32, or in float64 if any tensor is. Arguments as
    launch_forward."""
    compute = widest(x, weight, bias, residual, h0)
    B, T, _ = x.shape
    D, W = weight.shape
    N = B if bounds is None else bounds.shape[0] - 1
    state = x.new_zeros((N, W, D), dtype=compute) if h0 is None else h0.to(compute).mT
    if bounds is None:
        rows = torch.cat([state, x.to(compute)], 1)
        y, ht = _taps(rows, weight, T), rows[:, T:].mT
    else:
        rows, places, covered, ends = _with_states(x[0].to(compute), state, bounds)
        y = torch.where(covered, _taps(rows, weight, rows.shape[1] - W)[0, places - W], 0)[None]
        ht = rows[0, ends].mT
    y = y if bias is None else y + bias
    y = F.silu(y) if silu else y
    if bounds is not None:  # a bias reaches rows that belong to no sequence
        y = torch.where(covered, y, 0)
    return y if residual is None else y + residual, ht


def _taps(rows: Tensor, weight: Tensor, count: int) -> Tensor:
    """Row t of the result is the sum over w of rows[t + 1 + w] weight[:, w]."""
    y = rows[:, 1:1 + count] * weight[:, 0]
    for w in range(1, weight.shape[1]):
        y = y + rows[:, 1 + w:1 + w + count] * weight[:, w]
    return y


def _with_states(x: Tensor, state: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed x [T, D] with each sequence's state [N, W, D] in front of it, as a batch of one; where the rows
    of x went [T]; which of them belong to a sequence [T, 1]; and the places [N, W] of each sequence's last W
    rows."""
    T, (N, W, D) = x.shape[0], state.shape
    bounds = bounds.long()
    n, covered = sequences_of(bounds, T)
    places = torch.arange(T, device=x.device) + (n + 1) * W  # so many states come before each row
    slots = torch.arange(N, device=x.device)[:, None] * W + torch.arange(W, device=x.device)
    rows = x.new_zeros(T + (N + 1) * W, D).index_copy(0, places, x)
    rows = rows.index_copy(0, (bounds[:-1, None] + slots).flatten(), state.reshape(N * W, D))
    return rows[None], places, covered[:, None], bounds[1:, None] + slots
