"""The step of RWKV-6 and of linear attention with any decays, in float64, written from the mathematics.
``over_tokens`` names the shapes."""
from __future__ import annotations

from torch import Tensor

from flashlin.kernels.oracle import decayed, over_tokens, read, written


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gamma: Tensor | None = None,
         gk: Tensor | None = None, gv: Tensor | None = None,
         u: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S' = e^{g + gamma} Diag(e^gk) S Diag(e^gv) + k v^T, o = S'^T q. g belongs to heads or to key channels,
    gamma [HV] to the heads of all tokens.

    RWKV-6 has a bonus u [HV, K] for the token itself and reads the state before it: o = (S + Diag(u) k v^T)^T
    q.
    """
    after = decayed(S, g, gamma, gk, values=gv) + written(k, v)
    return after, read(after if u is None else S + written(u * k, v), q)


recurrence = over_tokens(step, "gamma", "u")
