"""Preprocessing of q, k and beta for the delta families, in plain differentiable torch.

The torch path and calls with gradients use it before the recurrence.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin.guards import scalars

L2_EPS = 1e-6


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if x is float64."""
    return x if x.dtype == torch.float64 else x.float()


def exact(x: Tensor, *others: Any) -> Tensor:
    """Return x in float64 if one of ``others`` is a float64 tensor, else x itself.

    A float64 call computes norms and gates in float64, whatever dtype their own tensors have.
    """
    double = any(isinstance(other, Tensor) and other.dtype == torch.float64 for other in others)
    return x.double() if double else x


def l2normalized(x: Tensor) -> Tensor:
    """Return x / sqrt(sum x^2 + 1e-6) over the last dimension, in x's dtype.

    Zero rows stay zero and have a finite gradient.
    """
    full = wide(x)
    return (full * (full.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(x.dtype)


def by_value_head(x: Tensor, v: Tensor) -> Tensor:
    """Return x [B, T, H, K] repeated to [B, T, HV, K] for the value heads of v [B, T, HV, V].

    Value head j reads head j // (HV / H) of x.
    """
    H, HV = x.shape[2], v.shape[2]
    return x if H == HV else x.repeat_interleave(HV // max(H, 1), 2)


def beta_of_logits(beta: Tensor, allow_neg_eigval: bool) -> Tensor:
    """Return sigmoid(beta) in float32 or wider, doubled with allow_neg_eigval.

    With the factor 2 the eigenvalues of the state's transition reach down to -1.
    """
    return wide(beta).sigmoid() * (2.0 if allow_neg_eigval else 1.0)


def check_gates(op: str, use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None, use_sigmoid: bool,
                allow_neg_eigval: bool) -> None:
    """Raise ValueError unless the options of the gates fit together.

    A_log and dt_bias without the option that reads them are also an error.
    """
    scalars.flags(use_gate_in_kernel=use_gate, use_beta_sigmoid_in_kernel=use_sigmoid,
                  allow_neg_eigval=allow_neg_eigval)
    if not use_gate and (A_log is not None or dt_bias is not None):
        raise ValueError(f"{op}: got {'dt_bias' if A_log is None else 'A_log'} without use_gate_in_kernel, "
                         "which alone reads it")
    if allow_neg_eigval and not use_sigmoid:
        raise ValueError(f"{op}: got allow_neg_eigval without use_beta_sigmoid_in_kernel, need both (or a "
                         "beta in 0 .. 2)")
