"""References of the delta rules in float64: all other implementations are compared with them.

Each step function computes one token of all heads; ``over_tokens`` describes the shapes.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.kernels.oracle import decayed, over_tokens, read, written


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, g: Tensor | None = None,
         gk: Tensor | None = None, gv: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute one token of the gated delta rule; return the new state [HV, K, V] and o [HV, V].

        S' = e^g Diag(e^gk) S Diag(e^gv),  u = beta (v - S'^T k),  S = S' + k u^T,  o = S^T q

    beta: per head [HV] or per value channel [HV, V]; None for ones. g: per head or per key channel. gk: per
    key channel. gv: per value channel.
    """
    S = decayed(S, g, gk, values=gv)
    u = v - read(S, k)
    S = S + written(k, u if beta is None else (beta if beta.ndim == 2 else beta[:, None]) * u)
    return S, read(S, q)


def product_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
                 g: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute one token of the gated delta product; return the new state [HV, K, V] and o [HV, V].

    A token has n rows of k, v and beta, [HV, n, ...]. The state decays once, S' = e^g S. Then each row j
    updates it, and the last result is the new state S:

        S' <- S' + k_j (beta_j (v_j - S'^T k_j))^T
        o = S^T q
    """
    S = decayed(S, g)
    for k_j, v_j, beta_j in zip(k.unbind(1), v.unbind(1), beta.unbind(1), strict=True):
        S, _ = step(S, q, k_j, v_j, beta_j)
    return S, read(S, q)


def fed_back_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, p: Tensor | None = None,
                  beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute one token of Comba; return the new state [HV, K, V] and o [HV, V].

        S <- e^g S + beta k (v - S^T p)^T
        o = S^T q

    p: [HV, K]; None for k. beta: [HV]; None for ones.
    """
    u = v - read(S, k if p is None else p)
    S = decayed(S, g) + written(k, u if beta is None else beta[:, None] * u)
    return S, read(S, q)


recurrence, fed_back = over_tokens(step), over_tokens(fed_back_step)


def product(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, num_householder: int,
            **given: Any) -> tuple[Tensor, Tensor]:
    """Run ``product_step`` over all tokens; return the outputs [B, T, HV, V] and the final states.

    k, v and beta have n = ``num_householder`` rows for each token: [B, T n, H or HV, ...]. given: other
    arguments of the recurrence, see ``over_tokens``.
    """
    rows = (x.view(x.shape[0], x.shape[1] // num_householder, num_householder, *x.shape[2:]).transpose(2, 3)
            for x in (k, v, beta))
    return over_tokens(product_step)(q, *rows, **given)
