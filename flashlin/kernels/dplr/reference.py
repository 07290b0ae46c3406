"""The steps of the delta rules with a decay for each key channel, in float64, written from the mathematics.
Kimi Delta Attention uses the step of ``kernels/delta``. ``over_tokens`` names the shapes."""
from __future__ import annotations

from torch import Tensor

from flashlin.kernels.oracle import decayed, over_tokens, read, written


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
         gk: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S <- Diag(e^gk) S + b (a^T S) + k v^T, o = S^T q."""
    S = decayed(S, gk) + written(b, read(S, a)) + written(k, v)
    return S, read(S, q)


def erasing_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor,
                 w: Tensor) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet 2: S' = Diag(e^g) S, S = S' + k (w v - S'^T (b k))^T, o = S^T q; b like g, w like v."""
    S = decayed(S, g)
    S = S + written(k, w * v - read(S, b * k))
    return S, read(S, q)


recurrence, erasing = over_tokens(step), over_tokens(erasing_step)
