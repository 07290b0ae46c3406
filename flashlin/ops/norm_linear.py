"""Norms followed by a linear layer; backward computes the normalized rows again instead of storing them.

Mirrors functions of ``fla.modules``. Without and with a gate g, they compute

    out = norm(x + residual) W^T + b
    out = (norm(x + residual) g sigmoid(g)) W^T + b
"""
from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashlin import policy
from flashlin.compat.tracing import transformed
from flashlin.guards import scalars
from flashlin.guards.tensors import need_tensor
from flashlin.kernels.norm.recipe import LAYER, RMS
from flashlin.ops._common.casting import linear_dtype, wants_grad
from flashlin.ops._common.entry import linear_entry, without_autocast
from flashlin.ops.norm import Asked, Tensors, checked, kind_of, run_norm
from flashlin.policy import Policy

Found = Tensor | tuple[Tensor, Tensor]


@linear_entry
def layer_norm_linear(x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, linear_weight: Tensor,
                      linear_bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5,
                      prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False,
                      num_groups: int = 1) -> Found:
    """Compute ``layer_norm``, or ``group_norm`` for num_groups > 1, followed by a linear layer.

    Drop-in for ``fla.modules.layernorm.layer_norm_linear``.

    Args:
        x: [..., D], bfloat16, float16, float32 or float64.
        norm_weight: [D] or None, the weight of the norm.
        norm_bias: [D] or None, the bias of the norm.
        linear_weight: [E, D]. linear_weight and linear_bias are used in the autocast dtype, or without
            autocast in the dtype of x.
        linear_bias: [E] or None.
        residual: as in ``layer_norm``.
        eps: as in ``layer_norm``.
        prenorm: also return the sum x + residual, as in ``layer_norm``.
        residual_in_fp32: as in ``layer_norm``.
        is_rms_norm: compute an RMS norm.
        num_groups: as in ``group_norm``.

    Returns:
        out [..., E] in the dtype of the linear layer; with prenorm (out, x + residual). The normalized rows
        are not stored for backward, which computes them again from x.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.
    """
    kind = kind_of(is_rms_norm)
    op = ("group_norm" if scalars.integer("num_groups", num_groups) > 1 else
          "rms_norm" if kind == RMS else "layer_norm")
    return _projected(Tensors(x, residual, norm_weight, norm_bias), linear_weight, linear_bias,
                      Asked(op, kind, eps, prenorm, residual_in_fp32, num_groups))


@linear_entry
def rms_norm_linear(x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, linear_weight: Tensor,
                    linear_bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5,
                    prenorm: bool = False, residual_in_fp32: bool = False) -> Found:
    """Compute ``rms_norm`` followed by a linear layer.

    Drop-in for ``fla.modules.layernorm.rms_norm_linear``. The arguments, results and errors are the same as
    in ``layer_norm_linear``.
    """
    return _projected(Tensors(x, residual, norm_weight, norm_bias), linear_weight, linear_bias,
                      Asked("rms_norm", RMS, eps, prenorm, residual_in_fp32))


@linear_entry
def group_norm_linear(x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, linear_weight: Tensor,
                      linear_bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5,
                      prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False,
                      num_groups: int = 1) -> Found:
    """Compute ``group_norm`` followed by a linear layer.

    Drop-in for ``fla.modules.layernorm.group_norm_linear``. The arguments, results and errors are the same as
    in ``layer_norm_linear``.
    """
    return _projected(Tensors(x, residual, norm_weight, norm_bias), linear_weight, linear_bias,
                      Asked("group_norm", kind_of(is_rms_norm), eps, prenorm, residual_in_fp32, num_groups))


@linear_entry
def layer_norm_swish_gate_linear(x: Tensor, g: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
                                 linear_weight: Tensor, linear_bias: Tensor | None,
                                 residual: Tensor | None = None, prenorm: bool = False,
                                 residual_in_fp32: bool = False, eps: float = 1e-6) -> Found:
    """Compute ``layer_norm_gated`` with a swish gate, followed by a linear layer.

    Drop-in for ``fla.modules.fused_norm_gate.layer_norm_swish_gate_linear``.
    g: shape of x, the gate.
    eps: its default is smaller than in ``layer_norm_linear``, as in fla.

    All other arguments, the results and the errors are the same as in ``layer_norm_linear``.
    """
    return _projected(Tensors(x, residual, norm_weight, norm_bias, g), linear_weight, linear_bias,
                      Asked("layer_norm_gated", LAYER, eps, prenorm, residual_in_fp32, activation="swish"))


@linear_entry
def rms_norm_swish_gate_linear(x: Tensor, g: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
                               linear_weight: Tensor, linear_bias: Tensor | None,
                               residual: Tensor | None = None, prenorm: bool = False,
                               residual_in_fp32: bool = False, eps: float = 1e-6) -> Found:
    """Compute ``rms_norm_gated`` with a swish gate, followed by a linear layer.

    Drop-in for ``fla.modules.fused_norm_gate.rms_norm_swish_gate_linear``. The arguments, results and errors
    are the same as in ``layer_norm_swish_gate_linear``.
    """
    return _projected(Tensors(x, residual, norm_weight, norm_bias, g), linear_weight, linear_bias,
                      Asked("rms_norm_gated", RMS, eps, prenorm, residual_in_fp32, activation="swish"))


def _projected(given: Tensors, linear_weight: Tensor, linear_bias: Tensor | None, asked: Asked) -> Found:
    asked, x = checked(given, asked, "norm_weight", "norm_bias"), given.x
    asked = asked._replace(output_dtype=linear_dtype(x))
    need_tensor("linear_weight", linear_weight, (None, x.shape[-1]), "[E, D]", x.device, "x")
    if linear_bias is not None:
        need_tensor("linear_bias", linear_bias, linear_weight.shape[:1], "[E]", x.device, "x")
    return _checkpointed(asked, *given, linear_weight, linear_bias)


@without_autocast
def _checkpointed(asked: Asked, *tensors: Tensor | None) -> Found:
    """Return the result of the norm and the linear layer; backward computes the norm again."""
    both = partial(_both, asked)
    if not wants_grad(*tensors) or transformed():  # torch.func cannot transform a checkpoint
        return both(*tensors)
    # The checkpoint stores only these tensors. Nothing inside it is random. Backward does not compute the
    # matrix product again, because it does not read the result.
    contexts: dict[str, Any] = {}
    if not torch.compiler.is_compiling():
        of_forward = policy.current()
        contexts["context_fn"] = lambda: (nullcontext(), _Again(of_forward))
    return cast(Found, checkpoint(both, *tensors, use_reentrant=False, preserve_rng_state=False, **contexts))


class _Again:
    """The context in which backward computes the norm again, with the policy of forward.

    With another policy, the plan and therefore the stored tensors could differ. Each backward enters the
    context once.
    """

    def __init__(self, of_forward: Policy) -> None:
        self._of_forward = of_forward

    def __enter__(self) -> None:
        self._settings = policy.settings(**self._of_forward._asdict())
        self._settings.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._settings.__exit__(*error)


def _both(asked: Asked, *tensors: Any) -> Found:
    """Return the result of the norm and the linear layer, in asked.output_dtype.

    tensors: the tensors of the norm, then the weight and bias of the linear layer.
    """
    *given, weight, bias = tensors
    dtype = asked.output_dtype
    normed = run_norm(Tensors(*given), asked)
    y, *total = normed if isinstance(normed, tuple) else (normed,)
    out = F.linear(y, weight.to(dtype), None if bias is None else bias.to(dtype))
    return (out, total[0]) if total else out
