"""The input tensors of gated linear attention and RWKV-6."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The input tensors of one call.

    q, k: [B, T, H, K].
    v: [B, T, H, V].
    g: [B, T, H, K], decays per key channel as natural logarithms.
    u: [H, K], RWKV-6's bonus; None for gated linear attention.
    h0: initial states [N, H, K, V] or, with ``state_v_first``, [N, H, V, K]; or None.
    bounds: [N + 1], increasing, within 0 .. T, or None for a dense batch. Sequence n is the rows bounds[n] ..
        bounds[n + 1] of the single batch row. Rows outside of all sequences give zeros.

    Kernels require contiguous tensors, g and u in fp32, and the same dtype for q, k and v.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    u: Tensor | None
    h0: Tensor | None
    bounds: Tensor | None
