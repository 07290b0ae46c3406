"""Rotary embeddings in float64, token by token, written from the mathematics. Everything else is checked
against it."""
from __future__ import annotations

import torch

Tensor = torch.Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, offsets: list[int] | None = None,
           bounds: list[int] | None = None) -> Tensor:
    """y [B, T, H, D] in float64, differentiable: each pair of channels is a complex number, and is multiplied
    by cos + i sin of its token.

    cos, sin: [TR, R]. offsets: of each sequence, the row of its first token; 0 if None. bounds: where
    sequences begin and end in a packed batch. Tokens of no sequence are zero, and pairs of tokens before row
    0.
    """
    B, T = x.shape[:2]
    R = cos.shape[1]
    y = [[torch.zeros_like(x[b, t]).double() for t in range(T)] for b in range(B)]
    spans = [(n, 0, T) for n in range(B)] if bounds is None else [(0, bounds[n], bounds[n + 1])
                                                                  for n in range(len(bounds) - 1)]
    for n, (b, first, end) in enumerate(spans):
        for t in range(first, end):
            place = t - first + (0 if offsets is None else offsets[n])
            token = x[b, t].double()
            one, two = (token[:, 0:2 * R:2], token[:, 1:2 * R:2]) if interleaved else (token[:, :R],
                                                                                       token[:, R:2 * R])
            if place < 0:
                turned = torch.zeros_like(torch.complex(one, two))
            else:
                turned = torch.complex(one, two) * torch.complex(cos[place].double(), sin[place].double())
            pairs = torch.stack([turned.real, turned.imag], -1 if interleaved else -2).flatten(-2)
            y[b][t] = torch.cat([pairs, token[:, 2 * R:]], -1)
    return torch.stack([torch.stack(rows) for rows in y]) if B and T else x.double()
