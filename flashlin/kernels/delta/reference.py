"""The delta recurrences, token by token in float64: what everything else is measured against. Slow on
purpose."""
from __future__ import annotations

import torch

from flashlin.kernels.oracle import read, token_by_token, written


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    h0: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    scale: float = 1.0,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S' = e^{g_t} Diag(e^{gk_t}) S_{t-1} Diag(e^{gv_t}),  u_t = beta_t (v_t - S'^T k_t),  S_t = S' + k_t
    u_t^T,  o_t = scale S_t^T q_t.

    q, k [B, T, H, K]; v [B, T, HV, V], HV a multiple of H: value head j reads q and k of head j // (HV / H);
    beta [B, T, HV] or [B, T, HV, V], None for ones; g [B, T, HV]; gk [B, T, HV, K]; gv [B, T, HV, V]; h0 [N,
    HV, K, V]. Returns (o [B, T, HV, V], states [N, HV, K, V]) in float64. Differentiable. cu_seqlens as
    bounds in ``token_by_token``.
    """
    def step(
        S: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor | None,
        g: torch.Tensor | None,
        gk: torch.Tensor | None,
        gv: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        S = S if g is None else g.exp()[:, None, None] * S
        S = S if gk is None else gk.exp()[:, :, None] * S
        S = S if gv is None else gv.exp()[:, None, :] * S
        u = v - read(S, k)
        if beta is not None:
            u = u * (beta if beta.ndim == 2 else beta[:, None])
        S = S + written(k, u)
        return S, scale * read(S, q)
    return token_by_token(step, (q, k, v, beta, g, gk, gv), h0, cu_seqlens)


def product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    num_householder: int,
    g: torch.Tensor | None = None,
    h0: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """n steps for each token: S' = e^{g_t} S_{t-1}, then n times S' <- S' + k (beta (v - S'^T k))^T with the
    next of its k, v and beta; S_t is the last of them and o_t = scale S_t^T q_t.

    q [B, T, H, K]; g [B, T, HV]; k [B, T n, H, K], v [B, T n, HV, V], beta [B, T n, HV], n =
    ``num_householder`` rows a token. The rest, and what is returned, as ``recurrence``.
    """
    n, HV = num_householder, v.shape[2]
    k = k.repeat_interleave(HV // max(k.shape[2], 1), 2)
    keys, values, rates = (x.view(x.shape[0], -1, n, *x.shape[2:]).transpose(2, 3) for x in (k, v, beta))

    def step(
        S: torch.Tensor,
        q: torch.Tensor,
        _: torch.Tensor,
        last: torch.Tensor,
        g: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        S = S if g is None else g.exp()[:, None, None] * S
        for j in range(n):
            S = S + written(k[:, j], beta[:, j, None] * (v[:, j] - read(S, k[:, j])))
        return S, scale * read(S, q)
    return token_by_token(step, (q, q, values[:, :, :, -1], g, keys, values, rates), h0, cu_seqlens)


def fed_back(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    p: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    h0: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Comba: S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T, o_t = scale S_t^T q_t.

    g, beta [B, T, HV], beta None for ones; p like k, which it is if None. The rest, and what is returned, as
    ``recurrence``.
    """
    p = k if p is None else p
    p = p.repeat_interleave(v.shape[2] // max(p.shape[2], 1), 2)

    def step(
        S: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        p: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        u = v - read(S, p)
        S = g.exp()[:, None, None] * S + written(k, u if beta is None else beta[:, None] * u)
        return S, scale * read(S, q)
    return token_by_token(step, (q, k, v, g, p, beta), h0, cu_seqlens)
