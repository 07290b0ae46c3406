"""The input tensors of the chunked delta rules."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The input tensors of one call of a chunked delta rule.

    q, k: [B, T, H, K].
    v: [B, T, HV, V]. HV is a multiple of H; value head j reads head j // (HV / H) of q and k.
    beta: [B, T, HV], the strength of the update.
    g: [B, T, HV], natural logarithms of the decays; None for no decay.
    p: [B, T, H, K], for Comba: the vector of the prediction, which reads the state before it decays. Without
        p, the prediction uses k and the decayed state.
    h0: initial states [N, HV, K, V] or, with ``state_v_first``, [N, HV, V, K]; None for zeros.
    bounds: [N + 1], ascending, within 0 .. T. Sequence n is the rows bounds[n] .. bounds[n + 1] of the single
        batch row. The outputs of rows outside all sequences are zero.

    The kernels require contiguous tensors. q, k, v and p have the same dtype. beta has this dtype or
    fp32, and g is fp32.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    p: Tensor | None
    h0: Tensor | None
    bounds: Tensor | None
