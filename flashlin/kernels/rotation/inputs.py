"""What Mamba-3's rotation gets and gives."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """q, k [B, T, G, K]; q_bias, k_bias [H, K], head h with group h // (H / G). angles [B, T, H, R], 2 R at
    most K; step [B, T, H]. weight [B, T, H]: what multiplies k. began [N, H, R]: the angles that sequences
    begin with, None for zeros. bounds [N + 1] or None. All contiguous, of any dtypes."""
    q: Tensor
    k: Tensor
    q_bias: Tensor
    k_bias: Tensor
    angles: Tensor
    step: Tensor
    weight: Tensor
    began: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.bounds is None else self.bounds.shape[0] - 1

    def chunks(self, BT: int) -> tuple[int, int]:
        """Return how many programs a sequence has for chunks of BT tokens, and slots of a table of chunks."""
        rows, N = self.q.shape[0] * self.q.shape[1], max(self.sequences, 1)
        return max(1, -(-rows // (BT * N))), rows // BT + N + 1


class Outputs(NamedTuple):
    """q [B, T, H, K]: that of the next token, turned; zeros for a sequence's last. k [B, T, H, K]: turned,
    times its weight. q_first, k_last [N, H, K]: each sequence's first q and last k, turned; zeros where it
    has no tokens. alike [B, T, H]: q . k of each token. angle [B, T, H, R], within 0 .. 2 pi."""
    q: Tensor
    k: Tensor
    q_first: Tensor
    k_last: Tensor
    alike: Tensor
    angle: Tensor
