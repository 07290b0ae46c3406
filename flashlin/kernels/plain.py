"""Helpers of the families' torch paths: the dtype they compute in, sums of rows, rows of packed sequences."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin.compat.releases import DETERMINISTIC_CUMSUM_FROM
from flashlin.compat.versions import release

_CUMSUM_MAY_RAISE = release(torch.__version__) < release(DETERMINISTIC_CUMSUM_FROM)


def widest(*tensors: Tensor | None) -> torch.dtype:
    """The dtype that plain torch computes in: float64 where a tensor has it, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def wide(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the widest's dtype; None stays None."""
    compute = widest(*tensors)
    return tuple(None if x is None else x.to(compute) for x in tensors)


def running_sum(x: Tensor, dim: int) -> Tensor:
    """Return the sums of x along ``dim`` up to each element, in x's dtype.

    Before torch 2.6, ``cumsum`` and its gradient raise an error on a GPU under
    ``torch.use_deterministic_algorithms(True)``. Then sums over masked copies of x give the result.
    """
    if not (_CUMSUM_MAY_RAISE and x.device.type != "cpu" and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(dim, dtype=x.dtype)
    return sum_of_masked(x, dim)


def sum_of_masked(x: Tensor, dim: int) -> Tensor:
    """Return the same as ``running_sum``. Memory grows with the square of the dimension's length."""
    rows = torch.arange(x.shape[dim], device=x.device)
    copies = x.movedim(dim, -1)[..., None, :].masked_fill(rows[:, None] < rows, 0)
    return copies.sum(-1, dtype=x.dtype).movedim(-1, dim)


def sequences_of(bounds: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """For T packed rows: the number of each one's sequence [T], and whether it belongs to any [T]. Without
    one the number is -1 (before the first sequence) or N (after the last). Reads nothing on the host."""
    rows = torch.arange(T, dtype=bounds.dtype, device=bounds.device)
    n = torch.searchsorted(bounds, rows, right=True) - 1
    return n, (n >= 0) & (n < bounds.shape[0] - 1)
