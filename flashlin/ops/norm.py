"""Layer norm, RMS norm, group norm and l2 norm over the last dimension, with or without a gate.

Mirrors functions of ``fla.modules``. s is x, or x + residual, in fp32:

    y = (s - mean(s)) rsqrt(var(s) + eps) w + b        (layer norm)
    y = s rsqrt(mean(s^2) + eps) w + b                 (RMS norm)
    y = s rsqrt(sum(s^2) + eps)                        (l2 norm)

A gated norm multiplies y by g sigmoid(g) (Yang et al. 2024, GLA) or by sigmoid(g). Source: Ba et al. 2016
(layer norm), Zhang and Sennrich 2019 (RMS norm).
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
from flashlin.ops._common.casting import as_planned, contiguous, dtype_as_planned, dtypes_of, wants_grad
from flashlin.ops._common.entry import entry
from flashlin.ops._common.gradients import pulled_back
from flashlin.ops._common.operator import Gradients, Kept, Operator, kernels
from flashlin.ops._common.pipeline import call_of, parsed

ACTIVATIONS = {"swish": SWISH, "silu": SWISH, "sigmoid": SIGMOID}


@entry
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None,
               eps: float = 1e-5, prenorm: bool = False, residual_in_fp32: bool = False,
               is_rms_norm: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Return the layer norm of each row of x, or of x + residual.

    Drop-in for ``fla.modules.layernorm.layer_norm``. With s = x or x + residual in fp32, it computes

        y = (s - mean(s)) rsqrt(var(s) + eps) weight + bias

    Args:
        x: [..., D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides, any D and any
            number of rows.
        weight: [D] or None, any float dtype.
        bias: [D] or None, any float dtype.
        residual: shape of x, any float dtype; added to x in fp32.
        eps: added to the variance.
        prenorm: also return the sum s, which is the residual of the next block.
        residual_in_fp32: without a residual, return s in fp32.
        is_rms_norm: compute the RMS norm, as ``rms_norm`` does.

    Returns:
        y in the shape and dtype of x; with prenorm (y, s). s has the dtype of residual. Without a residual it
        is x, or x in fp32. Gradients reach x, weight, bias and residual, also through s; repeated runs give
        bitwise identical gradients.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        UnsupportedError: this machine cannot run the call.

    These cases work here and fail in fla: rows longer than 64 KB, inputs without rows, and CPU tensors.
    A call with another number of rows never compiles again.
    """
    return _norm(Tensors(x, residual, weight, bias),
                 Asked("layer_norm", kind_of(is_rms_norm), eps, prenorm, residual_in_fp32))


@entry
def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None,
             eps: float = 1e-5, prenorm: bool = False,
             residual_in_fp32: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Return the RMS norm of each row of x, or of x + residual.

    Drop-in for ``fla.modules.layernorm.rms_norm``. eps is added to the mean of the squares. All other
    arguments, the result and the errors are the same as in ``layer_norm``.
    """
    return _norm(Tensors(x, residual, weight, bias), Asked("rms_norm", RMS, eps, prenorm, residual_in_fp32))


@entry
def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None,
               eps: float = 1e-5, prenorm: bool = False, residual_in_fp32: bool = False,
               is_rms_norm: bool = False, num_groups: int = 1) -> Tensor | tuple[Tensor, Tensor]:
    """Return the layer norm of each of num_groups equal slices of a row, as in RetNet.

    Drop-in for ``fla.modules.layernorm.group_norm``. Unlike ``torch.nn.GroupNorm``, it normalizes each token
    separately. Source: Wu and He 2018, Sun et al. 2023.
    weight, bias: [D], for the whole row.
    is_rms_norm: compute the RMS norm of each slice.
    num_groups: the number of slices, a divisor of D.

    All other arguments, the result and the errors are the same as in ``layer_norm``.
    """
    return _norm(Tensors(x, residual, weight, bias),
                 Asked("group_norm", kind_of(is_rms_norm), eps, prenorm, residual_in_fp32, num_groups))


@entry
def rms_norm_gated(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None,
                   activation: str = "swish", residual: Tensor | None = None, prenorm: bool = False,
                   residual_in_fp32: bool = False, eps: float = 1e-6) -> Tensor | tuple[Tensor, Tensor]:
    """Return the RMS norm of x or x + residual, multiplied by a gate.

    Drop-in for ``fla.modules.fused_norm_gate.rms_norm_gated``.
    g: shape of x, any float dtype; gets a gradient. The gate is applied after weight and bias.
    activation: ``swish`` or ``silu`` multiplies by g sigmoid(g), ``sigmoid`` by sigmoid(g).
    eps: added to the mean of the squares; its default is smaller than in ``rms_norm``, as in fla.

    All other arguments, the result and the errors are the same as in ``layer_norm``.
    """
    return _norm(Tensors(x, residual, weight, bias, g),
                 Asked("rms_norm_gated", RMS, eps, prenorm, residual_in_fp32, activation=activation))


@entry
def layer_norm_gated(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None,
                     activation: str = "swish", residual: Tensor | None = None, prenorm: bool = False,
                     residual_in_fp32: bool = False, eps: float = 1e-6) -> Tensor | tuple[Tensor, Tensor]:
    """Return the layer norm of x or x + residual, multiplied by a gate.

    Drop-in for ``fla.modules.fused_norm_gate.layer_norm_gated``. The arguments are the same as in
    ``rms_norm_gated``.
    """
    return _norm(Tensors(x, residual, weight, bias, g),
                 Asked("layer_norm_gated", LAYER, eps, prenorm, residual_in_fp32, activation=activation))


@entry
def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Return each row divided by its length, ``x * rsqrt(sum(x^2) + eps)``.

    Drop-in for ``fla.modules.l2norm.l2norm``. Unlike in ``torch.nn.functional.normalize``, eps is inside the
    root, so a row of zeros gives zeros and a finite gradient.
    output_dtype: the dtype of the result; None means the dtype of x.

    x and the errors are the same as in ``layer_norm``.
    """
    if output_dtype is not None:
        check_dtype("output_dtype", output_dtype)
    return cast(Tensor, _norm(Tensors(x), Asked("l2norm", L2, eps, output_dtype=output_dtype)))


