"""A token of the state space model in plain, differentiable torch, for CPUs, float64 and cards that no Triton
compiles for."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.sequences import wide


def step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    """(y [b, H, P], state [b, H, P, N]), both in float32, or in float64 if any tensor is. Shapes as
    reference.step; nothing is written to."""
    state, x, dt, A, B, C, D, z, dt_bias = wide(state, x, dt, A, B, C, D, z, dt_bias)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if softplus else dt
    heads = x.shape[1] // max(B.shape[1], 1)
    B, C = (t.repeat_interleave(heads, 1) for t in (B, C))
    state = (dt[..., None] * A).exp() * state + (dt * x)[..., None] * B[:, :, None]
    y = (state * C[:, :, None]).sum(-1)  # a matrix product traced under autocast would be rounded
    y = y if D is None else y + D * x
    return y if z is None else y * F.silu(z), state
