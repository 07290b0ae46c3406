"""What the families' plain torch paths share: the dtype they compute in, and where packed sequences lie."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def widest(*tensors: Tensor | None) -> torch.dtype:
    """The dtype that plain torch computes in: float64 where a tensor has it, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def wide(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the widest's dtype; None stays None."""
    compute = widest(*tensors)
    return tuple(None if x is None else x.to(compute) for x in tensors)


def sequences_of(bounds: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """For T packed rows: the number of each one's sequence [T], and whether it belongs to any [T]. Without
    one the number is -1 (before the first sequence) or N (after the last). Reads nothing on the host."""
    rows = torch.arange(T, dtype=bounds.dtype, device=bounds.device)
    n = torch.searchsorted(bounds, rows, right=True) - 1
    return n, (n >= 0) & (n < bounds.shape[0] - 1)
