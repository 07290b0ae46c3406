"""Mamba's selective scan in plain, differentiable torch.

It serves CPUs, float64, GPUs for which no Triton release compiles, and B or C without a token dimension.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.hgrn.torch_path import joined
from flashlin.kernels.sequences import wide

BLOCK = 64  # tokens per block; the states of one block, [b, BLOCK, D, N], take most of the memory


def compute(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
            bias: Tensor | None, softplus: bool) -> tuple[Tensor, Tensor]:
    """Return y [b, D, T] and the last state [b, D, N], in float32, or in float64 if a tensor is float64.

    u, delta, z: [b, D, T].
    A: [D, N].
    B, C: [b, G, N, T], or [D, N] if they are equal for all tokens.
    D, bias: [D].
    softplus: whether the step sizes are softplus(delta + bias) instead of delta + bias.
    """
    u, delta, A, B, C, D, z, bias = wide(u, delta, A, B, C, D, z, bias)
    u, step = u.mT, delta.mT
    step = step if bias is None else step + bias
    step = F.softplus(step) if softplus else step
    h, ys = (u[:, :0, :, None] * A).sum(1), [u[:, :0] * step[:, :0]]
    # Under torch.compile all tokens are one block; otherwise each number of blocks would need its own graph.
    for now in [slice(None)] if torch.compiler.is_compiling() else [slice(t, t + BLOCK)
                                                                    for t in range(0, u.shape[1], BLOCK)]:
        now_B, now_C = (_of_channels(x, now, u.shape[2]) for x in (B, C))
        a = (step[:, now, :, None] * A).exp()
        states = joined(a, (step[:, now] * u[:, now])[..., None] * now_B, h)
        ys.append((states * now_C).sum(-1))
        h = states[:, -1].clone()  # a view would keep the whole block of states alive
    y = torch.cat(ys, 1)
    y = y if D is None else y + D * u
    return (y if z is None else y * F.silu(z.mT)).mT, h


def _of_channels(x: Tensor, now: slice, D: int) -> Tensor:
    """Return B or C for the tokens of a slice as [b, T, D, N], or unchanged if it is [D, N].

    now: the slice of tokens.
    D: the number of channels.
    """
    return x if x.ndim == 2 else x[..., now].permute(0, 3, 1, 2).repeat_interleave(D // x.shape[1], 2)
