"""Rotary embeddings in plain, differentiable torch, for CPUs, float64, cards that no Triton compiles for, and
torch.compile, which fuses them with whatever is around them."""
from __future__ import annotations

import torch

Tensor = torch.Tensor


def places_of(x: Tensor, offset: int, offsets: Tensor | None,
              bounds: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The row of the tables that each token takes, [B or 1, T] int64, which may be none of them; and which
    tokens belong to a sequence, [1, T], None for all. Arguments as forward.run."""
    places = torch.arange(x.shape[1], device=x.device)[None] + offset
    if bounds is None:
        return places if offsets is None else places + offsets.long()[:, None], None
    tokens = places - offset
    n = torch.searchsorted(bounds, tokens.to(bounds.dtype), right=True) - 1
    belongs = (n >= 0) & (n < bounds.shape[0] - 1)
    n = torch.where(belongs, n, 0)
    places = places - bounds.long()[n]
    return places if offsets is None or not len(offsets) else places + offsets.long()[n], belongs


def run(x: Tensor, cos: Tensor, sin: Tensor, offset: int, offsets: Tensor | None, bounds: Tensor | None,
        interleaved: bool) -> Tensor:
    """y [B, T, H, D] in x's dtype. Arguments as forward.run, with any strides."""
    (TR, R), compute = cos.shape, torch.float64 if x.dtype == torch.float64 else torch.float32
    places, belongs = places_of(x, offset, offsets, bounds)
    known = (places >= 0) & (places < TR)
    turn = torch.where(known, places, 0)
    wrong = torch.where(places >= TR, torch.nan, 0.0).to(compute)
    if TR:
        c, s = (torch.where(known[..., None], table.to(compute)[turn], wrong[..., None])[:, :, None]
                for table in (cos, sin))
    else:
        c = s = wrong[..., None, None]
    part = x[..., :2 * R].to(compute)
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :R], part[..., R:])
    turned = a * c - b * s, a * s + b * c
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    y = torch.cat([y.to(x.dtype), x[..., 2 * R:]], -1)
    return y if belongs is None else torch.where(belongs[..., None, None], y, 0)
