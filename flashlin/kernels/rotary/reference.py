"""Rotary embeddings in float64, sequence by sequence, written from the mathematics. Everything else is
checked against it."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.oracle import spans_of


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0,
           cu_seqlens: Tensor | None = None) -> Tensor:
    """y [B, T, H, D] in float64, differentiable: each pair of channels is a complex number, and is multiplied
    by cos + i sin of its token.

    cos, sin: [TR, R]. seqlen_offsets: the row of the first token of all sequences, or of each [N].
    cu_seqlens: where sequences begin and end in a packed batch. Tokens of no sequence are zero, and pairs of
    tokens before row 0.
    """
    B, T = x.shape[:2]
    R = cos.shape[1]
    axis = -1 if interleaved else -2  # of the two channels of a pair
    turns = torch.complex(cos.double(), sin.double())
    y = torch.zeros_like(x, dtype=torch.float64)
    spans = spans_of(B, T, cu_seqlens)
    offsets = torch.as_tensor(seqlen_offsets).expand(len(spans))
    for offset, (b, first, end) in zip(offsets, spans, strict=True):
        places = torch.arange(end - first, device=x.device) + offset
        tokens = x[b, first:end].double()
        rotated = tokens[..., :2 * R].reshape(end - first, x.shape[2], *((R, 2) if interleaved else (2, R)))
        pairs = torch.complex(*rotated.unbind(axis))
        pairs = torch.where(places[:, None, None] < 0, 0, pairs * turns[places.clamp(min=0), None])
        y[b, first:end, :, :2 * R] = torch.stack([pairs.real, pairs.imag], axis).flatten(-2)
        y[b, first:end, :, 2 * R:] = tokens[..., 2 * R:]
    return y