l2_norm = l2norm


@entry
def rmsnorm_fn(x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None = None,
               eps: float = 1e-6, group_size: int | None = None, norm_before_gate: bool = True) -> Tensor:
    """Return the RMS norm of each group of columns, with the gate of Mamba2 before or after the norm.

    Drop-in for ``rmsnorm_fn`` of ``mamba_ssm.ops.triton.layernorm_gated`` and
    ``fla.modules.layernorm_gated``.

    Args:
        x: [..., D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides.
        weight: [D] or None, any float dtype.
        bias: [D] or None, any float dtype.
        z: shape of x, any float dtype, or None for no gate.
        eps: added to the mean of the squares.
        group_size: the number of columns of a group, a divisor of D; None means D.
        norm_before_gate: compute norm(x) * silu(z), else norm(x * silu(z)).

    Returns:
        y in the shape and dtype of x. All arithmetic, including x * silu(z), is in float32. Gradients reach
        x, weight, bias and z. The errors are the same as in ``layer_norm``.
    """
    return mamba_norm("rmsnorm_fn", RMS, x, weight, bias, z, eps, group_size, norm_before_gate)


@entry
def layernorm_fn(x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None = None,
                 eps: float = 1e-6, group_size: int | None = None, norm_before_gate: bool = True,
                 is_rms_norm: bool = False) -> Tensor:
    """Return the layer norm of each group of columns, with the gate of Mamba2 before or after the norm.

    Drop-in for ``layernorm_fn`` of ``mamba_ssm.ops.triton.layernorm_gated`` and
    ``fla.modules.layernorm_gated``.
    is_rms_norm: compute the RMS norm of each group.

    All other arguments, the result and the errors are the same as in ``rmsnorm_fn``.
    """
    return mamba_norm("layernorm_fn", kind_of(is_rms_norm), x, weight, bias, z, eps, group_size,
                      norm_before_gate)


def mamba_norm(op: str, kind: int, x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None,
               eps: float, group_size: int | None, norm_before_gate: bool,
               dtype: torch.dtype | None = None) -> Tensor:
    """Check the arguments and return the norm of each group of columns, with the gate of Mamba2.

    The arguments are the same as in ``rmsnorm_fn``, except for these:
    op: the name of the calling op, for planning and messages.
    kind: LAYER or RMS.
    dtype: the dtype of the result; None means the dtype of x.
    """
    asked = checked(Tensors(x, None, weight, bias), Asked(op, kind, eps))
    asked = asked._replace(output_dtype=dtype or x.dtype)  # the dtype of x before the gate
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
    """The arguments of a norm other than its tensors.

    op: the name of the op.
    kind: LAYER, RMS or L2.
    eps, prenorm, residual_in_fp32: as in ``layer_norm``.
    groups: the number of slices of a row, as in ``group_norm``.
    activation: the activation of the gate, or None without a gate.
    output_dtype: the dtype of y; None means the dtype of x.
    """
    op: str
    kind: int
    eps: float
    prenorm: bool = False
    residual_in_fp32: bool = False
    groups: int = 1
    activation: str | None = None
    output_dtype: torch.dtype | None = None


def kind_of(is_rms_norm: bool) -> int:
    """Return RMS if is_rms_norm is set, else LAYER; raise an error unless it is a bool."""
    return RMS if scalars.flag("is_rms_norm", is_rms_norm) else LAYER


def _norm(given: Tensors, asked: Asked) -> Tensor | tuple[Tensor, Tensor]:
    return run_norm(given, checked(given, asked))


