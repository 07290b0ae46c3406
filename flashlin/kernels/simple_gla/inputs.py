"""The input tensors of the scalar-decay family."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The input tensors of one call.

    q, k: [B, T, G, K].
    v: [B, T, H, V], where H is a multiple of G. Head j of v uses q and k of head j // (H / G).
    g: [B, T, H], decays per token and head as natural logarithms, or None.
    gamma: [H], decays per head as natural logarithms, or None. At most one of g and gamma is given.
    h0: initial states [N, H, K, V] or, with ``state_v_first``, [N, H, V, K]; or None.
    bounds: [N + 1], increasing, within 0 .. T, or None for a dense batch. Sequence n is the rows bounds[n] ..
        bounds[n + 1] of the single batch row. Rows outside of all sequences give zeros.

    Kernels require contiguous tensors, g and gamma in fp32, and the same dtype for q, k and v.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    gamma: Tensor | None
    h0: Tensor | None
    bounds: Tensor | None
