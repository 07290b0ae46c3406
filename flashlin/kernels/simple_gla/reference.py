"""The recurrence, token by token in float64, written from the mathematics. Slow on purpose: everything else
is checked against it."""
from __future__ import annotations

import torch


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None = None,
               gamma: torch.Tensor | None = None, h0: torch.Tensor | None = None,
               bounds: torch.Tensor | None = None, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, H, V], states [N, H, K, V]), float64 and differentiable:  S_t = e^{g_t} S_{t-1} + k_t v_t^T,
    o_t = scale S_t^T q_t.

    q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] and gamma [H] natural-log decays that add up, h0 [N, H, K,
    V]. With bounds [N + 1] the rows bounds[n] .. bounds[n + 1] of the single batch row are sequence n; rows
    outside are zero.
    """
    q, k, v = q.double(), k.double(), v.double()
    B, T, H, K = q.shape
    decay = torch.zeros(B, T, H, dtype=torch.float64, device=q.device)
    decay = decay if g is None else decay + g.double()
    decay = decay if gamma is None else decay + gamma.double()
    spans = [(b, 0, T) for b in range(B)] if bounds is None else [
        (0, first, last) for first, last in zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True)]
    rows: dict[tuple[int, int], torch.Tensor] = {}
    states = []
    for n, (b, first, last) in enumerate(spans):
        state = q.new_zeros(H, K, v.shape[-1]) if h0 is None else h0[n].double()
        for t in range(first, last):
            state = decay[b, t].exp()[:, None, None] * state + k[b, t][:, :, None] * v[b, t][:, None, :]
            rows[b, t] = scale * (q[b, t][:, :, None] * state).sum(1)
        states.append(state)
    nothing = v.new_zeros(H, v.shape[-1])
    out = [torch.stack([rows.get((b, t), nothing) for t in range(T)]) if T else v.new_zeros(0, H, v.shape[-1])
           for b in range(B)]
    empty_state = q.new_zeros(0, H, K, v.shape[-1])
    return torch.stack(out) if B else torch.zeros_like(v), torch.stack(states) if states else empty_state
