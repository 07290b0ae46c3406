"""The recurrence, token by token in float64, written from the mathematics. Slow on purpose: everything else
is checked against it."""
from __future__ import annotations

import torch

from flashlin.kernels.oracle import read, token_by_token, written


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
               h0: torch.Tensor | None = None, bounds: torch.Tensor | None = None, scale: float = 1.0,
               u: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, H, V], states [N, H, K, V]), float64 and differentiable, of  S_t = Diag(e^{g_t}) S_{t-1} +
    k_t v_t^T  and
    gla: o_t = scale S_t^T q_t          with u, RWKV-6: o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T q_t.

    q, k, g [B, T, H, K], g natural-log decays; v [B, T, H, V], h0 [N, H, K, V], u [H, K]. bounds as in
    ``token_by_token``.
    """
    u = None if u is None else u.double()

    def step(S: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        after = g.exp()[:, :, None] * S + written(k, v)
        return after, scale * read(after if u is None else S + written(u * k, v), q)
    return token_by_token(step, (q, k, v, g), h0, bounds)