def run_norm(given: Tensors, asked: Asked) -> Tensor | tuple[Tensor, Tensor]:
    """Run a norm on checked tensors and return y, or (y, s) with prenorm.

    asked: the arguments as ``checked`` returns them.
    """
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
    """Return the scalar arguments of the kernels for one norm."""
    x, residual, *_ = given
    y_dtype, needs_grad = asked.output_dtype or x.dtype, wants_grad(*given)
    total_dtype = (residual.dtype if residual is not None else torch.float32 if asked.residual_in_fp32
                   else x.dtype)
    returned = asked.prenorm and (residual is not None or total_dtype != x.dtype)  # else the sum is x itself
    has_total = returned or (needs_grad and residual is not None)  # backward reads the sum
    activation = NO_GATE if asked.activation is None else ACTIVATIONS[asked.activation]
    return Scalars(asked.eps, asked.kind, activation, asked.groups, x.dtype,
                   None if residual is None else residual.dtype, y_dtype, total_dtype if has_total else None,
                   needs_grad=needs_grad, call=_call_of(given, asked, y_dtype))


def _cast(given: Tensors, how: Scalars, dot: str) -> tuple[Tensors, Scalars]:
    if dot == "native" and given.residual is None:
        return Tensors(*contiguous(*given)), how
    x, residual, weight, bias, gate = as_planned(given, dot)
    total_dtype = None if how.total_dtype is None else dtype_as_planned(how.total_dtype, dot)
    # Backward reads the sum, so it must not be rounded to a narrower dtype than x and residual have.
    if residual is not None:
        wide = torch.promote_types(x.dtype, residual.dtype)
        residual, total_dtype = residual.to(wide), None if total_dtype is None else wide
    # torch.compile of torch 2.8 cannot trace _replace.
    return Tensors(*contiguous(x, residual, weight, bias, gate)), Scalars(
        how.eps, how.kind, how.activation, how.groups, x.dtype, None if residual is None else residual.dtype,
        dtype_as_planned(how.y_dtype, dot), total_dtype, needs_grad=how.needs_grad, call=how.call)


def checked(given: Tensors, asked: Asked, weight: str = "weight", bias: str = "bias") -> Asked:
    """Check all arguments of a norm and return ``asked`` with eps as a float.

    weight, bias: the names of these tensors in error messages.
    """
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
    options = [name for name in ("residual", "weight", "bias", "gate") if getattr(given, name) is not None]
    if asked.kind == RMS and asked.op in ("layer_norm", "group_norm", "layernorm_fn"):
        options.append("is_rms_norm")
    return call_of(asked.op, {*dtypes_of(given), y_dtype}, options)


def problem_of(x: Tensors, how: Scalars) -> Problem:
    """Return the problem of one norm for planning: T rows of H groups with K columns each."""
    (op, dtype, options), D, groups = parsed(how.call), x.x.shape[-1], how.groups
    return Problem(op, "norm", "", B=1, T=x.x.numel() // (groups * D), H=groups, K=D, V=D, N=1, dtype=dtype,
                   varlen=False, needs_grad=how.needs_grad, options=options)


class Tensors(NamedTuple):
    """The tensor arguments of one norm.

    x, residual, gate: [..., D], or [..., groups, D] with groups.
    weight, bias: [groups * D].
    """
    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None


class Scalars(NamedTuple):
    """The scalar arguments of the kernels for one norm.

    eps: added to the variance, the mean of the squares or their sum.
    kind: LAYER, RMS or L2.
    activation: NO_GATE, SWISH or SIGMOID.
    groups: the number of slices of a row.
    x_dtype, residual_dtype, y_dtype: the dtypes of these tensors.
    total_dtype: the dtype of the sum x + residual, or None if neither the caller nor backward needs it.
    needs_grad: some tensor needs a gradient.
    call: the call string (op, dtype and options).
    """
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
    """The results of one norm.

    y: the normalized rows.
    total: the sum x + residual. It is an output even if only backward reads it
    (``ops/_common/gradients.py``).
    mean, rstd: the mean and 1 / standard deviation of each row, which backward reads.
    """
    y: Tensor
    total: Tensor | None
    mean: Tensor | None
    rstd: Tensor


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
    """Return the tensors that forward stores for backward.

    x is replaced by the rows that backward reads: x, the sum, or normalized rows. A bias is stored only with
    a gate.
    """
    rows = y.y if _normed(how) else x.x if x.residual is None else y.total
    return (rows, None, x.weight, None if x.gate is None else x.bias, x.gate), (None, None, y.mean, y.rstd)


def _normed(how: Scalars) -> bool:
    """Return True if backward reads normalized rows.

    An l2 norm stores y for backward, because the next op stores y anyway.
    """
    return how.kind == L2 and how.y_dtype == how.x_dtype


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
    """Return the gradients by plain torch; a bias that was not stored for backward counts as zeros."""
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
    forward=lambda plan, x, how: kernels("norm", "forward").launch_forward(
        plan, *x, how.eps, how.kind, how.activation, how.y_dtype, how.total_dtype, how.needs_grad),
    same=lambda how: {"residual": "x"} if how.residual_dtype == how.x_dtype else {},
    kept=_kept, backward=_backward, empty=_empty, all_on_torch=_all_on_torch,
    backward_on_torch=_backward_on_torch, like=_like)
