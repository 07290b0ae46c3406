"""One token of the state space model in plain, differentiable torch.

It is used for CPUs, float64 tensors, and GPUs that Triton does not support.
"""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flashlin.kernels.sequences import wide


def step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
         z: Tensor | None, dt_bias: Tensor | None, softplus: bool) -> tuple[Tensor, Tensor]:
    """Compute one token; return y [b, H, P] and the new state [b, H, P, N].

    Both are float32, or float64 if any tensor is. The shapes are as in ``step`` of reference.py. The inputs
    do not change.
    """
    state, x, dt, A, B, C, D, z, dt_bias = wide(state, x, dt, A, B, C, D, z, dt_bias)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if softplus else dt
    heads = x.shape[1] // max(B.shape[1], 1)
    B, C = (t.repeat_interleave(heads, 1) for t in (B, C))
    state = (dt[..., None] * A).exp() * state + (dt * x)[..., None] * B[:, :, None]
    y = (state * C[:, :, None]).sum(-1)  # autocast would round a matrix product in a traced graph
    y = y if D is None else y + D * x
    return y if z is None else y * F.silu(z), state
