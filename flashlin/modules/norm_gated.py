"""Mamba2's gated norms as modules, under fla's name and under mamba_ssm's; parameters are called as there, so
checkpoints load either way."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.modules.norm import _Affine
from flashlin.ops.norm import layernorm_fn, rmsnorm_fn


class RMSNormGated(_Affine):
    """``rmsnorm_fn`` with a weight [hidden_size]. Drop-in for ``fla.modules.layernorm_gated.RMSNormGated``,
    which gates before it normalises unless told otherwise; mamba_ssm's class
    (``flashlin.mamba.RMSNormGated``) gates after.

    eps: added to the mean of the squares. group_size: columns normalised together, all of them if None.
    norm_before_gate: norm(x) * silu(z), else norm(x * silu(z)). device, dtype: of the weight. Raises
    ValueError where group_size does not divide hidden_size.
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
        groups = "" if self.group_size is None else f", group_size={self.group_size}"
        return f"{self.hidden_size}, eps={self.eps}{groups}, norm_before_gate={self.norm_before_gate}"

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """y of x [..., hidden_size], gated by z if there is one."""
        return self._normed(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


class RMSNorm(RMSNormGated):
    """Drop-in for ``mamba_ssm.ops.triton.layernorm_gated.RMSNorm``: ``RMSNormGated`` that gates after it has
    normalised unless told otherwise."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None,
                 norm_before_gate: bool = True, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)


class LayerNorm(RMSNorm):
    """Drop-in for ``mamba_ssm.ops.triton.layernorm_gated.LayerNorm``: the same with a layer norm and a bias
    [hidden_size]."""

    _normed = staticmethod(layernorm_fn)
    _has_bias = True
