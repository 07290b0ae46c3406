"""The input tensors of the delta families with a decay for each key channel."""
from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, dtype

# The lowest log decay with which 16 tokens always fit one decay reference: 120 bits in 16 tokens.
LOWEST = -120 * math.log(2) / 16


class Inputs(NamedTuple):
    """The input tensors of one call.

    q, k: [B, T, H, K].
    v: [B, T, HV, V], where HV is a multiple of H. Value head j uses q and k of head j // (HV / H).
    g: [B, T, HV, K], decays per key channel as natural logarithms.
    a, b: [B, T, HV, K]. For DPLR, a is the vector that reads the state, and b the one that writes to it. For
        Gated DeltaNet 2 only a is given. It is the erase rate per key channel, and v is already multiplied
        by the write rates.
    beta: [B, T, HV], for KDA, or None.
    A_log: [HV], or None. With A_log (KDA), q and k are not normalized yet, and g is the raw gate. Backward
        normalizes q and k before it starts kernels. It also computes the gate before, unless its plan has
        ``dplr_prepare_raw``. The log decays are lowest * sigmoid(exp(A_log) * (g + dt_bias)).
    dt_bias: [HV, K], or None.
    h0: initial states [N, HV, K, V] or, with ``state_v_first``, [N, HV, V, K]; or None.
    bounds: [N + 1], increasing, within 0 .. T, or None for a dense batch. Sequence n is the rows bounds[n] ..
        bounds[n + 1] of the single batch row. Rows outside of all sequences give zeros.

    Kernels require contiguous tensors, and the same dtype for q, k, v, a and b. beta, A_log, dt_bias and, if
    it is not raw, g are fp32.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    a: Tensor | None
    b: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    h0: Tensor | None
    bounds: Tensor | None


class Scalars(NamedTuple):
    """The scalar arguments of one call: those of ``kernels/chunked.py``, and one more.

    lowest: no log decay is below this number; -inf if no bound is known.
    """
    scale: float
    has_ht: bool
    state_v_first: bool
    out_dtype: dtype
    mode: str
    lowest: float = -math.inf
    needs_grad: bool = False
    call: str = ""
