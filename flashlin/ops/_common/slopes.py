"""Tensors that are always the same: fixed decays per head, the filters of a token shift. Made once per size
and device."""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from flashlin.compat.tracing import transient


def retention_slopes(H: int, device: torch.device) -> Tensor:
    """[H] float32: log(1 - 2^(-5 - h)), computed in float64 (in float32 the logarithm of a number near 1
    loses half its digits)."""
    return _made(_retention, (H,), device)


def lightning_slopes(H: int, layer_idx: int, num_layers: int, device: torch.device) -> Tensor:
    """[H] float32: -(8 / H) (1 - layer_idx / num_layers) h."""
    return _made(_lightning, (H, layer_idx, num_layers), device)


def shift_filters(D: int, device: torch.device) -> Tensor:
    """[D, 2] float32: (1, -1) for each channel."""
    return _made(_shift, (D,), device)


def _shift(device: torch.device, D: int) -> Tensor:
    # a copy from the host could not be captured in a CUDA graph
    return torch.arange(1.0, -2.0, -2.0, device=device).expand(D, 2).contiguous()


def _retention(device: torch.device, H: int) -> Tensor:
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(H, dtype=torch.float64, device=device))).float()


def _lightning(device: torch.device, H: int, layer_idx: int, num_layers: int) -> Tensor:
    return (torch.arange(H, dtype=torch.float64,
                         device=device) * (-(8 / max(H, 1)) * (1 - layer_idx / num_layers))).float()


@lru_cache(maxsize=256)
def _cached(make: Callable[..., Tensor], facts: tuple[int, ...], device: torch.device) -> Tensor:
    return make(device, *facts)


def _made(make: Callable[..., Tensor], facts: tuple[int, ...], device: torch.device) -> Tensor:
    # A tensor made while a CUDA graph is captured belongs to that graph's memory.
    if transient() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return make(device, *facts)
    with torch.inference_mode(False):   # an inference tensor could not be saved for a later backward
        return _cached(make, facts, device)
