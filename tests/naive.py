"""Slow reference for recurrences of GLA, RWKV-6 and DPLR, token by token and head by head in float64.

It shares only ``spans_of`` with the references in flashlin/kernels, because those are checked against it.
"""
from __future__ import annotations

import torch

from flashlin.kernels.oracle import spans_of


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor | None = None,
    gamma: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    bonus: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    h0: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    scale: float = 1.0,
    before: bool = False,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o [B, T, HV, V], states [N, HV, K, V]) in float64; both are differentiable.

    gla, simple GLA:  S_t = D_t(S_{t-1}) + k_t v_t^T,  o_t = scale S_t^T q_t,  D_t(S) = e^{g_t + gamma}
    Diag(e^{gk_t}) S Diag(e^{gv_t})
    rwkv6 (before):   o_t = scale (S_{t-1} + Diag(bonus) k_t v_t^T)^T q_t, with the state as above
    dplr (a and b):   S_t = D_t(S_{t-1}) + b_t (a_t^T S_{t-1}) + k_t v_t^T

    The shapes are those of kernels/recurrent/inputs.py.
    before: o reads the state before the token's update, as RWKV-6 does.
    reverse: runs from the last token of each sequence to its first.
    """
    q, k, v = (x.double() for x in (q, k, v))
    g, gamma, gk, gv, bonus, a, b, h0 = (None if x is None else x.double()
                                         for x in (g, gamma, gk, gv, bonus, a, b, h0))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    rows: dict[tuple[int, int], torch.Tensor] = {}
    states = []
    for n, (row, first, last) in enumerate(spans_of(B, T, bounds)):
        heads = []
        outputs: dict[int, list[torch.Tensor]] = {t: [] for t in range(first, last)}
        for j in range(HV):
            S = q.new_zeros(K, V) if h0 is None else h0[n, j]
            for t in reversed(range(first, last)) if reverse else range(first, last):
                r, key, value = q[row, t, j * H // HV], k[row, t, j * H // HV], v[row, t, j]
                old, S = S, S * torch.ones(K, V, dtype=torch.float64)
                if g is not None:
                    S = torch.exp(g[row, t, j]) * S
                if gamma is not None:
                    S = torch.exp(gamma[j]) * S
                if gk is not None:
                    S = torch.diag(torch.exp(gk[row, t, j])) @ S
                if gv is not None:
                    S = S @ torch.diag(torch.exp(gv[row, t, j]))
                if a is not None and b is not None:
                    S = S + torch.outer(b[row, t, j], old.T @ a[row, t, j])
                S = S + torch.outer(key, value)
                now = torch.outer(key, value) if bonus is None else torch.outer(bonus[j] * key, value)
                outputs[t].append(scale * ((old + now if bonus is not None else old).T @ r if before
                                           else S.T @ r))
            heads.append(S)
        rows.update({(row, t): torch.stack(of_heads) for t, of_heads in outputs.items() if of_heads})
        states.append(torch.stack(heads) if heads else q.new_zeros(0, K, V))
    nothing = v.new_zeros(HV, V)
    tokens = [rows.get((row, t), nothing) for row in range(B) for t in range(T)]
    o = torch.stack(tokens).view(B, T, HV, V) if tokens else torch.zeros_like(v)
    return o, torch.stack(states) if states else q.new_zeros(0, HV, K, V)
