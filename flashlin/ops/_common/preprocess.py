"""What the delta families do to q, k, g and beta before the recurrence, in plain differentiable torch: for
the torch path and for calls with gradients, whichever kernels follow."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.kernels.pointwise import torch_path as pointwise

L2_EPS = 1e-6


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def exact(x: Tensor, *others: Any) -> Tensor:
    """Return x in float64 if one of ``others`` is a float64 tensor, else x itself. A float64 call computes
    norms and gates in float64, whatever dtype their own tensors have."""
    for other in others:
        if isinstance(other, Tensor) and other.dtype == torch.float64:
            return x.double()
    return x


def l2normalized(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, in x's dtype. Zero rows stay zero and have a finite
    gradient."""
    full = wide(x)
    return (full * (full.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(x.dtype)


def by_value_head(x: Tensor, v: Tensor) -> Tensor:
    """x [B, T, H, K] as [B, T, HV, K], for value heads of v [B, T, HV, V]: head j is x's j // (HV / H)."""
    H, HV = x.shape[2], v.shape[2]
    return x if H == HV else x.repeat_interleave(HV // max(H, 1), 2)


def decay_of_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None, bound: float | None = None) -> Tensor:
    """The log decay [B, T, HV] or, with A_log [HV, 1], [B, T, HV, K] of a raw gate, at least float32:
    -exp(A_log) softplus(g + dt_bias), or with a bound bound sigmoid(exp(A_log) (g + dt_bias))."""
    return pointwise.gate(g, A_log, dt_bias, bound)


def beta_of_logits(beta: Tensor, allow_neg_eigval: bool) -> Tensor:
    """sigmoid(beta), twice that with allow_neg_eigval (the state's eigenvalues then reach down to -1). At
    least float32."""
    return wide(beta).sigmoid() * (2.0 if allow_neg_eigval else 1.0)


def check_gates(op: str, use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None, use_sigmoid: bool,
                allow_neg_eigval: bool) -> None:
    """The options of the gates fit together, and nothing is given that none of them reads."""
    scalars.flags(use_gate_in_kernel=use_gate, use_beta_sigmoid_in_kernel=use_sigmoid,
                  allow_neg_eigval=allow_neg_eigval)
    if not use_gate and (A_log is not None or dt_bias is not None):
        raise ValueError(f"{op}: got {'dt_bias' if A_log is None else 'A_log'} without use_gate_in_kernel, "
                         "which alone reads it")
    if allow_neg_eigval and not use_sigmoid:
        raise ValueError(f"{op}: got allow_neg_eigval without use_beta_sigmoid_in_kernel, need both (or a "
                         "beta in 0 .. 2)")
