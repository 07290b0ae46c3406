"""Mamba's selective scan in plain, differentiable torch, for CPUs, float64, cards that no Triton compiles
for, and B or C without tokens."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.hgrn.torch_path import joined
from flashlin.kernels.sequences import wide

BLOCK = 64  # tokens whose states are there at once: with b, D and N they are what takes memory


def compute(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    """(y [b, D, T], the last state [b, D, N]) in float32, or float64 if a tensor is. u, delta, z [b, D, T], A
    [D, N], D, bias [D]; B, C [b, G, N, T], or [D, N] where they are the same for all tokens."""
    u, delta, A, B, C, D, z, bias = wide(u, delta, A, B, C, D, z, bias)
    u, step = u.mT, delta.mT
    step = step if bias is None else step + bias
    step = F.softplus(step) if softplus else step
    h, ys = (u[:, :0, :, None] * A).sum(1), [u[:, :0] * step[:, :0]]
    # traced, all tokens are one block: else there would be a graph for every number of blocks
    for now in [slice(None)] if torch.compiler.is_compiling() else [slice(t, t + BLOCK)
                                                                    for t in range(0, u.shape[1], BLOCK)]:
        now_B, now_C = (_of_channels(x, now, u.shape[2]) for x in (B, C))
        a = (step[:, now, :, None] * A).exp()
        states = joined(a, (step[:, now] * u[:, now])[..., None] * now_B, h)
        ys.append((states * now_C).sum(-1))
        h = states[:, -1].clone()  # and not what keeps all of them
    y = torch.cat(ys, 1)
    y = y if D is None else y + D * u
    return (y if z is None else y * F.silu(z.mT)).mT, h


def _of_channels(x: Tensor, now: slice, D: int) -> Tensor:
    """B or C as [b, T, D, N] of some tokens, or as [D, N]."""
    return x if x.ndim == 2 else x[..., now].permute(0, 3, 1, 2).repeat_interleave(D // x.shape[1], 2)
