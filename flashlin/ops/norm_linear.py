"""Norms with a linear layer behind them, whose input backward makes again instead of keeping it; mirrors the
functions of ``fla.modules``.

    out = norm(x + residual) W^T + b        or, gated, norm(x + residual) g sigmoid(g) W^T + b
"""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashlin import policy
from flashlin.guards import scalars
from flashlin.guards.tensors import need_tensor
from flashlin.kernels.norm.recipe import LAYER, RMS
from flashlin.ops import norm
from flashlin.ops._common.planned import linear_dtype, wants_grad
from flashlin.policy import Policy

Found = Tensor | tuple[Tensor, Tensor]


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Found:
    """``layer_norm`` (or ``group_norm``, for num_groups > 1) and a linear layer. Drop-in for
    ``fla.modules.layernorm.layer_norm_linear``.

    Args:
        x: [..., D], bfloat16, float16, float32 or float64. norm_weight, norm_bias: [D] or None. residual,
            eps, prenorm, residual_in_fp32, is_rms_norm, num_groups: as in ``layer_norm`` and ``group_norm``.
        linear_weight: [E, D]. linear_bias: [E] or None. They are used in the autocast dtype, or without
            autocast in x's.

    Returns:
        [..., E] in that dtype; with prenorm (out, x + residual). The normalised rows are not kept for
        backward, which makes them again from x.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.
    """
    scalars.flags(is_rms_norm=is_rms_norm)
    op = "group_norm" if scalars.integer("num_groups",
                                         num_groups) > 1 else "rms_norm" if is_rms_norm else "layer_norm"
    return _run(op, RMS if is_rms_norm else LAYER, x, residual=residual, norm_weight=norm_weight,
                norm_bias=norm_bias, linear_weight=linear_weight, linear_bias=linear_bias, eps=eps,
                prenorm=prenorm, residual_in_fp32=residual_in_fp32, groups=num_groups)


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Found:
    """``rms_norm`` and a linear layer. Drop-in for ``fla.modules.layernorm.rms_norm_linear``; arguments as
    ``layer_norm_linear``."""
    return _run("rms_norm", RMS, x, residual=residual, norm_weight=norm_weight, norm_bias=norm_bias,
                linear_weight=linear_weight, linear_bias=linear_bias, eps=eps, prenorm=prenorm,
                residual_in_fp32=residual_in_fp32)


def group_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Found:
    """``group_norm`` and a linear layer. Drop-in for ``fla.modules.layernorm.group_norm_linear``; arguments
    as ``layer_norm_linear``."""
    scalars.flags(is_rms_norm=is_rms_norm)
    return _run("group_norm", RMS if is_rms_norm else LAYER, x, residual=residual, norm_weight=norm_weight,
                norm_bias=norm_bias, linear_weight=linear_weight, linear_bias=linear_bias, eps=eps,
                prenorm=prenorm, residual_in_fp32=residual_in_fp32, groups=num_groups)


def layer_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Found:
    """``layer_norm_gated`` with swish and a linear layer. Drop-in for
    ``fla.modules.fused_norm_gate.layer_norm_swish_gate_linear``.

    g: of x's shape. eps is smaller than ``layer_norm_linear``'s, as in fla; the rest as there.
    """
    return _run("layer_norm_gated", LAYER, x, residual=residual, norm_weight=norm_weight, norm_bias=norm_bias,
                linear_weight=linear_weight, linear_bias=linear_bias, eps=eps, prenorm=prenorm,
                residual_in_fp32=residual_in_fp32, gate=g, activation="swish")


def rms_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Found:
    """``rms_norm_gated`` with swish and a linear layer. Drop-in for
    ``fla.modules.fused_norm_gate.rms_norm_swish_gate_linear``; arguments as
    ``layer_norm_swish_gate_linear``."""
    return _run("rms_norm_gated", RMS, x, residual=residual, norm_weight=norm_weight, norm_bias=norm_bias,
                linear_weight=linear_weight, linear_bias=linear_bias, eps=eps, prenorm=prenorm,
                residual_in_fp32=residual_in_fp32, gate=g, activation="swish")


def _run(
    op: str,
    kind: int,
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    *,
    groups: int = 1,
    gate: Tensor | None = None,
    activation: str | None = None,
) -> Found:
    scalars.flags(prenorm=prenorm, residual_in_fp32=residual_in_fp32)
    eps = norm.check(x, residual, norm_weight, norm_bias, eps, groups, gate, activation,
                     ("norm_weight", "norm_bias"))
    need_tensor("linear_weight", linear_weight, (None, x.shape[-1]), "[E, D]", x.device, "x")
    if linear_bias is not None:
        need_tensor("linear_bias", linear_bias, linear_weight.shape[:1], "[E]", x.device, "x")
    both = partial(_both, op, kind, eps, prenorm, residual_in_fp32, groups, activation)
    tensors = (x, residual, norm_weight, norm_bias, gate, linear_weight, linear_bias)
    if not wants_grad(*tensors):
        return both(*tensors)
    # Of what is inside only these tensors are kept; nothing random happens there, and the product is not made
    # again, since nobody needs it.
    kept: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": partial(_contexts,
                                                                                           policy.current())}
    found: Found = checkpoint(both, *tensors, use_reentrant=False, preserve_rng_state=False, **kept)
    return found


class _Again:
    """Where backward makes the norm again: by forward's policy, since planned otherwise it would not keep the
    same tensors. Entered as often as there are backwards."""

    def __init__(self, of_forward: Policy) -> None:
        self._of_forward = of_forward

    def __enter__(self) -> None:
        self._settings = policy.settings(**self._of_forward._asdict())
        self._settings.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._settings.__exit__(*error)


def _contexts(of_forward: Policy) -> tuple[AbstractContextManager[None], _Again]:
    return nullcontext(), _Again(of_forward)


def _both(
    op: str,
    kind: int,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    groups: int,
    activation: str | None,
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    gate: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
) -> Found:
    dtype = linear_dtype(x)
    y = norm.run(op, kind, x, residual, norm_weight, norm_bias, eps, prenorm, residual_in_fp32,
                 output_dtype=dtype, groups=groups, gate=gate, activation=activation)
    y, *total = y if isinstance(y, tuple) else (y,)
    out = F.linear(y, linear_weight.to(dtype), None if linear_bias is None else linear_bias.to(dtype))
    return (out, *total) if prenorm else out  # type: ignore[return-value]
