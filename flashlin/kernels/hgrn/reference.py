"""HGRN's step in float64, written from the mathematics. Everything else is checked against it."""
from __future__ import annotations

from torch import Tensor

from flashlin.kernels.oracle import token_by_token


def step(h: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """h <- e^g h + x. The output is h."""
    h = g.exp() * h + x
    return h, h


def recurrence(x: Tensor, g: Tensor, initial_state: Tensor | None = None,
               cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (all h [B, T, D], final states [N, D]). x, g [B, T, D], initial_state [N, D] or zeros.

    Tokens of no sequence are zero."""
    N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    h0 = x.new_zeros(N, x.shape[2]) if initial_state is None else initial_state
    return token_by_token(step, {"x": x.double(), "g": g.double()}, h0.double(), cu_seqlens)
