"""HGRN's step in float64, written from the mathematics. Everything else is checked against it."""
from __future__ import annotations

from torch import Tensor

from flashlin.kernels.oracle import before, token_by_token


def step(h: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """h <- e^g h + x. The output is h."""
    h = g.exp() * h + x
    return h, h


def recurrence(x: Tensor, g: Tensor, initial_state: Tensor | None = None,
               cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (all h [B, T, D], final states [N, D]). x, g [B, T, D], initial_state [N, D] or zeros.

    Tokens of no sequence are zero."""
    states = before(initial_state, x, cu_seqlens, x.shape[2])
    return token_by_token(step, {"x": x.double(), "g": g.double()}, states, cu_seqlens)
