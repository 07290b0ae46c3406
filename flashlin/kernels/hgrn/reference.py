"""Reference of HGRN's recurrence, token by token in float64, for tests of all implementations."""
from __future__ import annotations

from torch import Tensor

from flashlin.kernels.oracle import before, token_by_token


def step(h: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next state e^g h + x, and the output, which is the same."""
    h = g.exp() * h + x
    return h, h


def recurrence(x: Tensor, g: Tensor, initial_state: Tensor | None = None,
               cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the states after each token [B, T, D] and the final states [N, D].

    x, g: [B, T, D]. initial_state: [N, D], or None for zeros. Rows that belong to no sequence are zero.
    """
    states = before(initial_state, x, cu_seqlens, x.shape[2])
    return token_by_token(step, {"x": x.double(), "g": g.double()}, states, cu_seqlens)
