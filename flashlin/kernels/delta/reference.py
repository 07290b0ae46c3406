"""The delta recurrences, token by token in float64: what everything else is measured against. Slow on
purpose."""
from __future__ import annotations

import itertools

import torch


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
    HV, K, V]. Returns (o [B, T, HV, V], states [N, HV, K, V]) in float64. Differentiable.
    """
    q, k, v = (x.double() for x in (q, k, v))
    beta, g, gk, gv, h0 = (None if x is None else x.double() for x in (beta, g, gk, gv, h0))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    beta = torch.ones_like(v[..., :1]) if beta is None else beta if beta.ndim == 4 else beta[..., None]
    edges = None if cu_seqlens is None else cu_seqlens.tolist()
    # Packed sequences share row 0; without cu_seqlens, sequence n is row n.
    spans = [(n, 0, T) for n in range(B)] if edges is None else [(0, s, e)
                                                                 for s, e in itertools.pairwise(edges)]
    outs, states = [torch.zeros_like(v[row]) for row in range(B)], []
    for n, (row, first, end) in enumerate(spans):
        state = q.new_zeros(HV, K, V) if h0 is None else h0[n]
        seen = []
        for t in range(first, end):
            if g is not None:
                state = state * g[row, t, :, None, None].exp()
            if gk is not None:
                state = state * gk[row, t, :, :, None].exp()
            if gv is not None:
                state = state * gv[row, t, :, None, :].exp()
            u = beta[row, t] * (v[row, t] - torch.einsum("hkv,hk->hv", state, k[row, t]))
            state = state + k[row, t, :, :, None] * u[:, None, :]
            seen.append(scale * torch.einsum("hkv,hk->hv", state, q[row, t]))
        if seen:
            outs[row] = torch.cat([outs[row][:first], torch.stack(seen), outs[row][end:]])
        states.append(state)
    return torch.stack(outs) if outs else torch.zeros_like(v), torch.stack(states) if states else q.new_zeros(
        0, HV, K, V)
