"""The family in plain, differentiable torch: chunks of 64 tokens, one triangular solve for all of them, a
loop over chunks for the state.

torch.compile would unroll that loop, so traced it runs inside of a library operator (ops/_common/chunked.py).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

from flashlin.kernels.delta.inputs import Inputs
from flashlin.kernels.simple_gla.torch_path import decay_between, decay_to_end, lower, packed

CHUNK = 64


def run(x: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, HV, V], states [N, HV, K, V]) in float32, or float64 for float64 tensors. h0 is [N, HV, K, V].

    With bounds their values are read on the host (for tensors on a GPU that is a synchronisation).
    """
    q, k, v, beta, g, h0, bounds = x
    compute = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    group = v.shape[2] // max(q.shape[2], 1)
    q, k, v, beta = (x.to(compute) for x in (q * scale, k, v, beta))
    g, h0 = (None if x is None else x.to(compute) for x in (g, h0))
    if group > 1:
        q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    if bounds is None:
        return _rows((q, k, v, beta, g), h0)
    return packed(_rows, (q, k, v, beta, g), h0, bounds)


def _rows(tensors: tuple[torch.Tensor | None, ...],
          h: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, beta, g = tensors
    assert q is not None and k is not None and v is not None and beta is not None
    B, T, H, K = q.shape
    h = q.new_zeros(B, H, K, v.shape[-1]) if h is None else h
    if T == 0:  # nothing, but with gradients
        return v * (q * k).sum(-1, keepdim=True) * beta[..., None], h.clone()
    short = -T % CHUNK
    # [B, H, chunks, 64, D]
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)
               for x in (q, k, v))
    beta = F.pad(beta, (0, 0, 0, short)).unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2)[..., None]
    below, eye = lower(CHUNK, q).tril(-1), torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    if g is None:
        between, total = lower(CHUNK, q).to(q.dtype), None
        into, onwards = q, k
        read = k
    else:
        g = F.pad(g, (0, 0, 0, short)).unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2)
        from_start = g.cumsum(-1).exp()[..., None]
        between, total = decay_between(g), g.sum(-1).exp()[..., None, None]
        into, onwards, read = q * from_start, k * decay_to_end(g)[..., None], k * from_start
    system = (k @ k.mT * between * beta).masked_fill(~below, 0) + eye
    solved = torch.linalg.solve_triangular(system, torch.cat([v, read], -1) * beta, upper=False,
                                           unitriangular=True)
    own, pulled = solved.split([v.shape[-1], K], -1)
    scores = q @ k.mT * between
    outputs = []
    for c in range(q.shape[2]):
        u = own[:, :, c] - pulled[:, :, c] @ h
        outputs.append(scores[:, :, c] @ u + into[:, :, c] @ h)
        h = (h if total is None else h * total[:, :, c]) + onwards[:, :, c].mT @ u
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T], h
