"""The recurrence, token by token in float64, written from the mathematics. Slow on purpose: everything else
is checked against it."""
from __future__ import annotations

import torch

from flashlin.kernels.oracle import read, token_by_token, written


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None = None,
               gamma: torch.Tensor | None = None, h0: torch.Tensor | None = None,
               bounds: torch.Tensor | None = None, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, H, V], states [N, H, K, V]), float64 and differentiable:  S_t = e^{g_t} S_{t-1} + k_t v_t^T,
    o_t = scale S_t^T q_t.

    q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] and gamma [H] natural-log decays that add up, h0 [N, H, K,
    V]. bounds as in ``token_by_token``.
    """
    gamma = None if gamma is None else gamma.double()

    def step(S: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        for decay in (g, gamma):
            S = S if decay is None else decay.exp()[:, None, None] * S
        S = S + written(k, v)
        return S, scale * read(S, q)
    return token_by_token(step, (q, k, v, g), h0, bounds)
