"""The norms as modules.

Parameters have the same names as in ``fla.modules``, so checkpoints load in both directions. The attribute
``_normed`` of a class is the function that its forward calls.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashlin.compat.lazy_imports import public_of
from flashlin.guards import scalars
from flashlin.ops.norm import ACTIVATIONS, group_norm, l2norm, layer_norm, layer_norm_gated, rms_norm, rms_norm_gated

Normed = Tensor | tuple[Tensor, Tensor]


class _Affine(nn.Module):
    """Base class of norms: size, weight and bias."""

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False,
                 eps: float = 1e-5, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps

        def parameter(wanted: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if wanted else None
        self.weight, self.bias = parameter(elementwise_affine), parameter(elementwise_affine and bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Return size and options for torch's printed form of the module."""
        flags = ("" if self.elementwise_affine else ", elementwise_affine=False") + ("" if self.bias is None
                                                                                     else ", bias=True")
        return f"{self.hidden_size}{flags}, eps={self.eps}"


class _Plain(_Affine):
    """Base class of norms without a gate."""

    _normed: Callable[..., Normed]

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Normed:
        """Return y, or (y, x + residual) with prenorm."""
        return self._normed(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class LayerNorm(_Plain):
    """A layer norm over the last dimension, of size hidden_size, that calls ``layer_norm``.

    Drop-in for ``fla.modules.LayerNorm``.

    elementwise_affine: False for a norm without weight and bias. If it is True, ``bias`` decides whether the
        norm has a bias. Both have the given device and dtype.
    """

    _normed = staticmethod(layer_norm)


class RMSNorm(_Plain):
    """An RMS norm over the last dimension, of size hidden_size, that calls ``rms_norm``.

    Drop-in for ``fla.modules.RMSNorm``. It has the arguments of ``LayerNorm``.
    """

    _normed = staticmethod(rms_norm)


class GroupNorm(_Plain):
    """A norm of num_groups equal slices of the last dimension, of size hidden_size, by ``group_norm``.

    Drop-in for ``fla.modules.GroupNorm``.

    is_rms_norm: use an RMS norm for each slice.
    The other arguments are the same as in ``LayerNorm``; weight and bias are [hidden_size].
    Raises ValueError if num_groups does not divide hidden_size.
    """

    def __init__(self, num_groups: int, hidden_size: int, elementwise_affine: bool = True, bias: bool = False,
                 eps: float = 1e-5, is_rms_norm: bool = False, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        if num_groups < 1 or hidden_size % num_groups:
            raise ValueError(f"num_groups: got {num_groups}, need a divisor of hidden_size = {hidden_size}")
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.num_groups, self.is_rms_norm = num_groups, is_rms_norm

    def extra_repr(self) -> str:
        """Return groups, size and options for torch's printed form of the module."""
        return f"{self.num_groups}, {super().extra_repr()}" + (", is_rms_norm=True" if self.is_rms_norm
                                                               else "")

    def _normed(self, *given: Any) -> Normed:
        return group_norm(*given, **self._groups())

    def _groups(self) -> dict[str, Any]:
        return dict(is_rms_norm=self.is_rms_norm, num_groups=self.num_groups)


class _Gated(_Affine):
    """Base class of norms with a gate and its activation."""

    _normed: Callable[..., Normed]

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False,
                 activation: str = "swish", eps: float = 1e-5, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        scalars.choice("activation", activation, ACTIVATIONS)
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.activation = activation

    def extra_repr(self) -> str:
        """Return size, options and activation for torch's printed form of the module."""
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(self, x: Tensor, g: Tensor, residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Normed:
        """Return y, or (y, x + residual) with prenorm."""
        return self._normed(x, g, self.weight, self.bias, self.activation, residual, prenorm,
                            residual_in_fp32, self.eps)


class FusedLayerNormGated(_Gated):
    """A gated layer norm over the last dimension, of size hidden_size, that calls ``layer_norm_gated``.

    Drop-in for ``fla.modules.FusedLayerNormGated``.

    activation: activation of the gate: ``swish``, ``silu`` or ``sigmoid``. Any other value raises ValueError.
    The other arguments are the same as in ``LayerNorm``.
    """

    _normed = staticmethod(layer_norm_gated)


class FusedRMSNormGated(_Gated):
    """A gated RMS norm over the last dimension, of size hidden_size, that calls ``rms_norm_gated``.

    Drop-in for ``fla.modules.FusedRMSNormGated``. It has the arguments of ``FusedLayerNormGated`` except
    bias.
    """

    _normed = staticmethod(rms_norm_gated)

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5,
                 activation: str = "swish", device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, elementwise_affine, False, activation, eps, device, dtype)


class FusedLayerNormSwishGate(FusedLayerNormGated):
    """A ``FusedLayerNormGated`` with the activation swish.

    Drop-in for ``fla.modules.FusedLayerNormSwishGate``.
    """

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False,
                 eps: float = 1e-5, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps=eps, device=device, dtype=dtype)


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """A ``FusedRMSNormGated`` with the activation swish.

    Drop-in for ``fla.modules.FusedRMSNormSwishGate``.
    """

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, device=device, dtype=dtype)


class L2Norm(nn.Module):
    """An L2 norm over the last dimension that calls ``l2norm``. Drop-in for ``fla.modules.L2Norm``."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def extra_repr(self) -> str:
        """Return the options for torch's printed form of the module."""
        return f"eps={self.eps}" + ("" if self.output_dtype is None
                                    else f", output_dtype={self.output_dtype}")

    def forward(self, x: Tensor) -> Tensor:
        """Return x with each row of its last dimension divided by the row's L2 norm.

        The result has output_dtype, or x's dtype if output_dtype is None.
        """
        return l2norm(x, self.eps, self.output_dtype)


__getattr__ = public_of(__name__)  # in fla 0.6 this module also contains the norms with linear layers
