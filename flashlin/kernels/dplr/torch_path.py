"""The delta families with a decay for each key channel in plain, differentiable torch, exact for any decay.

Scores of chunks of 64 tokens are computed by halving (``kernels/gla``). One triangular solve serves all
chunks, and a loop over chunks carries the state.

torch.compile would unroll the loop over chunks. So under torch.compile the loop runs inside a library
operator (ops/_common/chunked.py).
"""
from __future__ import annotations

import torch

from flashlin.kernels.dplr.inputs import Inputs
from flashlin.kernels.gla.torch_path import after, scores, until
from flashlin.kernels.sequences import chunk_length, chunks, joined, over_sequences, running_sum


def compute(x: Inputs, scale: float, lowest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, T, HV, V] and the final states [N, HV, K, V], in float32, or float64 for float64 tensors.

    x.h0 has the layout [N, HV, K, V]. If bounds are given, their values are read on the host. For tensors on
    a GPU this is a synchronisation.

    lowest: not used; this is exact for any decay.
    """
    beta = None if x.beta is None else x.beta[..., None]
    return over_sequences(_rows, (x.q, x.k, x.v, x.g, x.a, x.b, beta), x.h0, x.bounds, scale)


def _rows(h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
          a: torch.Tensor | None, b: torch.Tensor | None,
          beta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    T, length = q.shape[1], chunk_length(q.shape[1])
    q, k, v, g = (chunks(x, length) for x in (q, k, v, g))
    a, b, beta = (None if x is None else chunks(x, length) for x in (a, b, beta))
    into, onwards, kept = q * running_sum(g, -2).exp(), after(g).exp(), g.sum(-2).exp()[..., None]
    if a is not None and b is not None:
        nothing = torch.zeros_like(b)  # the diagonal is 0, because a token does not read its own write
        x, system = b, scores(a, b, g, nothing)
        wanted = scores(a, k, g, nothing) @ v, a * until(g, True).exp()
        inside, added = scores(q, k, g) @ v, (k * onwards).mT @ v
    else:
        rate = a if beta is None else beta
        assert rate is not None
        x, system = k, scores(-rate * k, k, g).tril(-1)
        wanted = v if beta is None else beta * v, -rate * k * running_sum(g, -2).exp()
        inside, added = None, None
    eye = torch.eye(length, dtype=q.dtype, device=q.device)
    own, pulled = torch.linalg.solve_triangular(eye - system, torch.cat(wanted, -1), upper=False,
                                                unitriangular=True).split([v.shape[-1], q.shape[-1]], -1)
    weights, onwards = scores(q, x, g), x * onwards
    outputs = []
    for c in range(q.shape[2]):
        u = own[:, :, c] + pulled[:, :, c] @ h
        o = weights[:, :, c] @ u + into[:, :, c] @ h
        h = kept[:, :, c] * h + onwards[:, :, c].mT @ u
        if inside is not None and added is not None:
            o, h = o + inside[:, :, c], h + added[:, :, c]
        outputs.append(o)
    return joined(torch.stack(outputs, 2), T), h
