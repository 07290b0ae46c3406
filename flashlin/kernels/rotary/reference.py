"""Reference of the rotary embedding, sequence by sequence in float64, for tests of all implementations."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.kernels.oracle import spans_of


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0,
           cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the rotated x, [B, T, H, D] in float64; it is differentiable.

    Each pair of channels is treated as a complex number, and multiplied by cos + i sin of its token.

    cos, sin: [TR, R].
    interleaved: True if the pairs are (2 i, 2 i + 1), False if they are (i, R + i).
    seqlen_offsets: row of the tables for the first token of every sequence, or one row for each sequence [N].
    cu_seqlens: [N + 1], the boundaries of packed sequences, or None.

    The result is zero for tokens of no sequence, and for the rotated pairs of tokens whose row is negative.
    """
    B, T = x.shape[:2]
    R = cos.shape[1]
    axis = -1 if interleaved else -2  # axis of the two channels of a pair
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
