"""The short convolution as a module.

It has the parameters of ``torch.nn.Conv1d``, as in ``fla.modules``, so checkpoints load in both directions.
"""
from __future__ import annotations

import warnings
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from flashlin.compat.suggestions import did_you_mean
from flashlin.guards import scalars
from flashlin.guards.tensors import check_dense, check_device, check_floats
from flashlin.ops.conv import ACTIVATIONS, BACKENDS, causal_conv1d, causal_conv1d_update


class ShortConvolution(nn.Conv1d):
    """A causal convolution of hidden_size channels with kernel_size taps that calls ``causal_conv1d``.

    Drop-in for ``fla.modules.ShortConvolution``.

    Args:
        hidden_size: number of channels D. The weight is [D, 1, W].
        kernel_size: number of taps W.
        bias: True for a bias [D].
        activation: ``silu``, also called ``swish``, or None.
        backend: accepted for compatibility. flashlin's plan selects the kernel.
        device: device of the parameters.
        dtype: dtype of the parameters.
        unknown: accepts only use_fast_conv1d, which has no effect.

    Raises ValueError for another activation or backend, TypeError for an unknown keyword.
    """

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False,
                 activation: str | None = "silu", backend: str | None = "triton",
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None,
                 **unknown: Any) -> None:
        scalars.choice("activation", activation, ACTIVATIONS, "None, 'silu' or 'swish'")
        if backend is not None:
            scalars.choice("backend", backend, BACKENDS)
        if unknown.pop("use_fast_conv1d", None) is not None:
            warnings.warn("ShortConvolution: use_fast_conv1d has no effect", DeprecationWarning, stacklevel=2)
        if unknown:
            *known, _ = signature(ShortConvolution).parameters  # without **unknown
            raise TypeError(f"ShortConvolution: got unexpected keyword {', '.join(sorted(unknown))}"
                            f"{did_you_mean(min(unknown), known)}")
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias,
                         padding=kernel_size - 1, device=device, dtype=dtype)
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def extra_repr(self) -> str:
        """Return the sizes and the activation for torch's printed form of the module."""
        return (f"{self.hidden_size}, kernel_size={self.kernel_size[0]}, bias={self.bias is not None}, "
                f"activation={self.activation}")

    @property
    def state_size(self) -> int:
        """The number of elements of one sequence's state."""
        return self.hidden_size * self.kernel_size[0]

    # mypy's override error is ignored, because forward of torch.nn.Conv1d accepts only x.
    def forward(self, x: Tensor, residual: Tensor | None = None, mask: Tensor | None = None,  # type: ignore[override]
                cache: Tensor | None = None, output_final_state: bool = False,
                cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None,
                **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return (y, state), y of x's shape [B, T, D].

        The state [N, D, W] after each sequence is returned with output_final_state, else None.

        mask: [B, T], multiplies x; not allowed together with cu_seqlens. x itself is never modified (fla
            multiplies it in place).
        cache: [N, D, W], the initial state. If gradients are off and every sequence has exactly one token, it
            is updated IN PLACE.
        options: the other arguments of ``causal_conv1d``.
        """
        check_floats("x", x, "[B, T, D]")
        output_final_state = scalars.flag("output_final_state", output_final_state)
        if cu_seqlens is not None:
            check_dense("cu_seqlens", cu_seqlens, "an int32 or int64 tensor of shape [N + 1]")
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask: got one with cu_seqlens; `mask` and `cu_seqlens` cannot be "
                                 "provided at the same time")
            check_dense("mask", mask, "a tensor of shape [B, T]")
            if mask.shape != x.shape[:2]:
                raise ValueError(f"mask: got shape {list(mask.shape)}, need [B, T] = {list(x.shape[:2])}")
            if mask.is_complex() or mask.is_quantized:
                raise TypeError(
                    f"mask: got dtype {mask.dtype}, need bool, an integer or a floating-point one")
            check_device("mask", mask, x.device, "x")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        weight = self.weight.squeeze(1)
        in_place = cache is not None and not torch.is_grad_enabled() and x.ndim == 3
        if in_place and cu_seqlens is None and x.shape[1] == 1 and not options:
            assert cache is not None  # for the type checker only
            y, state = causal_conv1d_update(x, cache, residual, weight, self.bias, self.activation)
            return y, state if output_final_state else None
        packed_tokens = in_place and cu_seqlens is not None and x.shape[1] == cu_seqlens.numel() - 1
        y, ht = causal_conv1d(x, weight, self.bias, residual, cache, output_final_state or packed_tokens,
                              self.activation, self.backend, cu_seqlens, chunk_indices=chunk_indices,
                              **options)
        # The GPU decides if each sequence has one token, so that the host need not wait for it.
        if packed_tokens:
            assert cache is not None and ht is not None and cu_seqlens is not None
            cache.copy_(torch.where((cu_seqlens.diff() == 1).all(), ht.to(cache.dtype), cache))
        return y, ht if output_final_state else None
