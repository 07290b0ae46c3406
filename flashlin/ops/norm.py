"""Layer norm, RMS norm, group norm and l2 norm over the last dimension, plain or gated; mirrors the functions
of ``fla.modules``.

    y = (s - mean(s)) rsqrt(var(s) + eps) w + b        y = s rsqrt(mean(s^2) + eps) w + b        y = s rsqrt(sum(s^2) + eps)
Source: Ba et al. 2016 (layer norm), Zhang and Sennrich 2019 (RMS norm). s is x, or x + residual, in fp32.
Gated, y is multiplied by g sigmoid(g) (Yang et al. 2024, GLA) or by sigmoid(g).
"""
from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import check_dtype, need_tensor
from flashlin.kernels.norm import torch_path
from flashlin.kernels.norm.recipe import L2, LAYER, NO_GATE, RMS, SIGMOID, SWISH
from flashlin.kernels.sequences import widest
from flashlin.ops._common.arguments import check_nonempty, check_optional
from flashlin.ops._common.casting import as_planned, contiguous, dtype_as_planned, wants_grad
from flashlin.ops._common.entry import entry
from flashlin.ops._common.gradients import pulled_back
from flashlin.ops._common.operator import Gradients, Kept, Operator, kernels
from flashlin.ops._common.pipeline import call_of, parsed

ACTIVATIONS = {"swish": SWISH, "silu": SWISH, "sigmoid": SIGMOID}


