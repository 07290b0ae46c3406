"""The tensors that go into the scalar-decay family."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """q, k [B, T, G, K]; v [B, T, H, V], H a multiple of G: head j reads q and k of head j // (H / G). g [B,
    T, H] and gamma [H]: natural-log decays, one of them at most. h0 [N, H, K, V] or, with
    ``state_v_first``, [N, H, V, K]. bounds [N + 1], rising, within 0 .. T: sequence n is the rows bounds[n]
    .. bounds[n + 1] of the single batch row; the rows outside give zeros.

    Kernels want them contiguous, g and gamma in fp32, q, k and v in one dtype.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    gamma: Tensor | None
    h0: Tensor | None
    bounds: Tensor | None
