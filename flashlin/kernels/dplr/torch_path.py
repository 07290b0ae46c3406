"""The family in plain, differentiable torch: chunks of 64 tokens, their scores by halving (kernels/gla), one
triangular solve for all of them, a loop over chunks for the state. Exact for any decay.

torch.compile would unroll the loop over chunks, so traced it runs inside of a library operator
(ops/_common/chunked.py).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

from flashlin.kernels.dplr.inputs import Inputs
from flashlin.kernels.gla.torch_path import CHUNK, after, scores, until
from flashlin.kernels.simple_gla.torch_path import packed


def run(x: Inputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, HV, V], states [N, HV, K, V]) in float32, or float64 for float64 tensors. h0 is [N, HV, K, V].

    With bounds their values are read on the host (for tensors on a GPU that is a synchronisation).
    """
    q, k, v, g, a, b, beta, h0, bounds = x
    compute = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    q, k, v, g = (x.to(compute) for x in (q * scale, k, v, g))
    a, b, beta, h0 = (None if x is None else x.to(compute) for x in (a, b, beta, h0))
    group = v.shape[2] // max(q.shape[2], 1)
    if group > 1:
        q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    tensors = (q, k, v, g, a, b, None if beta is None else beta[..., None])
    return _rows(tensors, h0) if bounds is None else packed(_rows, tensors, h0, bounds)


def _rows(tensors: tuple[torch.Tensor | None, ...],
          h: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, a, b, beta = tensors
    assert q is not None and k is not None and v is not None and g is not None
    B, T, H, K = q.shape
    V = v.shape[-1]
    h = q.new_zeros(B, H, K, V) if h is None else h
    if T == 0:  # nothing, but with gradients
        others = 1 if a is None or b is None else (a * b).sum(-1, keepdim=True)
        return v * (q * k * g).sum(-1, keepdim=True) * (others if beta is None else beta), h.clone()
    chunk = CHUNK  # shorter for short sequences, of which there may be many; a graph has one length for all
    while not torch.compiler.is_compiling() and chunk // 2 >= T:
        chunk //= 2
    short = -T % chunk

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [B, H, chunks, C, D]
        split: torch.Tensor = F.pad(x, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, chunk))
        return split.permute(0, 3, 1, 2, 4)
    q, k, v, g = chunks(q), chunks(k), chunks(v), chunks(g)
    into, onwards, kept = q * g.cumsum(-2).exp(), after(g).exp(), g.sum(-2).exp()[..., None]
    if a is not None and b is not None:
        a, b = chunks(a), chunks(b)
        nothing = torch.zeros_like(b)  # on the diagonal: a token does not read what it writes itself
        x, system = b, scores(a, b, g, nothing)
        wanted = scores(a, k, g, nothing) @ v, a * until(g, True).exp()
        inside, added = scores(q, k, g) @ v, (k * onwards).mT @ v
    else:
        assert beta is not None
        beta = chunks(beta)
        x, system = k, scores(-beta * k, k, g).tril(-1)
        wanted = beta * v, -beta * k * g.cumsum(-2).exp()
        inside, added = None, None
    eye = torch.eye(chunk, dtype=q.dtype, device=q.device)
    own, pulled = torch.linalg.solve_triangular(eye - system, torch.cat(wanted, -1), upper=False,
                                                unitriangular=True).split([V, K], -1)
    weights, onwards = scores(q, x, g), x * onwards
    outputs = []
    for c in range(q.shape[2]):
        u = own[:, :, c] + pulled[:, :, c] @ h
        o = weights[:, :, c] @ u + into[:, :, c] @ h
        h = kept[:, :, c] * h + onwards[:, :, c].mT @ u
        if inside is not None and added is not None:
            o, h = o + inside[:, :, c], h + added[:, :, c]
        outputs.append(o)
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T], h
