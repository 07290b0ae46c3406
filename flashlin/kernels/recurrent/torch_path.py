"""The generic recurrence in plain, differentiable torch: a loop over tokens, all sequences and heads at once.
Serves CPUs and cards that no Triton compiles for; right for short inputs, slow for long ones, which are what
chunked paths are for."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.kernels.sequences import over_sequences


def compute(x: Inputs, flags: tuple[str, ...], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, HV, V], states [N, HV, K, V]) in float32, or float64 for float64 tensors. h0 is [N, HV, K,
    V]; g, beta, q and k are as the recurrence wants them (no gate, sigmoid or norm is left to do).

    With bounds their values are read on the host (for tensors on a GPU that is a synchronisation).
    """
    rows = partial(_rows, gamma=x.gamma, bonus=x.bonus, delta="delta" in flags, before="before" in flags)
    beta = x.beta[..., None] if x.beta is not None and x.beta.ndim == 3 else x.beta
    return over_sequences(rows, (x.q, x.k, x.v, beta, x.g, x.gk, x.gv, x.a, x.b), x.h0, x.bounds, scale,
                          "reverse" in flags)


def _rows(S: torch.Tensor, *tensors: Any, gamma: torch.Tensor | None, bonus: torch.Tensor | None, delta: bool,
          before: bool) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = []
    for t in range(tensors[0].shape[1]):
        q, k, v = (x[:, t] for x in tensors[:3])
        beta, g, gk, gv, a, b = (None if x is None else x[:, t] for x in tensors[3:])
        if before:
            o = _read(S, q)
            o = o if bonus is None else o + (q * bonus.to(q.dtype) * k).sum(-1, keepdim=True) * v
        added = None if a is None or b is None else b[..., None] * _read(S, a)[:, :, None]
        for decay in (None if g is None else g[..., None, None],
                      None if gamma is None else gamma.to(q.dtype)[:, None, None],
                      None if gk is None else gk[..., None],
                      None if gv is None else gv[:, :, None]):
            S = S if decay is None else S * decay.exp()
        S = S if added is None else S + added
        u = v - _read(S, k) if delta else v
        u = u if beta is None else u * beta
        S = S + k[..., None] * u[:, :, None]
        outputs.append(o if before else _read(S, q))
    # nobody reads what the last token leaves: its gradient is zero, not None, also where it is the only one
    if before:
        unread = [x.flatten(2).sum(-1, keepdim=True) for x in (beta, gk, a, b, gv) if x is not None]
        unread += [] if g is None else [g[..., None]]
        outputs[-1] = outputs[-1] + torch.where(outputs[-1].new_ones(1, dtype=torch.bool), 0,
                                                sum(unread, k.new_zeros(1)))
    return torch.stack(outputs, 1), S


def _read(S: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """S^T k: [B, HV, V] of [B, HV, K, V] and [B, HV, K]."""
    return (k[:, :, None] @ S)[:, :, 0]
