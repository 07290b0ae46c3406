"""The recurrence, token by token in float64, written from the mathematics. Slow on purpose: everything else
is checked against it."""
from __future__ import annotations

import torch


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
               h0: torch.Tensor | None = None, bounds: torch.Tensor | None = None, scale: float = 1.0,
               u: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, H, V], states [N, H, K, V]), float64 and differentiable, of  S_t = Diag(e^{g_t}) S_{t-1} +
    k_t v_t^T  and
    gla: o_t = scale S_t^T q_t          with u, RWKV-6: o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T q_t.

    q, k, g [B, T, H, K], g natural-log decays; v [B, T, H, V], h0 [N, H, K, V], u [H, K]. With bounds [N + 1]
    the rows bounds[n] .. bounds[n + 1] of the single batch row are sequence n; rows outside are zero.
    """
    q, k, v, g = q.double(), k.double(), v.double(), g.double()
    B, T, H, K = q.shape
    V = v.shape[-1]
    edges = None if bounds is None else bounds.tolist()
    spans = [(b, 0, T) for b in range(B)] if edges is None else [(0, edges[n], edges[n + 1])
                                                                 for n in range(len(edges) - 1)]
    o = v.new_zeros(B, T, H, V)
    states = []
    for n, (b, first, last) in enumerate(spans):
        S = q.new_zeros(H, K, V) if h0 is None else h0[n].double()
        rows = []
        # unbound at once: an index for each token would make backward quadratic in their number
        for q_t, k_t, v_t, g_t in zip(*(x[b, first:last].unbind() for x in (q, k, v, g)), strict=True):
            new = k_t[:, :, None] * v_t[:, None, :]
            old, S = S, g_t[:, :, None].exp() * S + new
            read = S if u is None else old + u.double()[:, :, None] * new
            rows.append(scale * torch.einsum("hk,hkv->hv", q_t, read))
        if rows:
            o = o.index_put((torch.full((last - first,), b), torch.arange(first, last)), torch.stack(rows))
        states.append(S)
    return o, torch.stack(states) if states else q.new_zeros(0, H, K, V)
