"""Constant tensors, made once per size and device: fixed decays per head and filters of a token shift."""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flashlin.compat.tracing import transient

M = TypeVar("M", bound=Callable[..., Tensor])


def _kept(make: M) -> M:
    """Return ``make`` with a cache of its tensors for each size and device.

    A tensor is not cached in a transform or while a CUDA graph is captured.
    """
    @wraps(make)
    def made(*facts: Any) -> Tensor:
        # A tensor made while a CUDA graph is captured belongs to that graph's memory.
        if transient() or (facts[-1].type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return make(*facts)
        with torch.inference_mode(False):   # an inference tensor cannot be saved for a later backward
            return _cached(make, *facts)
    return cast("M", made)


@lru_cache(maxsize=256)
def _cached(make: Callable[..., Tensor], *facts: Any) -> Tensor:
    return make(*facts)


def slopes_dtype(*tensors: Any) -> torch.dtype:
    """Return the dtype of a call's slopes: float64 if one of its tensors is float64, else float32."""
    double = any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if double else torch.float32


@_kept
def retention_slopes(H: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the log decays log(1 - 2^(-5 - h)) of RetNet's heads h, as [H] in ``dtype``.

    They are computed in float64. In float32 the logarithm of a number near 1 would lose half its digits.
    """
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(H, dtype=torch.float64, device=device))).to(dtype)


@_kept
def lightning_slopes(H: int, layer_idx: int, num_layers: int, dtype: torch.dtype,
                     device: torch.device) -> Tensor:
    """Return the log decays -(8 / H) (1 - layer_idx / num_layers) h of heads h, as [H] in ``dtype``."""
    step = -(8 / max(H, 1)) * (1 - layer_idx / num_layers)
    return (torch.arange(H, dtype=torch.float64, device=device) * step).to(dtype)


@_kept
def shift_filters(D: int, device: torch.device) -> Tensor:
    """Return the filters (1, -1) of a token shift for each channel, as [D, 2] in float32."""
    # arange avoids a copy from the host, which a CUDA graph cannot capture.
    return torch.arange(1.0, -2.0, -2.0, device=device).expand(D, 2).contiguous()
