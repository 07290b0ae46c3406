"""The norms with a linear layer behind them as modules, whose parameters are the norm's; the linear layer's
come with each call, as in ``fla.modules``."""
from __future__ import annotations

import torch
from torch import Tensor

from flashlin.modules.norm import GroupNorm, LayerNorm, RMSNorm, _Affine
from flashlin.ops.norm_linear import (
    Found,
    group_norm_linear,
    layer_norm_linear,
    layer_norm_swish_gate_linear,
    rms_norm_linear,
    rms_norm_swish_gate_linear,
)


class LayerNormLinear(LayerNorm):
    """``layer_norm_linear`` with a norm of size hidden_size. Drop-in for ``fla.modules.LayerNormLinear``;
    arguments as ``LayerNorm``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,  # type: ignore[override]
                prenorm: bool = False, residual_in_fp32: bool = False) -> Found:
        """out, or with prenorm (out, x + residual); weight [E, D] and bias [E] or None are the linear
        layer's."""
        return layer_norm_linear(x, self.weight, self.bias, weight, bias, residual, self.eps, prenorm,
                                 residual_in_fp32)


class RMSNormLinear(RMSNorm):
    """``rms_norm_linear`` with a norm of size hidden_size. Drop-in for ``fla.modules.RMSNormLinear``;
    arguments as ``RMSNorm``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,  # type: ignore[override]
                prenorm: bool = False, residual_in_fp32: bool = False) -> Found:
        """out, or with prenorm (out, x + residual); weight [E, D] and bias [E] or None are the linear
        layer's."""
        return rms_norm_linear(x, self.weight, self.bias, weight, bias, residual, self.eps, prenorm,
                               residual_in_fp32)


class GroupNormLinear(GroupNorm):
    """``group_norm_linear`` with a norm of size hidden_size. Drop-in for ``fla.modules.GroupNormLinear``;
    arguments as ``GroupNorm``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,  # type: ignore[override]
                prenorm: bool = False, residual_in_fp32: bool = False) -> Found:
        """out, or with prenorm (out, x + residual); weight [E, D] and bias [E] or None are the linear
        layer's."""
        return group_norm_linear(
            x, norm_weight=self.weight, norm_bias=self.bias, linear_weight=weight, linear_bias=bias,
            residual=residual, eps=self.eps, prenorm=prenorm, residual_in_fp32=residual_in_fp32,
            is_rms_norm=self.is_rms_norm, num_groups=self.num_groups)


class _GatedLinear(_Affine):
    """A norm without bias, whose output is gated by swish."""

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)


class FusedLayerNormGatedLinear(_GatedLinear):
    """``layer_norm_swish_gate_linear`` with a norm of size hidden_size. Drop-in for
    ``fla.modules.fused_norm_gate.FusedLayerNormGatedLinear``.

    Arguments as ``LayerNorm``, but there is no bias.
    """

    def forward(self, x: Tensor, g: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
                residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Found:
        """out, or with prenorm (out, x + residual); weight [E, D], which has to be there, and bias [E] or
        None are the linear layer's."""
        return layer_norm_swish_gate_linear(
            x, g, norm_weight=self.weight, norm_bias=self.bias,
            linear_weight=weight, linear_bias=bias,  # type: ignore[arg-type]
            residual=residual, prenorm=prenorm, residual_in_fp32=residual_in_fp32, eps=self.eps)


class FusedRMSNormGatedLinear(_GatedLinear):
    """``rms_norm_swish_gate_linear`` with a norm of size hidden_size. Drop-in for
    ``fla.modules.fused_norm_gate.FusedRMSNormGatedLinear``.

    Arguments as ``FusedLayerNormGatedLinear``.
    """

    def forward(self, x: Tensor, g: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
                residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Found:
        """out, or with prenorm (out, x + residual); weight [E, D], which has to be there, and bias [E] or
        None are the linear layer's."""
        return rms_norm_swish_gate_linear(
            x, g, norm_weight=self.weight, norm_bias=self.bias,
            linear_weight=weight, linear_bias=bias,  # type: ignore[arg-type]
            residual=residual, prenorm=prenorm, residual_in_fp32=residual_in_fp32, eps=self.eps)


class FusedLayerNormSwishGateLinear(FusedLayerNormGatedLinear):
    """``FusedLayerNormGatedLinear`` by another name. Drop-in for
    ``fla.modules.FusedLayerNormSwishGateLinear``."""


class FusedRMSNormSwishGateLinear(FusedRMSNormGatedLinear):
    """``FusedRMSNormGatedLinear`` by another name. Drop-in for
    ``fla.modules.FusedRMSNormSwishGateLinear``."""
