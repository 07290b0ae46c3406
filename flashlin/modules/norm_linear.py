"""The norms with a linear layer behind them as modules, whose parameters are the norm's; the linear layer's
come with each call, as in ``fla.modules``."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class _Linear(_Affine):
    """A norm whose linear layer comes with each call."""

    _with_linear: Callable[..., Found]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,
                prenorm: bool = False, residual_in_fp32: bool = False) -> Found:
        """out, or with prenorm (out, x + residual); weight [E, D] and bias [E] or None are the linear
        layer's."""
        return self._with_linear(x, self.weight, self.bias, weight, bias, residual, self.eps, prenorm,
                                 residual_in_fp32)


# misc is ignored below: forward takes the linear layer's tensors, unlike that of the norm it inherits from
class LayerNormLinear(_Linear, LayerNorm):  # type: ignore[misc]
    """``layer_norm_linear`` with a norm of size hidden_size. Drop-in for ``fla.modules.LayerNormLinear``;
    arguments as ``LayerNorm``."""

    _with_linear = staticmethod(layer_norm_linear)


class RMSNormLinear(_Linear, RMSNorm):  # type: ignore[misc]
    """``rms_norm_linear`` with a norm of size hidden_size. Drop-in for ``fla.modules.RMSNormLinear``;
    arguments as ``RMSNorm``."""

    _with_linear = staticmethod(rms_norm_linear)


class GroupNormLinear(_Linear, GroupNorm):  # type: ignore[misc]
    """``group_norm_linear`` with a norm of size hidden_size. Drop-in for ``fla.modules.GroupNormLinear``;
    arguments as ``GroupNorm``."""

    def _with_linear(self, *given: Any) -> Found:
        return group_norm_linear(*given, **self._groups())


class _GatedLinear(_Affine):
    """A norm without bias, whose output is gated by swish."""

    _with_linear: Callable[..., Found]

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)

    def forward(self, x: Tensor, g: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
                residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Found:
        """out, or with prenorm (out, x + residual); weight [E, D], which has to be there, and bias [E] or
        None are the linear layer's."""
        return self._with_linear(x, g, self.weight, self.bias, weight, bias, residual, prenorm,
                                 residual_in_fp32, eps=self.eps)


class FusedLayerNormGatedLinear(_GatedLinear):
    """``layer_norm_swish_gate_linear`` with a norm of size hidden_size. Drop-in for
    ``fla.modules.fused_norm_gate.FusedLayerNormGatedLinear``.

    Arguments as ``LayerNorm``, but there is no bias.
    """

    _with_linear = staticmethod(layer_norm_swish_gate_linear)


class FusedRMSNormGatedLinear(_GatedLinear):
    """``rms_norm_swish_gate_linear`` with a norm of size hidden_size. Drop-in for
    ``fla.modules.fused_norm_gate.FusedRMSNormGatedLinear``.

    Arguments as ``FusedLayerNormGatedLinear``.
    """

    _with_linear = staticmethod(rms_norm_swish_gate_linear)


class FusedLayerNormSwishGateLinear(FusedLayerNormGatedLinear):
    """``FusedLayerNormGatedLinear`` by another name. Drop-in for
    ``fla.modules.FusedLayerNormSwishGateLinear``."""


class FusedRMSNormSwishGateLinear(FusedRMSNormGatedLinear):
    """``FusedRMSNormGatedLinear`` by another name. Drop-in for
    ``fla.modules.FusedRMSNormSwishGateLinear``."""
