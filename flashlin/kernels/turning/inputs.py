"""What Mamba-3's rotation gets and gives."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """q, k [B, T, G, K]; q_bias, k_bias [H, K], head h with group h // (H / G). angles [B, T, H, R], 2 R at
    most K; step [B, T, H]. weight [B, T, H]: what multiplies the k of the token before. k_before [N, H, K],
    turned, and began [N, H, R]: what sequences begin with, None for zeros. bounds [N + 1] or None. All
    contiguous, of any dtypes."""
    q: Tensor
    k: Tensor
    q_bias: Tensor
    k_bias: Tensor
    angles: Tensor
    step: Tensor
    weight: Tensor
    k_before: Tensor | None = None
    began: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.bounds is None else self.bounds.shape[0] - 1


class Outputs(NamedTuple):
    """q [B, T, H, K], turned; k [B, T, H, K], weight times that of the token before, turned; k_last [N, H,
    K], each sequence's last, turned; angle [B, T, H, R], within 0 .. 2 pi."""
    q: Tensor
    k: Tensor
    k_last: Tensor
    angle: Tensor
