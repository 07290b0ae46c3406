"""References of the elementwise ops in float64, for tests of all implementations."""
from __future__ import annotations

import torch
from torch import Tensor


def gate(g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
         lower_bound: float | None = None) -> Tensor:
    """Return a gate, a log decay, in float64 and differentiable.

    Without and with a lower bound, the gate is:

        -exp(A_log) log(1 + exp(g + dt_bias))
        lower_bound / (1 + exp(-exp(A_log) (g + dt_bias)))

    g: [..., H, K]. A_log: H elements, or None for 0. dt_bias: H * K elements, or None for 0.
    """
    z = g.double() if dt_bias is None else g.double() + dt_bias.double().reshape(g.shape[-2:])
    rate = 1.0 if A_log is None else A_log.double().reshape(-1, 1).exp()
    if lower_bound is not None:
        return lower_bound / (1 + (-rate * z).exp())
    return -rate * torch.logaddexp(z, torch.zeros_like(z))


def gate_of_heads(g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
                  lower_bound: float | None = None) -> Tensor:
    """Return the result of ``gate`` for one gate per head: g [..., H], and a dt_bias of H elements."""
    return gate(g[..., None], A_log, dt_bias, lower_bound)[..., 0]


def mix(h: Tensor, delta: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    """Return h + delta x for each x of D elements; h, delta and the results are [..., D], in float64."""
    return tuple(h.double() + delta.double() * x.double().flatten() for x in xs)


def key(k: Tensor, a: Tensor, ka: Tensor) -> Tensor:
    """Return the key k (1 - ka) + k a ka, in which a scales the fraction ka of k.

    k, a and the result: [..., D]. ka: D elements.
    """
    k, a, ka = k.double(), a.double(), ka.double().flatten()
    return k * (1 - ka) + k * a * ka


def correction(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Return g (o + bonus) [..., H * D], where the bonus of a head is v times the sum of r k r_k over D.

    The bonus adds the effect of the current token. o, g: [..., H * D]. r, k, v: [..., H, D]. r_k: [H, D].
    """
    o, r, k, r_k, v, g = (x.double() for x in (o, r, k, r_k, v, g))
    bonus = torch.einsum("...hd,...hd,hd->...h", r, k, r_k)
    return g * (o + (bonus[..., None] * v).flatten(-2))
