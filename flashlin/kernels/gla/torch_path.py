"""Gated linear attention and RWKV-6 in plain, differentiable torch.

Chunks of 64 tokens are halved until single tokens are left. A loop over chunks carries the state.

A score sum_c q_ic k_jc e^{g_{j+1} + ... + g_i} has its own decay in each channel (for RWKV-6 the sum ends
with g_{i-1}). So it is a product of two factors only relative to a token between j and i. Halving gives each
pair such a token: the boundary between the halves that contain i and j. Then both factors are decays, whose
exponents are sums of g that are added separately. Nothing is subtracted, divided or clamped, so no decay is
too strong, not even e^-inf.

torch.compile would unroll the loop over chunks. So under torch.compile the loop runs inside a library
operator (ops/_common/chunked.py).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

from flashlin.kernels.gla.inputs import Inputs
from flashlin.kernels.sequences import chunk_length, chunks, joined, over_sequences, running_sum


def compute(x: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, T, H, V] and the final states [N, H, K, V], in float32, or float64 for float64 tensors.

    x.h0 has the layout [N, H, K, V]. If bounds are given, their values are read on the host. For tensors on a
    GPU this is a synchronisation.
    """
    own = None if x.u is None else x.k.to(torch.promote_types(x.k.dtype, torch.float32)) * x.u
    return over_sequences(_rows, (x.q, x.k, x.v, x.g, own), x.h0, x.bounds, scale)


def _rows(h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
          own: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    T, length = q.shape[1], chunk_length(q.shape[1])
    q, k, v, g = (chunks(x, length) for x in (q, k, v, g))
    own = None if own is None else chunks(own, length)
    into, onwards, kept = q * until(g, own is not None).exp(), k * after(g).exp(), g.sum(-2).exp()[..., None]
    inside, added = scores(q, k, g, own) @ v, onwards.mT @ v
    outputs = []
    for c in range(q.shape[2]):
        outputs.append(inside[:, :, c] + into[:, :, c] @ h)
        h = kept[:, :, c] * h + added[:, :, c]
    return joined(torch.stack(outputs, 2), T), h


def scores(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor,
           own: torch.Tensor | None = None) -> torch.Tensor:
    """Return the scores [..., C, C] of a chunk of C tokens, where C is a power of two.

    For j <= i the element (i, j) is

        sum_c q_ic k_jc e^{g_{j+1} + ... + g_i}

    and for j > i it is 0. With ``own``, the sum of decays ends with g_{i-1}, and the diagonal is the product
    of q and own.

    q, k, g: [..., C, K].
    own: [..., C, K] or None.
    """
    if q.shape[-2] == 1:
        return (q * (k if own is None else own)).sum(-1, keepdim=True)
    q, k, g = (x.unflatten(-2, (2, -1)) for x in (q, k, g))
    own = None if own is None else own.unflatten(-2, (2, -1))
    reading = q[..., 1, :, :] * until(g[..., 1, :, :], own is not None).exp()
    corner = reading @ (k[..., 0, :, :] * after(g[..., 0, :, :]).exp()).mT
    halves = scores(q, k, g, own)
    return torch.cat([torch.cat([halves[..., 0, :, :], torch.zeros_like(corner)], -1),
                      torch.cat([corner, halves[..., 1, :, :]], -1)], -2)


def until(g: torch.Tensor, before: bool) -> torch.Tensor:
    """Return the sums of decays up to each token i, [..., C, K].

    The sum is g_1 + ... + g_i or, with ``before``, g_1 + ... + g_{i-1}.
    """
    return running_sum(F.pad(g[..., :-1, :], (0, 0, 1, 0)) if before else g, -2)


def after(g: torch.Tensor) -> torch.Tensor:
    """Return the sums of decays g_{j+1} + ... + g_C after each token j, [..., C, K]."""
    return running_sum(F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2), -2).flip(-2)
