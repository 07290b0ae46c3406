"""Torch path of the short convolution, for CPUs, float64 and GPUs that no Triton release supports.

The W tokens of each sequence's state are put in front of the sequence. Then the output is a sum of W shifted
copies of one tensor, and the last W rows are the final state. All of it is differentiable.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.sequences import sequences_of, widest


def compute(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, h0: Tensor | None,
        bounds: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    """Return y [B, T, D] and the final state [N, D, W], in float64 if any tensor is, else in fp32.

    The function takes the arguments of ``launch_forward`` in forward.py.
    """
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
    if bounds is not None:  # the bias was also added to rows of no sequence
        y = torch.where(covered, y, 0)
    return y if residual is None else y + residual, ht


def _taps(rows: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return ``count`` rows; row t is the sum over w of rows[t + 1 + w] weight[:, w]."""
    y = rows[:, 1:1 + count] * weight[:, 0]
    for w in range(1, weight.shape[1]):
        y = y + rows[:, 1 + w:1 + w + count] * weight[:, w]
    return y


def _with_states(x: Tensor, state: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Insert each sequence's state [N, W, D] in front of its rows of the packed x [T, D].

    Returns:
        The rows and states in one tensor, [1, T + (N + 1) W, D]. Its last W rows are padding.
        The index of each row of x in this tensor, [T].
        True for each row of x that belongs to a sequence, [T, 1].
        The indices of the last W rows of each sequence, [N, W].
    """
    T, (N, W, D) = x.shape[0], state.shape
    bounds = bounds.long()
    n, covered = sequences_of(bounds, T)
    places = torch.arange(T, device=x.device) + (n + 1) * W  # n + 1 states precede each row
    slots = torch.arange(N, device=x.device)[:, None] * W + torch.arange(W, device=x.device)
    rows = x.new_zeros(T + (N + 1) * W, D).index_copy(0, places, x)
    rows = rows.index_copy(0, (bounds[:-1, None] + slots).flatten(), state.reshape(N * W, D))
    return rows[None], places, covered[:, None], bounds[1:, None] + slots
