"""The tensors that Mamba-3's rotation takes and returns."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The inputs of one rotation: contiguous tensors of any floating-point dtypes.

    q, k: [B, T, G, K]. Each of the G groups serves H / G heads: head h uses group h // (H / G).
    q_bias, k_bias: [H, K], added to q and k of each head before the rotation.
    angles: [B, T, H, R], raw angles of R channel pairs; 2 R is at most K.
    step: [B, T, H], the step sizes that scale the angles.
    weight: [B, T, H], the factors of the rotated k.
    began: [N, H, R], the angles with which the sequences begin, in radians; None for zeros.
    bounds: [N + 1], the first row of each packed sequence and the end of the last; None for a dense batch.
    """
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
        """Return the number of sequences: the batch size, or the number of packed sequences."""
        return self.q.shape[0] if self.bounds is None else self.bounds.shape[0] - 1

    def chunks(self, BT: int) -> tuple[int, int]:
        """Return the programs per sequence and the entries of a chunk table, for chunks of BT tokens.

        The first number is the mean number of chunks per sequence, at least 1. The second is an upper bound
        of the number of chunks in the whole batch.
        """
        rows, N = self.q.shape[0] * self.q.shape[1], max(self.sequences, 1)
        return max(1, -(-rows // (BT * N))), rows // BT + N + 1


class Outputs(NamedTuple):
    """The outputs of one rotation, or their gradients.

    q: [B, T, H, K]. Row t is the rotated q of token t + 1; a sequence's last row is zero.
    k: [B, T, H, K], rotated and multiplied by the weight.
    q_first, k_last: [N, H, K], the rotated q of each sequence's first token and the rotated k of its last
        one, without weight. They are zero for a sequence without tokens.
    alike: [B, T, H], the product q . k of each token, biases included.
    angle: [B, T, H, R], the accumulated angles, within 0 .. 2 pi.
    """
    q: Tensor
    k: Tensor
    q_first: Tensor
    k_last: Tensor
    alike: Tensor
    angle: Tensor
