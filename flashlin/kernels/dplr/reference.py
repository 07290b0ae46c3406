"""The recurrences, token by token in float64, written from the mathematics. Slow on purpose: everything else
is checked against them."""
from __future__ import annotations

import torch

from flashlin.kernels.oracle import read, token_by_token, written


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    h0: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, HV, V], states [N, HV, K, V]), float64 and differentiable; o_t = scale S_t^T q_t, and with a
    and b
        S_t = Diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
    or with beta, S' = Diag(e^{g_t}) S_{t-1},
        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T

    q, k [B, T, H, K], HV a multiple of H: value head j reads q and k of head j // (HV / H); g, a, b [B, T,
    HV, K], g natural-log decays; v [B, T, HV, V], beta [B, T, HV], h0 [N, HV, K, V]. bounds as in
    ``token_by_token``.
    """
    def step(
        S: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decayed = g.exp()[:, :, None] * S
        if a is not None and b is not None:
            S = decayed + written(b, read(S, a)) + written(k, v)
        else:
            assert beta is not None
            S = decayed + written(k, beta[:, None] * (v - read(decayed, k)))
        return S, scale * read(S, q)
    return token_by_token(step, (q, k, v, g, a, b, beta), h0, bounds)


def erasing(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    w: torch.Tensor,
    h0: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated DeltaNet 2: S' = Diag(e^{g_t}) S_{t-1}, S_t = S' + k_t (w_t v_t - S'^T (b_t k_t))^T, o_t = scale
    S_t^T q_t.

    b like g, [B, T, HV, K]; w like v. The rest, and what is returned, as ``recurrence``.
    """
    def step(
        S: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        b: torch.Tensor,
        w: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        S = g.exp()[:, :, None] * S
        S = S + written(k, w * v - read(S, b * k))
        return S, scale * read(S, q)
    return token_by_token(step, (q, k, v, g, b, w), h0, bounds)
