"""The family in plain, differentiable torch: chunks of 64 tokens, each halved until single tokens are left, a
loop over chunks for the state.

A score sum_c q_ic k_jc e^{g_{j+1} + ... + g_i} (RWKV-6's end with g_{i-1}) has a decay of its own in every
channel, so it is a product of two factors only with a token between j and i to refer to. Halving gives each
pair one: where the halves that hold them meet. Then both factors are decays, sums of g that are added up by
themselves: nothing is subtracted, divided by or clamped, so no decay is too strong, not even e^-inf.

torch.compile would unroll the loop over chunks, so traced it runs inside of a library operator
(ops/_common/chunked.py).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

from flashlin.kernels.gla.inputs import Inputs
from flashlin.kernels.sequences import chunk_length, chunks, joined, over_sequences, running_sum


def compute(x: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, H, V], states [N, H, K, V]) in float32, or float64 for float64 tensors. h0 is [N, H, K, V].

    With bounds their values are read on the host (for tensors on a GPU that is a synchronisation).
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
    """[..., C, C]: sum_c q_ic k_jc e^{g_{j+1} + ... + g_i} for j <= i, else 0. q, k, g [..., C, K], C a power
    of two. With own [..., C, K] the sums of decays end with g_{i-1}, and the diagonal is that of q and
    own."""
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
    """g_1 + ... + g_i for each i, or with before g_1 + ... + g_{i-1}, [..., C, K]."""
    return running_sum(F.pad(g[..., :-1, :], (0, 0, 1, 0)) if before else g, -2)


def after(g: torch.Tensor) -> torch.Tensor:
    """g_{j+1} + ... + g_C for each j, [..., C, K]."""
    return running_sum(F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2), -2).flip(-2)
