"""Mamba2's gated norms as modules, under the names of fla and of mamba_ssm.

Parameters have the same names as in these packages, so checkpoints load in both directions.
"""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.modules.norm import _Affine
from flashlin.ops.norm import layernorm_fn, rmsnorm_fn


class RMSNormGated(_Affine):
    """A gated RMS norm with a weight [hidden_size] that calls ``rmsnorm_fn``.

    Drop-in for ``fla.modules.layernorm_gated.RMSNormGated``. By default it gates before the norm; mamba_ssm's
    class (``flashlin.mamba.RMSNormGated``) gates after it by default.

    eps: added to the mean of the squares.
    group_size: number of columns normalised together; None for all columns.
    norm_before_gate: compute norm(x) * silu(z) instead of norm(x * silu(z)).
    device, dtype: of the weight.
    Raises ValueError if group_size does not divide hidden_size.
    """

    _normed = staticmethod(rmsnorm_fn)
    _has_bias = False

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None,
                 norm_before_gate: bool = False, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        if group_size is not None and (group_size < 1 or hidden_size % group_size):
            raise ValueError(f"group_size: got {group_size}, need a divisor of hidden_size = {hidden_size}")
        super().__init__(hidden_size, True, self._has_bias, eps, device, dtype)
        self.group_size, self.norm_before_gate = group_size, norm_before_gate

    def extra_repr(self) -> str:
        """Return size and options for torch's printed form of the module."""
        groups = "" if self.group_size is None else f", group_size={self.group_size}"
        return f"{self.hidden_size}, eps={self.eps}{groups}, norm_before_gate={self.norm_before_gate}"

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the norm of x [..., hidden_size], gated by z unless z is None."""
        return self._normed(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


class RMSNorm(RMSNormGated):
    """A ``RMSNormGated`` that gates after the norm by default.

    Drop-in for ``mamba_ssm.ops.triton.layernorm_gated.RMSNorm``.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None,
                 norm_before_gate: bool = True, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)


class LayerNorm(RMSNorm):
    """A gated layer norm with weight and bias [hidden_size] that gates after the norm by default.

    Drop-in for ``mamba_ssm.ops.triton.layernorm_gated.LayerNorm``.
    """

    _normed = staticmethod(layernorm_fn)
    _has_bias = True
