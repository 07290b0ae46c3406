"""The recurrences, token by token in float64, written from the mathematics. Slow on purpose: everything else
is checked against them."""
from __future__ import annotations

import torch


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
    HV, K], g natural-log decays; v [B, T, HV, V], beta [B, T, HV], h0 [N, HV, K, V]. With bounds [N + 1] the
    rows bounds[n] .. bounds[n + 1] of the single batch row are sequence n; rows outside are zero.
    """
    q, k, v, g = (x.double() for x in (q, k, v, g))
    a, b, beta, h0 = (None if x is None else x.double() for x in (a, b, beta, h0))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k = (x.repeat_interleave(HV // H, 2) if HV != H else x for x in (q, k))
    edges = None if bounds is None else bounds.tolist()
    spans = [(row, 0, T) for row in range(B)] if edges is None else [(0, edges[n], edges[n + 1])
                                                                     for n in range(len(edges) - 1)]
    o, states = v.new_zeros(B, T, HV, V), []
    for n, (row, first, last) in enumerate(spans):
        S = q.new_zeros(HV, K, V) if h0 is None else h0[n]
        seen = []
        for t in range(first, last):
            decayed = g[row, t].exp()[..., None] * S
            if beta is None:
                assert a is not None and b is not None
                S = decayed + torch.einsum("hk,hj,hjv->hkv", b[row, t], a[row, t],
                                           S) + k[row, t][..., None] * v[row, t][:, None]
            else:
                missing = v[row, t] - torch.einsum("hkv,hk->hv", decayed, k[row, t])
                S = decayed + k[row, t][..., None] * (beta[row, t][:, None] * missing)[:, None]
            seen.append(scale * torch.einsum("hkv,hk->hv", S, q[row, t]))
        if seen:
            o = o.index_put((torch.full((last - first,), row), torch.arange(first, last)), torch.stack(seen))
        states.append(S)
    return o, torch.stack(states) if states else q.new_zeros(0, HV, K, V)
