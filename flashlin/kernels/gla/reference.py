"""The recurrence of RWKV-6 and of linear attention with any decays, in float64, written from the mathematics.

``over_tokens`` turns the step into a recurrence and gives the shapes of the tensors.
"""
from __future__ import annotations

from torch import Tensor

from flashlin.kernels.oracle import decayed, over_tokens, read, written


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gamma: Tensor | None = None,
         gk: Tensor | None = None, gv: Tensor | None = None,
         u: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the state after one token and its output.

        S' = e^{g + gamma} Diag(e^gk) S Diag(e^gv) + k v^T
        o = S'^T q

    With RWKV-6's bonus u for the token itself, the output reads the state before the token:

        o = (S + Diag(u) k v^T)^T q

    g: decays of heads or of key channels, as natural logarithms.
    gamma: [HV], a decay per head that is the same for all tokens.
    gk, gv: decays of key channels and of value channels.
    u: [HV, K].
    """
    after = decayed(S, g, gamma, gk, values=gv) + written(k, v)
    return after, read(after if u is None else S + written(u * k, v), q)


recurrence = over_tokens(step, "gamma", "u")
