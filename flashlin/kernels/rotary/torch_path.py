"""Rotary embeddings in plain, differentiable torch, for CPUs, float64, cards that no Triton compiles for, and
torch.compile, which fuses them with whatever is around them."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.sequences import sequences_of, widest


def places_of(x: Tensor, offset: int, offsets: Tensor | None,
              bounds: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The row of the tables that each token takes, [B or 1, T] int64, which may be none of them; and which
    tokens belong to a sequence, [1, T], None for all. Arguments as launch_forward."""
    places = torch.arange(x.shape[1], device=x.device)[None] + offset
    if bounds is None:
        return places if offsets is None else places + offsets.long()[:, None], None
    n, belongs = sequences_of(bounds, x.shape[1])
    n = torch.where(belongs, n, 0)
    places = places - bounds.long()[n]
    return places if offsets is None or not len(offsets) else places + offsets.long()[n], belongs[None]


def compute(x: Tensor, cos: Tensor, sin: Tensor, offset: int, offsets: Tensor | None, bounds: Tensor | None,
        interleaved: bool) -> Tensor:
    """y [B, T, H, D] in x's dtype. Arguments as launch_forward, with any strides."""
    (TR, R), compute = cos.shape, widest(x)
    places, belongs = places_of(x, offset, offsets, bounds)
    # a row of zeros for the places before the tables, one of NaN for those past them
    rows = (places + 1).clamp(0, TR + 1)
    c, s = (F.pad(F.pad(table.to(compute), (0, 0, 1, 0)), (0, 0, 0, 1), value=torch.nan)[rows][:, :, None]
            for table in (cos, sin))
    part = x[..., :2 * R].to(compute)
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :R], part[..., R:])
    turned = a * c - b * s, a * s + b * c
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    y = torch.cat([y.to(x.dtype), x[..., 2 * R:]], -1)
    return y if belongs is None else torch.where(belongs[..., None, None], y, 0)