@entry
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None,
               eps: float = 1e-5, prenorm: bool = False, residual_in_fp32: bool = False,
               is_rms_norm: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of each row, after adding a residual if there is one. Drop-in for
    ``fla.modules.layernorm.layer_norm``.

    Args:
        x: [..., D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides, any D, any
            number of rows.
        weight, bias: [D] or None, of any float dtype.
        residual: of x's shape and any float dtype, added to x in fp32.
        eps: added to the variance.
        prenorm: also return the sum, which is what the next block adds to.
        residual_in_fp32: without a residual, return that sum in fp32.
        is_rms_norm: be ``rms_norm``.

    Returns:
        y in x's shape and dtype; with prenorm (y, sum). The sum has residual's dtype; without a residual it
        is x, or x in fp32. Gradients reach x, weight, bias and residual, also through the sum, and repeat to
        the bit.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot
            run the call.

    Differs from fla where fla fails: rows longer than 64 KB, no rows at all, CPU tensors; and a new number of
    rows never recompiles.
    """
    return _norm(Tensors(x, residual, weight, bias),
                 Asked("layer_norm", kind_of(is_rms_norm), eps, prenorm, residual_in_fp32))


@entry
def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None,
             eps: float = 1e-5, prenorm: bool = False,
             residual_in_fp32: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of each row, after adding a residual if there is one. Drop-in for
    ``fla.modules.layernorm.rms_norm``.

    eps is added to the mean of the squares. The rest as ``layer_norm``.
    """
    return _norm(Tensors(x, residual, weight, bias), Asked("rms_norm", RMS, eps, prenorm, residual_in_fp32))


@entry
def group_norm(
    x: Tensor,
    weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of each of num_groups equal slices of a row, as RetNet has it. Drop-in for
    ``fla.modules.layernorm.group_norm``.

    weight, bias: [D], of the whole row. is_rms_norm: an RMS norm of each slice. num_groups: divides D. The
    rest as ``layer_norm``. Unlike ``torch.nn.GroupNorm``, tokens are normalised one by one. Source: Wu and He
    2018, Sun et al. 2023.
    """
    return _norm(Tensors(x, residual, weight, bias),
                 Asked("group_norm", kind_of(is_rms_norm), eps, prenorm, residual_in_fp32, num_groups))


@entry
def rms_norm_gated(
    x: Tensor, g: Tensor,
    weight: Tensor | None, bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of x + residual, multiplied by a gate. Drop-in for
    ``fla.modules.fused_norm_gate.rms_norm_gated``.

    g: of x's shape and any float dtype; gets a gradient. activation: ``swish`` or ``silu`` multiply by g
    sigmoid(g), ``sigmoid`` by sigmoid(g). The gate comes after weight and bias. eps is smaller than
    ``rms_norm``'s, as in fla. The rest as ``layer_norm``.
    """
    return _norm(Tensors(x, residual, weight, bias, g),
                 Asked("rms_norm_gated", RMS, eps, prenorm, residual_in_fp32, activation=activation))


@entry
def layer_norm_gated(
    x: Tensor, g: Tensor,
    weight: Tensor | None, bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of x + residual, multiplied by a gate. Drop-in for
    ``fla.modules.fused_norm_gate.layer_norm_gated``.

    Arguments as ``rms_norm_gated``.
    """
    return _norm(Tensors(x, residual, weight, bias, g),
                 Asked("layer_norm_gated", LAYER, eps, prenorm, residual_in_fp32, activation=activation))


@entry
def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Each row divided by its length, ``x * rsqrt(sum(x^2) + eps)``. Drop-in for
    ``fla.modules.l2norm.l2norm``.

    eps is inside the root (unlike ``torch.nn.functional.normalize``), so a row of zeros gives zeros and a
    finite gradient. output_dtype: of the result, x's if None. x and errors as ``layer_norm``.
    """
    if output_dtype is not None:
        check_dtype("output_dtype", output_dtype)
    return cast(Tensor, _norm(Tensors(x), Asked("l2norm", L2, eps, output_dtype=output_dtype)))


l2_norm = l2norm


@entry
def rmsnorm_fn(x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None = None,
               eps: float = 1e-6, group_size: int | None = None, norm_before_gate: bool = True) -> Tensor:
    """RMS norm of each group_size columns of a row, and Mamba2's gate before or after it. Drop-in for
    ``rmsnorm_fn`` of ``mamba_ssm.ops.triton.layernorm_gated`` and ``fla.modules.layernorm_gated``.

    Args:
        x: [..., D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. weight, bias:
            [D] or None, of any float dtype.
        z: of x's shape and any float dtype, or None for no gate.
        group_size: a divisor of D; None means D. norm_before_gate: norm(x) * silu(z), else norm(x * silu(z)).

    Returns:
        y in x's shape and dtype. Arithmetic is in float32, x * silu(z) included; gradients reach x, weight,
        bias and z. Errors as ``layer_norm``.
    """
    return mamba_norm("rmsnorm_fn", RMS, x, weight, bias, z, eps, group_size, norm_before_gate)


@entry
def layernorm_fn(x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None = None,
                 eps: float = 1e-6, group_size: int | None = None, norm_before_gate: bool = True,
                 is_rms_norm: bool = False) -> Tensor:
    """``rmsnorm_fn`` with a layer norm of each group, unless is_rms_norm. Drop-in for ``layernorm_fn`` of the
    same modules."""
    return mamba_norm("layernorm_fn", kind_of(is_rms_norm), x, weight, bias, z, eps, group_size,
                      norm_before_gate)


def mamba_norm(
    op: str,
    kind: int,
    x: Tensor,
    weight: Tensor | None, bias: Tensor | None, z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y in that dtype, x's if None."""
    asked = checked(Tensors(x, None, weight, bias), Asked(op, kind, eps))
    asked = asked._replace(output_dtype=dtype or x.dtype)  # x's own, before a gate widens it
    scalars.flags(norm_before_gate=norm_before_gate)
    D = x.shape[-1]
    size = D if group_size is None else scalars.integer("group_size", group_size, 1, f"a divisor of D = {D}")
    if D % size:
        raise ValueError(f"group_size: got {group_size}, need a divisor of D = {D}")
    gate = None
    if z is not None:
        need_tensor("z", z, x.shape, "x's shape", x.device, "x")
        if norm_before_gate:
            gate, asked = z, asked._replace(activation="silu")
        else:
            wide = widest(x, z)
            x = x.to(wide) * F.silu(z.to(wide))
    return cast(Tensor, run_norm(Tensors(x, None, weight, bias, gate), asked._replace(groups=D // size)))


class Asked(NamedTuple):
    """What a norm is asked for beside its tensors. kind: of the kernels. activation: of the gate, where there
    is one. output_dtype: of y, x's if None. The others as in ``group_norm``."""
    op: str
    kind: int
    eps: float
    prenorm: bool = False
    residual_in_fp32: bool = False
    groups: int = 1
    activation: str | None = None
    output_dtype: torch.dtype | None = None


def kind_of(is_rms_norm: bool) -> int:
    return RMS if scalars.flag("is_rms_norm", is_rms_norm) else LAYER


def _norm(given: Tensors, asked: Asked) -> Tensor | tuple[Tensor, Tensor]:
    return run_norm(given, checked(given, asked))


def run_norm(given: Tensors, asked: Asked) -> Tensor | tuple[Tensor, Tensor]:
    """Return what an op of the family makes of checked tensors."""
    x, residual, weight, bias, gate = given
    groups, shape, how = asked.groups, x.shape, scalars_of(given, asked)
    if groups > 1:
        x = x.unflatten(-1, (groups, -1))
        residual, gate = (None if t is None else t.unflatten(-1, (groups, -1)) for t in (residual, gate))
    y, total = OPERATOR.run_planned(Tensors(x, residual, weight, bias, gate), how)
    normed: Tensor = y.to(how.y_dtype).reshape(shape)
    if not asked.prenorm:
        return normed
    return normed, given.x if how.total_dtype is None else total.to(how.total_dtype).reshape(shape)


def scalars_of(given: Tensors, asked: Asked) -> Scalars:
    """Return the scalars that the kernels take."""
    x, residual, *_ = given
    y_dtype, needs_grad = asked.output_dtype or x.dtype, wants_grad(*given)
    total_dtype = (residual.dtype if residual is not None else torch.float32 if asked.residual_in_fp32
                   else x.dtype)
    returned = asked.prenorm and (residual is not None or total_dtype != x.dtype)  # else it is x itself
    has_total = returned or (needs_grad and residual is not None)  # backward reads it
    activation = NO_GATE if asked.activation is None else ACTIVATIONS[asked.activation]
    return Scalars(asked.eps, asked.kind, activation, asked.groups, x.dtype,
                   None if residual is None else residual.dtype, y_dtype, total_dtype if has_total else None,
                   needs_grad=needs_grad, call=_call_of(given, asked, y_dtype))


def _cast(given: Tensors, how: Scalars, dot: str) -> tuple[Tensors, Scalars]:
    if dot == "native" and given.residual is None:
        return Tensors(*contiguous(*given)), how
    x, residual, weight, bias, gate = as_planned(given, dot)
    total_dtype = None if how.total_dtype is None else dtype_as_planned(how.total_dtype, dot)
    # the sum is kept for backward, so it must not be rounded more coarsely than x and residual are
    if residual is not None:
        wide = torch.promote_types(x.dtype, residual.dtype)
        residual, total_dtype = residual.to(wide), None if total_dtype is None else wide
    # torch 2.8's compiler cannot trace _replace
    return Tensors(*contiguous(x, residual, weight, bias, gate)), Scalars(
        how.eps, how.kind, how.activation, how.groups, x.dtype, None if residual is None else residual.dtype,
        dtype_as_planned(how.y_dtype, dot), total_dtype, needs_grad=how.needs_grad, call=how.call)


def checked(given: Tensors, asked: Asked, weight: str = "weight", bias: str = "bias") -> Asked:
    """What is asked for, eps as a float. weight, bias: what they are called."""
    scalars.flag("prenorm", asked.prenorm)
    scalars.flag("residual_in_fp32", asked.residual_in_fp32)
    x, activation = given.x, asked.activation
    check_nonempty("x", x, "[..., D]", ())
    D, shape = x.shape[-1], x.shape
    check_optional("x", x, ((weight, given.weight, (D,), "[D]"), (bias, given.bias, (D,), "[D]"),
                            ("residual", given.residual, shape, "x's shape")))
    if activation is not None:
        need_tensor("g", given.gate, shape, "x's shape", x.device, "x")
    if D % scalars.integer("num_groups", asked.groups, 1, f"a divisor of D = {D}"):
        raise ValueError(f"num_groups: got {asked.groups}, need a divisor of D = {D}")
    if activation is not None:
        scalars.choice("activation", activation, ACTIVATIONS)
    eps = scalars.number("eps", asked.eps, 0.0, need="a number of at least 0")
    return asked if eps is asked.eps else asked._replace(eps=eps)


def _call_of(given: Tensors, asked: Asked, y_dtype: torch.dtype) -> str:
    dtypes, options = {y_dtype, given.x.dtype}, []
    for name in ("residual", "weight", "bias", "gate"):
        x = getattr(given, name)
        if x is not None:
            dtypes.add(x.dtype)
            options.append(name)
    if asked.kind == RMS and asked.op in ("layer_norm", "group_norm", "layernorm_fn"):
        options.append("is_rms_norm")
    return call_of(asked.op, dtypes, options)


def problem_of(x: Tensors, how: Scalars) -> Problem:
    (op, dtype, options), D, groups = parsed(how.call), x.x.shape[-1], how.groups
    return Problem(op, "norm", "", B=1, T=x.x.numel() // (groups * D), H=groups, K=D, V=D, N=1, dtype=dtype,
                   varlen=False, needs_grad=how.needs_grad, options=options)


class Tensors(NamedTuple):
    """x, residual and gate [..., D] or, with groups, [..., groups, D]; weight, bias [groups * D]."""
    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None


class Scalars(NamedTuple):
    """activation: of the gate. The dtypes are those of the tensors; total_dtype is None if nobody wants the
    sum."""
    eps: float
    kind: int
    activation: int
    groups: int
    x_dtype: torch.dtype
    residual_dtype: torch.dtype | None
    y_dtype: torch.dtype
    total_dtype: torch.dtype | None
    needs_grad: bool
    call: str


class Outputs(NamedTuple):
    """total is returned even where only backward wants it: see ops/_common/gradients.py."""
    y: Tensor
    total: Tensor | None
    mean: Tensor | None
    rstd: Tensor


def _forward(plan: Plan, x: Tensors, how: Scalars) -> Any:
    return kernels("norm", "forward").launch_forward(plan, *x, how.eps, how.kind, how.activation, how.y_dtype,
                                          how.total_dtype, how.needs_grad)


def _on_torch(x: Tensors, how: Scalars) -> tuple[Tensor, Tensor]:
    return torch_path.compute(*x, how.eps, how.kind, how.activation, how.groups)


def _all_on_torch(x: Tensors, how: Scalars) -> Any:
    y, s = _on_torch(x, how)
    return y, s, *torch_path.statistics(s, how.eps, how.kind)[1:]


def _empty(x: Tensors, how: Scalars) -> Any:
    rows = x.x.shape[:-1]
    return (torch.empty_like(x.x, dtype=how.y_dtype),
            None if how.total_dtype is None else torch.empty_like(x.x, dtype=how.total_dtype),
            x.x.new_empty(rows, dtype=torch.float32) if how.needs_grad and how.kind == LAYER else None,
            x.x.new_empty(rows, dtype=torch.float32) if how.needs_grad else None)


def _kept(x: Tensors, y: Outputs, how: Scalars) -> Kept:
    """In x's place the rows that backward reads: x, or the sum, or normalised ones. A bias only matters to a
    gate."""
    rows = y.y if _normed(how) else x.x if x.residual is None else y.total
    return (rows, None, x.weight, None if x.gate is None else x.bias, x.gate), (None, None, y.mean, y.rstd)


def _normed(how: Scalars) -> bool:
    """Whether backward reads rows that are normalised already: an l2 norm keeps y, which the next op keeps
    anyway."""
    return how.kind == L2 and how.y_dtype == how.x_dtype


def _same(how: Scalars) -> dict[str, str]:
    return {"residual": "x"} if how.residual_dtype == how.x_dtype else {}


def _backward(plan: Plan, x: Tensors, y: Outputs, grads: Outputs, how: Scalars,
              wanted: frozenset[str]) -> Gradients:
    if grads.y is None:
        return {"x": grads.total, "residual": grads.total, "weight": None, "bias": None, "gate": None}
    dx, dresidual, dgate, dweight, dbias = kernels("norm", "backward").launch_backward(
        plan, x.x, x.weight, bias=x.bias, gate=x.gate, mean=y.mean, rstd=y.rstd, dy=grads.y.contiguous(),
        dtotal=None if grads.total is None else grads.total.contiguous(), kind=how.kind,
        activation=how.activation, normed=_normed(how), dx_dtype=how.x_dtype,
        dresidual_dtype=how.residual_dtype if "residual" in wanted else None,
        needs_dweight="weight" in wanted, needs_dbias="bias" in wanted)
    return {"x": dx, "residual": dresidual, "weight": dweight, "bias": dbias, "gate": dgate}


def _backward_on_torch(x: Tensors, y: Outputs, grads: Outputs, how: Scalars,
                       wanted: frozenset[str]) -> Gradients:
    """A bias that backward has no use for is not there; its gradient is that of zeros."""
    zeros = x.x.new_zeros(x.x.shape[-1] * how.groups, dtype=torch.float32)
    s = x._replace(x=x.x.float() / y.rstd[..., None] if _normed(how) else x.x.float(),
                   weight=zeros + 1 if x.weight is None else x.weight.float(),
                   bias=zeros if x.bias is None else x.bias.float())
    gradients = pulled_back(lambda s: _on_torch(s, how), s, wanted - {"residual"} | {"x"}, grads[:2])
    return {**gradients, "residual": gradients["x"]}


def _like(x: Tensors, how: Scalars, name: str) -> Tensor:
    if name in ("weight", "bias"):
        return x.x.new_empty(x.x.shape[-1] * how.groups, dtype=torch.float32)
    if x.gate is not None and name == "gate":
        return x.gate
    return torch.empty_like(x.x, dtype=how.x_dtype if name == "x" else how.residual_dtype)


OPERATOR = Operator(
    "norm", Tensors, Scalars, Outputs, 2, family="norm", problem=problem_of, on_torch=_on_torch, cast=_cast,
    forward=_forward, kept=_kept, backward=_backward, same=_same,
    empty=_empty, all_on_torch=_all_on_torch, backward_on_torch=_backward_on_torch, like=_like)
