"""Layer norm, RMS norm, group norm and l2 norm over the last dimension, plain or gated; mirrors the functions
of ``fla.modules``.

    y = (s - mean(s)) rsqrt(var(s) + eps) w + b        y = s rsqrt(mean(s^2) + eps) w + b        y = s rsqrt(sum(s^2) + eps)
Source: Ba et al. 2016 (layer norm), Zhang and Sennrich 2019 (RMS norm). s is x, or x + residual, in fp32.
Gated, y is multiplied by g sigmoid(g) (Yang et al. 2024, GLA) or by sigmoid(g).
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_dtype, check_floats, need_tensor, shown
from flashlin.kernels.norm import torch_path
from flashlin.kernels.norm.recipe import L2, LAYER, NO_GATE, RMS, SIGMOID, SWISH
from flashlin.ops._common.gradients import pulled_back
from flashlin.ops._common.operator import Gradients, Kept, Operator, Traced, kernels
from flashlin.ops._common.planned import as_planned, constant_while_tracing, dtype_as_planned, name_of, planned, wants_grad

ACTIVATIONS = {"swish": SWISH, "silu": SWISH, "sigmoid": SIGMOID}
# the dtype that machines have most to say about first
STRICTEST = (torch.float64, torch.bfloat16, torch.float16, torch.float32)


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
    scalars.flags(is_rms_norm=is_rms_norm)
    return _run("layer_norm", RMS if is_rms_norm else LAYER, x, residual, weight, bias, eps, prenorm,
                residual_in_fp32)


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None,
             eps: float = 1e-5, prenorm: bool = False,
             residual_in_fp32: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of each row, after adding a residual if there is one. Drop-in for
    ``fla.modules.layernorm.rms_norm``.

    eps is added to the mean of the squares. The rest as ``layer_norm``.
    """
    return _run("rms_norm", RMS, x, residual, weight, bias, eps, prenorm, residual_in_fp32)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of each of num_groups equal slices of a row, as RetNet has it. Drop-in for
    ``fla.modules.layernorm.group_norm``.

    weight, bias: [D], of the whole row. is_rms_norm: an RMS norm of each slice. num_groups: divides D. The
    rest as ``layer_norm``. Unlike ``torch.nn.GroupNorm``, tokens are normalised one by one. Source: Wu and He
    2018, Sun et al. 2023.
    """
    scalars.flags(is_rms_norm=is_rms_norm)
    return _run("group_norm", RMS if is_rms_norm else LAYER, x, residual, weight, bias, eps, prenorm,
                residual_in_fp32, groups=num_groups)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of x + residual, multiplied by a gate. Drop-in for
    ``fla.modules.fused_norm_gate.rms_norm_gated``.

    g: of x's shape and any float dtype; gets a gradient. activation: ``swish`` or ``silu`` multiply by g
    sigmoid(g), ``sigmoid`` by sigmoid(g). The gate comes after weight and bias. eps is smaller than
    ``rms_norm``'s, as in fla. The rest as ``layer_norm``.
    """
    return _run("rms_norm_gated", RMS, x, residual, weight, bias, eps, prenorm, residual_in_fp32, gate=g,
                activation=activation)


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of x + residual, multiplied by a gate. Drop-in for
    ``fla.modules.fused_norm_gate.layer_norm_gated``.

    Arguments as ``rms_norm_gated``.
    """
    return _run("layer_norm_gated", LAYER, x, residual, weight, bias, eps, prenorm, residual_in_fp32, gate=g,
                activation=activation)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Each row divided by its length, ``x * rsqrt(sum(x^2) + eps)``. Drop-in for
    ``fla.modules.l2norm.l2norm``.

    eps is inside the root (unlike ``torch.nn.functional.normalize``), so a row of zeros gives zeros and a
    finite gradient. output_dtype: of the result, x's if None. x and errors as ``layer_norm``.
    """
    if output_dtype is not None:
        check_dtype("output_dtype", output_dtype)
    y = _run("l2norm", L2, x, None, None, None, eps, False, False, output_dtype=output_dtype)
    assert isinstance(y, Tensor)  # for the type checker: only prenorm gives two
    return y


l2_norm = l2norm


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


def layernorm_fn(x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None = None,
                 eps: float = 1e-6, group_size: int | None = None, norm_before_gate: bool = True,
                 is_rms_norm: bool = False) -> Tensor:
    """``rmsnorm_fn`` with a layer norm of each group, unless is_rms_norm. Drop-in for ``layernorm_fn`` of the
    same modules."""
    scalars.flags(is_rms_norm=is_rms_norm)
    return mamba_norm("layernorm_fn", RMS if is_rms_norm else LAYER, x, weight, bias, z, eps, group_size,
                      norm_before_gate)


