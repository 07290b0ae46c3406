"""The tensors that go into gated linear attention and RWKV-6."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """q, k [B, T, H, K], v [B, T, H, V]; g [B, T, H, K]: natural-log decays; u [H, K]: RWKV-6's bonus, None
    for gated linear attention. h0 [N, H, K, V] or, with ``state_v_first``, [N, H, V, K]. bounds [N + 1],
    rising, within 0 .. T: sequence n is the rows bounds[n] .. bounds[n + 1] of the single batch row; the rows
    outside give zeros.

    Kernels want them contiguous, g and u in fp32, q, k and v in one dtype.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    u: Tensor | None
    h0: Tensor | None
    bounds: Tensor | None
