"""The step of linear attention with a decay for each head, in float64, written from the mathematics.
``over_tokens`` names the shapes."""
from __future__ import annotations

from torch import Tensor

from flashlin.kernels.oracle import decayed, over_tokens, read, written


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None,
         gamma: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S <- e^{g + gamma} S + k v^T, o = S^T q; g [HV] of the token, gamma [HV] of all tokens."""
    S = decayed(S, g, gamma) + written(k, v)
    return S, read(S, q)


recurrence = over_tokens(step, "gamma")
