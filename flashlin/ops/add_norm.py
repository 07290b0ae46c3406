"""Layer norm and RMS norm of a sum of tensors; mirrors ``mamba_ssm.ops.triton.layer_norm``.

    s = dropout(rowscale x) + dropout(x1) + residual        y = norm(s) w + b        y1 = norm(s) w1 + b1

The kernel of ``layer_norm`` adds the residual itself. Torch adds up all other terms before the kernel runs.
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
def layer_norm_fn(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None,
                  x1: Tensor | None = None, weight1: Tensor | None = None, bias1: Tensor | None = None,
                  eps: float = 1e-6, dropout_p: float = 0.0, rowscale: Tensor | None = None,
                  prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False,
                  return_dropout_mask: bool = False) -> Any:
    """Return the layer norm of each row of a sum of tensors.

    Drop-in for ``mamba_ssm.ops.triton.layer_norm.layer_norm_fn``. It computes

        s = dropout(rowscale x) + dropout(x1) + residual        y = norm(s) w + b        y1 = norm(s) w1 + b1

    Args:
        x: [..., D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides and any D.
        weight: [D] or None, any float dtype.
        bias: [D] or None, any float dtype.
        residual: shape of x, any float dtype; added to x in fp32.
        x1: shape of x, any float dtype; added to x in fp32.
        weight1: [D], the weight of a second norm of the same sum.
        bias1: [D], the bias of the second norm; requires weight1.
        eps: added to the variance.
        dropout_p: probability that an element of x or x1 is dropped. Torch's generator draws for x and x1
            independently. The kept elements are divided by 1 - dropout_p.
        rowscale: [...], the shape of x without D; a factor for each row of x. Not allowed together with x1.
        prenorm: also return the sum, in the dtype of residual. Without a residual the dtype is float32 if
            residual_in_fp32 is set, else the dtype of x.
        residual_in_fp32: return the sum in float32 if there is no residual.
        is_rms_norm: compute the RMS norm, as ``rms_norm_fn`` does.
        return_dropout_mask: also return the masks of the kept elements of x and x1.

    Returns:
        y in the shape and dtype of x. It is a tuple if more is requested: y, then y1 (with weight1), the sum
        (with prenorm) and two bool masks (with return_dropout_mask). A mask is None if its tensor had no
        dropout. Gradients reach every tensor.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    Differences from mamba_ssm: rows longer than 64 KB, inputs without rows and CPU tensors work. The same
    seed draws a different dropout mask.
    """
    asked = Asked("layer_norm", kind_of(is_rms_norm), eps, prenorm, residual_in_fp32)
    return _norm_of_sum(Tensors(x, residual, weight, bias), asked, x1, weight1, bias1, rowscale, dropout_p,
                        return_dropout_mask)


@entry
def rms_norm_fn(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None,
                x1: Tensor | None = None, weight1: Tensor | None = None, bias1: Tensor | None = None,
                eps: float = 1e-6, dropout_p: float = 0.0, rowscale: Tensor | None = None,
                prenorm: bool = False, residual_in_fp32: bool = False,
                return_dropout_mask: bool = False) -> Any:
    """Return the RMS norm of each row of a sum of tensors.

    Drop-in for ``mamba_ssm.ops.triton.layer_norm.rms_norm_fn``. eps is added to the mean of the squares. All
    other arguments, the result and the errors are the same as in ``layer_norm_fn``.
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
    else:
        # Both norms read the fp32 sum, which prenorm also returns.
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
    """Return x after dropout with probability p, and the mask of the kept elements (None if p is 0)."""
    if not p:
        return x, None
    kept = torch.rand(x.shape, device=x.device) >= p
    return torch.where(kept, x / (1 - p), 0), kept
