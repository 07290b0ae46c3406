"""The tensors that go into the delta families with a decay for each key channel."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j // (HV /
    H). g [B, T, HV, K]: natural-log decays. a and b [B, T, HV, K] (DPLR), beta [B, T, HV] (KDA), or a alone,
    the rate for each channel at which what k reads is erased, with v weighted (Gated DeltaNet 2). h0 [N, HV,
    K, V] or, with ``state_v_first``, [N, HV, V, K]. bounds [N + 1], rising, within 0 .. T: sequence n is the
    rows bounds[n] .. bounds[n + 1] of the single batch row; the rows outside give zeros.

    Kernels want them contiguous, g and beta in fp32, q, k, v, a and b in one dtype.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    a: Tensor | None
    b: Tensor | None
    beta: Tensor | None
    h0: Tensor | None
    bounds: Tensor | None
