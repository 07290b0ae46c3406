"""The norm of mamba_ssm's blocks as a module."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashlin.ops.add_norm import rms_norm_fn


class RMSNorm(nn.Module):
    """An RMS norm with a weight [hidden_size] that calls ``rms_norm_fn``.

    Drop-in for ``mamba_ssm.ops.triton.layer_norm.RMSNorm``, with the same parameter names.

    eps: added to the mean of the squares.
    dropout_p: dropout of x while the module trains.
    device, dtype: of the weight.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Any:
        """Return y, or (y, x + residual) with prenorm."""
        dropout_p = self.drop.p if self.drop is not None and self.training else 0.0
        return rms_norm_fn(x, self.weight, None, residual, eps=self.eps, dropout_p=dropout_p, prenorm=prenorm,
                           residual_in_fp32=residual_in_fp32)
