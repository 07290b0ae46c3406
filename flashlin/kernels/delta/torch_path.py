"""The delta rules in plain, differentiable torch.

It uses chunks of 64 tokens, one triangular solve for all chunks, and a loop over chunks for the state.
torch.compile would unroll this loop. Under torch.compile it therefore runs inside a library operator
(ops/_common/chunked.py).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

from flashlin.kernels.delta.inputs import Inputs
from flashlin.kernels.sequences import chunk_length, chunks, joined, over_sequences, running_sum
from flashlin.kernels.simple_gla.torch_path import decay_between, decay_to_end, lower


def compute(x: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, HV, V] and the final states [N, HV, K, V] of a delta rule.

    They are float32, or float64 if q, k or v is float64. x.h0 is [N, HV, K, V]. The host reads the values of
    x.bounds, if given, which synchronizes with a GPU.
    """
    p, group = x.p, x.v.shape[2] // max(x.q.shape[2], 1)
    if p is not None and group > 1:
        p = p.repeat_interleave(group, 2)
    return over_sequences(_rows, (x.q, x.k, x.v, x.beta[..., None], x.g, p), x.h0, x.bounds, scale)


def _rows(h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor,
          g: torch.Tensor | None, p: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    T, length = q.shape[1], chunk_length(q.shape[1])
    before = p is not None
    q, k, v, beta, p = (chunks(x, length) for x in (q, k, v, beta, k if p is None else p))
    below, eye = lower(length, q).tril(-1), torch.eye(length, dtype=q.dtype, device=q.device)
    if g is None:
        between, total = lower(length, q).to(q.dtype), None
        into, onwards, read, apart = q, k, p, between
    else:
        g = chunks(g, length)
        from_start = running_sum(g, -1).exp()[..., None]
        between, total = decay_between(g), g.sum(-1).exp()[..., None, None]
        into, onwards = q * from_start, k * decay_to_end(g)[..., None]
        read, apart = from_start, between
        if before:  # predictions read the state one token earlier
            read, apart = (F.pad(x[..., :-1, :], (0, 0, 1, 0), value=1.0) for x in (from_start, between))
        read = p * read
    system = (p @ k.mT * apart * beta).masked_fill(~below, 0) + eye
    solved = torch.linalg.solve_triangular(system, torch.cat([v, read], -1) * beta, upper=False,
                                           unitriangular=True)
    own, pulled = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = q @ k.mT * between
    outputs = []
    for c in range(q.shape[2]):
        u = own[:, :, c] - pulled[:, :, c] @ h
        outputs.append(scores[:, :, c] @ u + into[:, :, c] @ h)
        h = (h if total is None else h * total[:, :, c]) + onwards[:, :, c].mT @ u
    return joined(torch.stack(outputs, 2), T), h
