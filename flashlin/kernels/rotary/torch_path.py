"""Differentiable torch path of the rotary embedding.

It is used for CPUs, float64 tensors, and GPUs that no Triton release supports. torch.compile also uses it, to
fuse the rotation with the surrounding code.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.sequences import sequences_of, widest


def places_of(x: Tensor, offset: int, offsets: Tensor | None,
              bounds: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the row of the tables for each token, and the mask of tokens that belong to a sequence.

    The rows are [B or 1, T] in int64, and may be outside the tables. The mask is [1, T], or None if all
    tokens belong to a sequence. The arguments are described in ``launch_forward`` of forward.py.
    """
    places = torch.arange(x.shape[1], device=x.device)[None] + offset
    if bounds is None:
        return places if offsets is None else places + offsets.long()[:, None], None
    n, belongs = sequences_of(bounds, x.shape[1])
    n = torch.where(belongs, n, 0)
    places = places - bounds.long()[n]
    return places if offsets is None or not len(offsets) else places + offsets.long()[n], belongs[None]


def compute(x: Tensor, cos: Tensor, sin: Tensor, offset: int, offsets: Tensor | None, bounds: Tensor | None,
        interleaved: bool) -> Tensor:
    """Return the rotated x, [B, T, H, D] in x's dtype.

    The arguments are described in ``launch_forward`` of forward.py. Here they may have any strides.
    """
    (TR, R), compute = cos.shape, widest(x)
    places, belongs = places_of(x, offset, offsets, bounds)
    # Rows before the tables read a row of zeros, and rows after the tables read a row of NaN.
    rows = (places + 1).clamp(0, TR + 1)
    c, s = (F.pad(F.pad(table.to(compute), (0, 0, 1, 0)), (0, 0, 0, 1), value=torch.nan)[rows][:, :, None]
            for table in (cos, sin))
    part = x[..., :2 * R].to(compute)
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :R], part[..., R:])
    turned = a * c - b * s, a * s + b * c
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    y = torch.cat([y.to(x.dtype), x[..., 2 * R:]], -1)
    return y if belongs is None else torch.where(belongs[..., None, None], y, 0)
