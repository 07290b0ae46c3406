"""Layer norm and RMS norm of what is added up first; mirrors ``mamba_ssm.ops.triton.layer_norm``.

    s = dropout(rowscale x) + dropout(x1) + residual        y = norm(s) w + b        y1 = norm(s) w1 + b1
With a residual alone it is ``layer_norm``'s own kernel; everything else is added up in torch before it.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.tensors import need_tensor
from flashlin.kernels.norm.recipe import RMS
from flashlin.kernels.sequences import widest
from flashlin.ops._common.arguments import check_optional
from flashlin.ops._common.entry import entry
from flashlin.ops.norm import Asked, Tensors, checked, kind_of, run_norm


@entry
def layer_norm_fn(
    x: Tensor,
    weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None,
    eps: float = 1e-6, dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Layer norm of each row of a sum. Drop-in for ``mamba_ssm.ops.triton.layer_norm.layer_norm_fn``.

    Args:
        x: [..., D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides and any D.
        weight, bias: [D] or None, of any float dtype.
        residual, x1: of x's shape and any float dtype, added to x in fp32.
        weight1, bias1: [D], of a second norm of the same sum; bias1 not without weight1.
        eps: added to the variance.
        dropout_p: elements of x and of x1 that are left out, each for itself, drawn by torch's generator; the
            others are divided by 1 - dropout_p.
        rowscale: [...], x's shape but for D: what each row of x is multiplied by; not together with x1.
        prenorm: also return the sum, in residual's dtype; without a residual in x's, or in fp32 with
            residual_in_fp32.
        is_rms_norm: be ``rms_norm_fn``.
        return_dropout_mask: also return what was kept of x and of x1.

    Returns:
        y in x's shape and dtype; or a tuple of y, with weight1 y1, with prenorm the sum, and with
        return_dropout_mask two bool masks, None where there is none. Gradients reach every tensor.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from mamba_ssm: rows longer than 64 KB, no rows at all and CPU tensors work; the mask of the same
    seed is another one.
    """
    asked = Asked("layer_norm", kind_of(is_rms_norm), eps, prenorm, residual_in_fp32)
    return _norm_of_sum(Tensors(x, residual, weight, bias), asked, x1, weight1, bias1, rowscale, dropout_p,
                        return_dropout_mask)


@entry
def rms_norm_fn(
    x: Tensor,
    weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None,
    eps: float = 1e-6, dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, return_dropout_mask: bool = False,
) -> Any:
    """RMS norm of each row of a sum. Drop-in for ``mamba_ssm.ops.triton.layer_norm.rms_norm_fn``.

    eps is added to the mean of the squares. The rest as ``layer_norm_fn``.
    """
    asked = Asked("rms_norm", RMS, eps, prenorm, residual_in_fp32)
    return _norm_of_sum(Tensors(x, residual, weight, bias), asked, x1, weight1, bias1, rowscale, dropout_p,
                        return_dropout_mask)


def _norm_of_sum(tensors: Tensors, asked: Asked, x1: Tensor | None, weight1: Tensor | None,
                 bias1: Tensor | None, rowscale: Tensor | None, dropout_p: Any,
                 return_dropout_mask: bool) -> Any:
    x, residual, weight, bias, _ = tensors
    scalars.flags(return_dropout_mask=return_dropout_mask)
    dropout_p = scalars.number("dropout_p", dropout_p, 0.0, 1.0, "a number from 0 to below 1")
    if dropout_p == 1.0:
        raise ValueError("dropout_p: got 1.0, need a number from 0 to below 1")
    asked = checked(tensors, asked)
    shape, D = x.shape, x.shape[-1]
    check_optional("x", x, (("x1", x1, shape, "x's shape"), ("weight1", weight1, (D,), "[D]"),
                            ("bias1", bias1, (D,), "[D]")))
    if bias1 is not None and weight1 is None:
        raise ValueError("bias1: got a tensor without weight1, need both")
    if rowscale is not None:
        need_tensor("rowscale", rowscale, shape[:-1], "x's shape but for D", x.device, "x")
        if x1 is not None:
            raise ValueError("rowscale: got a tensor together with x1, need one of them")

    mask = mask1 = None
    if dropout_p or x1 is not None or rowscale is not None:
        wide = widest(x, x1, rowscale)
        total = x.to(wide)
        if rowscale is not None:
            total = total * rowscale.to(wide)[..., None]
        total, mask = _dropped(total, dropout_p)
        if x1 is not None:
            other, mask1 = _dropped(x1.to(wide), dropout_p)
            total = total + other
        tensors = tensors._replace(x=total)
    asked = asked._replace(output_dtype=x.dtype)
    if weight1 is None:
        found = run_norm(tensors, asked)
        parts: list[Any] = [found] if isinstance(found, Tensor) else list(found)
    else:  # both of the sum as it is in fp32, which is what prenorm gives
        total = tensors.x.to(widest(*tensors))
        total = total if residual is None else total + residual.to(total.dtype)
        of_total = asked._replace(prenorm=False)
        parts = [run_norm(Tensors(total, None, *pair), of_total)
                 for pair in ((weight, bias), (weight1, bias1))]
        parts += [total][:asked.prenorm]
    if asked.prenorm:
        parts[-1] = parts[-1].to(residual.dtype if residual is not None
                                 else torch.float32 if asked.residual_in_fp32 else x.dtype)
    parts += [mask, mask1] if return_dropout_mask else []
    return parts[0] if len(parts) == 1 else tuple(parts)


def _dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """x with elements left out, and which are kept."""
    if not p:
        return x, None
    kept = torch.rand(x.shape, device=x.device) >= p
    return torch.where(kept, x / (1 - p), 0), kept
