"""The tensors that go into the chunked delta rules."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """q, k [B, T, H, K]; v [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j // (HV /
    H). beta [B, T, HV]; g [B, T, HV]: natural-log decays. p [B, T, H, K] (Comba): what reads the old state,
    before it decays; without it k does, after. h0 [N, HV, K, V] or, with ``state_v_first``, [N,
    HV, V, K]. bounds [N + 1], rising, within 0 .. T: sequence n is the rows bounds[n] .. bounds[n + 1] of the
    single batch row; the rows outside give zeros.

    Kernels want them contiguous, beta and g in fp32, q, k, v and p in one dtype.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    p: Tensor | None
    h0: Tensor | None
    bounds: Tensor | None