def mamba_norm(
    op: str,
    kind: int,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y in that dtype, x's if None."""
    eps = check(x, None, weight, bias, eps, 1, None, None)
    scalars.flags(norm_before_gate=norm_before_gate)
    D, dtype = x.shape[-1], dtype or x.dtype
    size = D if group_size is None else scalars.integer("group_size", group_size, 1, f"a divisor of D = {D}")
    if D % size:
        raise ValueError(f"group_size: got {group_size}, need a divisor of D = {D}")
    gate = z if norm_before_gate else None
    if z is not None:
        need_tensor("z", z, tuple(x.shape), "x's shape", x.device, "x")
        if not norm_before_gate:
            wide = torch.float64 if torch.float64 in (x.dtype, z.dtype) else torch.float32
            x = x.to(wide) * F.silu(z.to(wide))
    y = _run(op, kind, x, None, weight, bias, eps, False, False, output_dtype=dtype, groups=D // size,
             gate=gate, activation=None if gate is None else "silu")
    assert isinstance(y, Tensor)  # for the type checker: only prenorm gives two
    return y


def _run(
    op: str,
    kind: int,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    *,
    output_dtype: torch.dtype | None = None,
    groups: int = 1,
    gate: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    scalars.flags(prenorm=prenorm, residual_in_fp32=residual_in_fp32)
    eps = check(x, residual, weight, bias, eps, groups, gate, activation)
    return run(op, kind, x, residual, weight, bias, eps, prenorm, residual_in_fp32, output_dtype=output_dtype,
               groups=groups, gate=gate, activation=activation)


def run(
    op: str,
    kind: int,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    *,
    output_dtype: torch.dtype | None = None,
    groups: int = 1,
    gate: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Every op of the family, of tensors that have been checked: plan, run. gate counts where there is an
    activation."""
    y_dtype = output_dtype or x.dtype
    total_dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    returns_x = residual is None and total_dtype == x.dtype
    call = _call_of(op, kind, x, residual, weight, bias, gate, y_dtype)
    needs_grad = wants_grad(x, residual, weight, bias, gate)
    given, opening = x, NO_GATE if activation is None else ACTIVATIONS[activation]
    if groups > 1:
        x = x.unflatten(-1, (groups, -1))
        residual, gate = (None if t is None else t.unflatten(-1, (groups, -1)) for t in (residual, gate))
    if torch.compiler.is_compiling():
        plan, (path, dot) = None, _route(call, x.device)
    else:
        plan = planned(problem_of(call, x, groups, needs_grad), x.device)
        path, dot = plan.problem.path, plan.problem.dot
    if path == "torch":
        y, total = torch_path.run(x, residual, weight, bias, gate, eps, kind, opening, groups)
        y = y.to(y_dtype).reshape(given.shape)
        return (y, given if returns_x else total.to(total_dtype).reshape(given.shape)) if prenorm else y
    x, residual, weight, bias, gate = as_planned(Tensors(x, residual, weight, bias, gate), dot)
    kernel_total = dtype_as_planned(total_dtype, dot)
    # the sum is kept for backward, so it must not be rounded more coarsely than x and residual are
    if residual is not None:
        kernel_total = torch.promote_types(x.dtype, residual.dtype)
        residual = residual.to(kernel_total)
    x = x.contiguous()
    residual, weight, bias, gate = (None if t is None else t.contiguous()
                                    for t in (residual, weight, bias, gate))
    has_total = (prenorm and not returns_x) or (needs_grad and residual is not None)
    y, total = OPERATOR(plan, (x, residual, weight, bias, gate), Scalars(
        eps, kind, opening, groups=groups, x_dtype=x.dtype,
        residual_dtype=None if residual is None else residual.dtype, y_dtype=dtype_as_planned(y_dtype, dot),
        total_dtype=kernel_total if has_total else None, needs_grad=needs_grad, call=call))
    y = y.to(y_dtype).reshape(given.shape)
    return (y, given if returns_x else total.to(total_dtype).reshape(given.shape)) if prenorm else y


def check(
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    eps: float,
    groups: int,
    gate: Any,
    activation: str | None,
    names: tuple[str, str] = ("weight", "bias"),
) -> float:
    """eps as a float. names: what weight and bias are called."""
    check_floats("x", x, "[..., D]")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: got shape {shown(x.shape)}, need [..., D] with D of at least 1")
    D = x.shape[-1]
    for name, given, shape, meaning in ((names[0], weight, (D,), "[D]"), (names[1], bias, (D,), "[D]"),
                                        ("residual", residual, tuple(x.shape), "x's shape"),
                                        ("g", gate, tuple(x.shape), "x's shape")):
        if given is not None or (name == "g" and activation is not None):
            need_tensor(name, given, shape, meaning, x.device, "x")
    if D % scalars.integer("num_groups", groups, 1, f"a divisor of D = {D}"):
        raise ValueError(f"num_groups: got {groups}, need a divisor of D = {D}")
    if activation is not None:
        scalars.choice("activation", activation, ACTIVATIONS)
    return scalars.number("eps", eps, 0.0, need="a number of at least 0")


def _call_of(op: str, kind: int, x: Tensor, residual: Tensor | None, weight: Tensor | None,
             bias: Tensor | None, gate: Tensor | None, y_dtype: torch.dtype) -> str:
    """Op, dtype and options in one string, because a library operator takes no tuple of strings. The dtype is
    the strictest of any tensor."""
    dtypes = {x.dtype, y_dtype}
    options = ""
    for name, given in (("bias", bias), ("gate", gate), ("residual", residual), ("weight", weight)):
        if given is not None:
            dtypes.add(given.dtype)
            options += " " + name
    if kind == RMS and op in ("layer_norm", "group_norm", "layernorm_fn"):
        options += " is_rms_norm"
    dtype = x.dtype if len(dtypes) == 1 else next(dtype for dtype in STRICTEST if dtype in dtypes)
    return f"{op} {name_of(dtype)}{options}"


def problem_of(call: str, x: Tensor, groups: int, needs_grad: bool) -> Problem:
    """For x [..., D], or with groups [..., groups, D]."""
    D = x.shape[-1]
    return _problem(call, x.numel() // (groups * D), groups, D, needs_grad)


def _problem(call: str, tokens: int, groups: int, D: int, needs_grad: bool) -> Problem:
    op, dtype, options = _parsed(call)
    return Problem(op, "norm", "", B=1, T=tokens, H=groups, K=D, V=D, N=1, dtype=dtype, varlen=False,
                   needs_grad=needs_grad, options=options)


@lru_cache(maxsize=256)
def _parsed(call: str) -> tuple[str, str, tuple[str, ...]]:
    op, dtype, *options = call.split(" ")
    return op, dtype, tuple(sorted(options))


@constant_while_tracing
def _route(call: str, device: torch.device) -> tuple[str, str]:
    """What torch.compile may know while tracing: no size, which may be symbolic; there are kernels for all of
    them."""
    problem = planned(_problem(call, 1, 1, 1, True), device).problem
    return problem.path, problem.dot


class Tensors(NamedTuple):
    """x, residual and gate [..., D] or, with groups, [..., groups, D]; weight, bias [groups * D]."""
    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None


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
    return kernels("norm", "forward").run(plan, *x, how.eps, how.kind, how.activation, how.y_dtype,
                                          how.total_dtype, how.needs_grad)


def _on_torch(x: Tensors, how: Scalars) -> Any:
    y, s = torch_path.run(*x, how.eps, how.kind, how.activation, how.groups)
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
    dx, dresidual, dgate, dweight, dbias = kernels("norm", "backward").run(
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
    found = pulled_back(lambda s: torch_path.run(*s, how.eps, how.kind, how.activation, how.groups), s,
                        wanted - {"residual"} | {"x"},
                                grads[:2])
    return {**found, "residual": found["x"]}


def _like(x: Tensors, how: Scalars, name: str) -> Tensor:
    if name in ("weight", "bias"):
        return x.x.new_empty(x.x.shape[-1] * how.groups, dtype=torch.float32)
    return x.gate if x.gate is not None and name == "gate" else torch.empty_like(x.x,
                                                                                 dtype=how.x_dtype if name
                                                                                 == "x"
                                                                                 else how.residual_dtype)


OPERATOR = Operator(
    "norm", Tensors, Scalars, Outputs, 2, forward=_forward, kept=_kept, backward=_backward, same=_same,
    traced=Traced(lambda x, how: problem_of(how.call, x.x, how.groups, how.needs_grad), _empty, _on_torch,
                  _backward_on_torch, _like))
