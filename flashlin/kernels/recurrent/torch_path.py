"""The generic recurrence in plain, differentiable torch: a loop over tokens, for all sequences and heads.

It is used for CPUs and GPUs that Triton does not support. It is suitable for short inputs, and slow for long
ones, for which the chunked torch paths exist.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.kernels.sequences import over_sequences


def compute(x: Inputs, flags: tuple[str, ...], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence; return the outputs [B, T, HV, V] and the final states [N, HV, K, V].

    They are float32, or float64 if q, k or v is float64. x.h0 is [N, HV, K, V]. The caller has already
    applied gates, sigmoids and norms to g, beta, q and k. The host reads the values of x.bounds, if given,
    which synchronizes with a GPU.
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
    # No output reads the state after the last token. Inputs that only affect this state need a gradient of
    # zero instead of None, even if there is only one token.
    if before:
        unread = [x.flatten(2).sum(-1, keepdim=True) for x in (beta, gk, a, b, gv) if x is not None]
        unread += [] if g is None else [g[..., None]]
        outputs[-1] = outputs[-1] + torch.where(outputs[-1].new_ones(1, dtype=torch.bool), 0,
                                                sum(unread, k.new_zeros(1)))
    return torch.stack(outputs, 1), S


def _read(S: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return S^T k of each head, [B, HV, V], for S [B, HV, K, V] and k [B, HV, K]."""
    return (k[:, :, None] @ S)[:, :, 0]
