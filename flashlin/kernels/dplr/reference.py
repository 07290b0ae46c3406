"""The recurrences of the delta rules with a decay for each key channel, in float64, from the mathematics.

Kimi Delta Attention uses the step of ``kernels/delta``. ``over_tokens`` turns a step into a recurrence and
gives the shapes of the tensors.
"""
from __future__ import annotations

from torch import Tensor

from flashlin.kernels.oracle import decayed, over_tokens, read, written


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
         gk: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the state after one token of DPLR and its output.

        S' = Diag(e^gk) S + b (a^T S) + k v^T
        o = S'^T q

    gk: decays of key channels as natural logarithms, or None.
    """
    S = decayed(S, gk) + written(b, read(S, a)) + written(k, v)
    return S, read(S, q)


def erasing_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor,
                 w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state after one token of Gated DeltaNet 2 and its output.

        D = Diag(e^g) S
        S' = D + k (w v - D^T (b k))^T
        o = S'^T q

    b: the erase rate per key channel, with the shape of g.
    w: the write rate per value channel, with the shape of v.
    """
    S = decayed(S, g)
    S = S + written(k, w * v - read(S, b * k))
    return S, read(S, q)


recurrence, erasing = over_tokens(step), over_tokens(erasing_step)
