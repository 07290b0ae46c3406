"""The norms as modules; parameters are called as in ``fla.modules``, so checkpoints load either way."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from flashlin.ops.norm import l2norm, layer_norm, rms_norm


class _Affine(nn.Module):
    """Size, weight and bias of a norm."""

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False, eps: float = 1e-5,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine and bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight one, bias zero."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        flags = ("" if self.elementwise_affine else ", elementwise_affine=False") + ("" if self.bias is None else ", bias=True")
        return f"{self.hidden_size}{flags}, eps={self.eps}"


class LayerNorm(_Affine):
    """``layer_norm`` over the last dimension, of size hidden_size. Drop-in for ``fla.modules.LayerNorm``.

    elementwise_affine: have a weight, and with bias a bias, of that device and dtype.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """y, or with prenorm (y, x + residual)."""
        return layer_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class RMSNorm(_Affine):
    """``rms_norm`` over the last dimension, of size hidden_size. Drop-in for ``fla.modules.RMSNorm``; arguments as ``LayerNorm``."""

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """y, or with prenorm (y, x + residual)."""
        return rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class L2Norm(nn.Module):
    """``l2norm`` over the last dimension. Drop-in for ``fla.modules.L2Norm``."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def extra_repr(self) -> str:
        return f"eps={self.eps}" + ("" if self.output_dtype is None else f", output_dtype={self.output_dtype}")

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)
