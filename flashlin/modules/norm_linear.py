"""Norms followed by a linear layer, as modules.

A module has only the parameters of its norm. Weight and bias of the linear layer are passed to each call, as
in ``fla.modules``.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashlin.modules.norm import GroupNorm, LayerNorm, RMSNorm, _Affine
from flashlin.ops import norm_linear
from flashlin.ops.norm_linear import Found


class _Linear(_Affine):
    """Base class of norms followed by a linear layer whose weight is passed to each call."""

    _with_linear: Callable[..., Found]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,
                prenorm: bool = False, residual_in_fp32: bool = False) -> Found:
        """Return the linear layer's output ``out``, or (out, x + residual) with prenorm.

        weight: [E, D] of the linear layer. bias: [E] of the linear layer, or None.
        """
        return self._with_linear(x, self.weight, self.bias, weight, bias, residual, self.eps, prenorm,
                                 residual_in_fp32)


# mypy's misc error is ignored below: forward also accepts the linear layer's tensors, unlike the base class.
class LayerNormLinear(_Linear, LayerNorm):  # type: ignore[misc]
    """A layer norm of size hidden_size followed by a linear layer, by ``layer_norm_linear``.

    Drop-in for ``fla.modules.LayerNormLinear``. It has the arguments of ``LayerNorm``.
    """

    _with_linear = staticmethod(norm_linear.layer_norm_linear)


class RMSNormLinear(_Linear, RMSNorm):  # type: ignore[misc]
    """An RMS norm of size hidden_size followed by a linear layer, by ``rms_norm_linear``.

    Drop-in for ``fla.modules.RMSNormLinear``. It has the arguments of ``RMSNorm``.
    """

    _with_linear = staticmethod(norm_linear.rms_norm_linear)


class GroupNormLinear(_Linear, GroupNorm):  # type: ignore[misc]
    """A group norm of size hidden_size followed by a linear layer, by ``group_norm_linear``.

    Drop-in for ``fla.modules.GroupNormLinear``. It has the arguments of ``GroupNorm``.
    """

    def _with_linear(self, *given: Any) -> Found:
        return norm_linear.group_norm_linear(*given, **self._groups())


class _GatedLinear(_Affine):
    """Base class of norms without bias and with a swish gate, followed by a linear layer."""

    _with_linear: Callable[..., Found]

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)

    def forward(self, x: Tensor, g: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
                residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Found:
        """Return the linear layer's output ``out``, or (out, x + residual) with prenorm.

        weight: [E, D] of the linear layer; it is required. bias: [E] of the linear layer, or None.
        """
        return self._with_linear(x, g, self.weight, self.bias, weight, bias, residual, prenorm,
                                 residual_in_fp32, eps=self.eps)


class FusedLayerNormGatedLinear(_GatedLinear):
    """A layer norm with a swish gate and a linear layer, by ``layer_norm_swish_gate_linear``.

    Drop-in for ``fla.modules.fused_norm_gate.FusedLayerNormGatedLinear``. It has the arguments of
    ``LayerNorm`` except bias.
    """

    _with_linear = staticmethod(norm_linear.layer_norm_swish_gate_linear)


class FusedRMSNormGatedLinear(_GatedLinear):
    """An RMS norm with a swish gate and a linear layer, by ``rms_norm_swish_gate_linear``.

    Drop-in for ``fla.modules.fused_norm_gate.FusedRMSNormGatedLinear``. It has the arguments of
    ``FusedLayerNormGatedLinear``.
    """

    _with_linear = staticmethod(norm_linear.rms_norm_swish_gate_linear)


class FusedLayerNormSwishGateLinear(FusedLayerNormGatedLinear):
    """Another name of ``FusedLayerNormGatedLinear``.

    Drop-in for ``fla.modules.FusedLayerNormSwishGateLinear``.
    """


class FusedRMSNormSwishGateLinear(FusedRMSNormGatedLinear):
    """Another name of ``FusedRMSNormGatedLinear``.

    Drop-in for ``fla.modules.FusedRMSNormSwishGateLinear``.
    """
