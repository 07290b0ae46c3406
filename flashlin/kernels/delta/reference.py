"""The steps of the delta rules, in float64: what everything else is measured against. ``over_tokens``
names the shapes."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from flashlin.kernels.oracle import decayed, over_tokens, read, written


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, g: Tensor | None = None,
         gk: Tensor | None = None, gv: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S' = e^g Diag(e^gk) S Diag(e^gv),  u = beta (v - S'^T k),  S = S' + k u^T,  o = S^T q.

    beta of heads or of value channels, 1 if None; g of heads or of key channels, gk of key and gv of value
    channels.
    """
    S = decayed(S, g, gk, values=gv)
    u = v - read(S, k)
    S = S + written(k, u if beta is None else (beta if beta.ndim == 2 else beta[:, None]) * u)
    return S, read(S, q)


def product_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
                 g: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S' = e^g S, then n times S' <- S' + k (beta (v - S'^T k))^T with the next of its k, v and beta [HV, n,
    ...]; S is the last of them and o = S^T q."""
    S = decayed(S, g)
    for k_j, v_j, beta_j in zip(k.unbind(1), v.unbind(1), beta.unbind(1), strict=True):
        S, _ = step(S, q, k_j, v_j, beta_j)
    return S, read(S, q)


def fed_back_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, p: Tensor | None = None,
                  beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Comba: S <- e^g S + beta k (v - S^T p)^T, o = S^T q; p like k, which it is if None, beta 1 if None."""
    u = v - read(S, k if p is None else p)
    S = decayed(S, g) + written(k, u if beta is None else beta[:, None] * u)
    return S, read(S, q)


recurrence, fed_back = over_tokens(step), over_tokens(fed_back_step)


def product(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, num_householder: int,
            **given: Any) -> tuple[Tensor, Tensor]:
    """The recurrence of ``product_step`` with n = ``num_householder`` rows of k, v and beta for each token:
    [B, T n, H or HV, ...]."""
    rows = (x.view(x.shape[0], x.shape[1] // num_householder, num_householder, *x.shape[2:]).transpose(2, 3)
            for x in (k, v, beta))
    return over_tokens(product_step)(q, *rows, **given)
