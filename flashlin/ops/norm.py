"""Layer norm, RMS norm, group norm and l2 norm over the last dimension, plain or gated; mirrors the functions of ``fla.modules``.

    y = (s - mean(s)) rsqrt(var(s) + eps) w + b        y = s rsqrt(mean(s^2) + eps) w + b        y = s rsqrt(sum(s^2) + eps)
Source: Ba et al. 2016 (layer norm), Zhang and Sennrich 2019 (RMS norm). s is x, or x + residual, in fp32.
Gated, y is multiplied by g sigmoid(g) (Yang et al. 2024, GLA) or by sigmoid(g).
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_dtype, check_floats, need_tensor, shown
from flashlin.kernels.norm import torch_path
from flashlin.kernels.norm.recipe import L2, LAYER, NO_GATE, RMS, SIGMOID, SWISH
from flashlin.ops._common.gradients import once, once_traced, pulled_back
from flashlin.ops._common.planned import constant_while_tracing, name_of, planned, wants_grad

ACTIVATIONS = {"swish": SWISH, "silu": SWISH, "sigmoid": SIGMOID}
STRICTEST = (torch.float64, torch.bfloat16, torch.float16, torch.float32)  # the dtype that machines have most to say about first


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5, prenorm: bool = False,
               residual_in_fp32: bool = False, is_rms_norm: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of each row, after adding a residual if there is one. Drop-in for ``fla.modules.layernorm.layer_norm``.

    Args:
        x: [..., D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides, any D, any number of rows.
        weight, bias: [D] or None, of any float dtype.
        residual: of x's shape and any float dtype, added to x in fp32.
        eps: added to the variance.
        prenorm: also return the sum, which is what the next block adds to.
        residual_in_fp32: without a residual, return that sum in fp32.
        is_rms_norm: be ``rms_norm``.

    Returns:
        y in x's shape and dtype; with prenorm (y, sum). The sum has residual's dtype; without a residual it is x, or x in fp32.
        Gradients reach x, weight, bias and residual, also through the sum, and repeat to the bit.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot run the call.

    Differs from fla where fla fails: rows longer than 64 KB, no rows at all, CPU tensors; and a new number of rows never recompiles.
    """
    scalars.flags(is_rms_norm=is_rms_norm)
    return _run("layer_norm", RMS if is_rms_norm else LAYER, x, residual, weight, bias, eps, prenorm, residual_in_fp32)


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5, prenorm: bool = False,
             residual_in_fp32: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of each row, after adding a residual if there is one. Drop-in for ``fla.modules.layernorm.rms_norm``.

    eps is added to the mean of the squares. The rest as ``layer_norm``.
    """
    return _run("rms_norm", RMS, x, residual, weight, bias, eps, prenorm, residual_in_fp32)


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5, prenorm: bool = False,
               residual_in_fp32: bool = False, is_rms_norm: bool = False, num_groups: int = 1) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of each of num_groups equal slices of a row, as RetNet has it. Drop-in for ``fla.modules.layernorm.group_norm``.

    weight, bias: [D], of the whole row. is_rms_norm: an RMS norm of each slice. num_groups: divides D. The rest as ``layer_norm``. Unlike
    ``torch.nn.GroupNorm``, tokens are normalised one by one. Source: Wu and He 2018, Sun et al. 2023.
    """
    scalars.flags(is_rms_norm=is_rms_norm)
    return _run("group_norm", RMS if is_rms_norm else LAYER, x, residual, weight, bias, eps, prenorm, residual_in_fp32, groups=num_groups)


def rms_norm_gated(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish", residual: Tensor | None = None,
                   prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of x + residual, multiplied by a gate. Drop-in for ``fla.modules.fused_norm_gate.rms_norm_gated``.

    g: of x's shape and any float dtype; gets a gradient. activation: ``swish`` or ``silu`` multiply by g sigmoid(g), ``sigmoid`` by
    sigmoid(g). The gate comes after weight and bias. eps is smaller than ``rms_norm``'s, as in fla. The rest as ``layer_norm``.
    """
    return _run("rms_norm_gated", RMS, x, residual, weight, bias, eps, prenorm, residual_in_fp32, gate=g, activation=activation)


def layer_norm_gated(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish",
                     residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
                     eps: float = 1e-6) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm of x + residual, multiplied by a gate. Drop-in for ``fla.modules.fused_norm_gate.layer_norm_gated``.

    Arguments as ``rms_norm_gated``.
    """
    return _run("layer_norm_gated", LAYER, x, residual, weight, bias, eps, prenorm, residual_in_fp32, gate=g, activation=activation)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Each row divided by its length, ``x * rsqrt(sum(x^2) + eps)``. Drop-in for ``fla.modules.l2norm.l2norm``.

    eps is inside the root (unlike ``torch.nn.functional.normalize``), so a row of zeros gives zeros and a finite gradient.
    output_dtype: of the result, x's if None. x and errors as ``layer_norm``.
    """
    if output_dtype is not None:
        check_dtype("output_dtype", output_dtype)
    y = _run("l2norm", L2, x, None, None, None, eps, False, False, output_dtype=output_dtype)
    assert isinstance(y, Tensor)  # for the type checker: only prenorm gives two
    return y


l2_norm = l2norm


def rmsnorm_fn(x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6, group_size: int | None = None,
               norm_before_gate: bool = True) -> Tensor:
    """RMS norm of each group_size columns of a row, and Mamba2's gate before or after it. Drop-in for ``rmsnorm_fn`` of
    ``mamba_ssm.ops.triton.layernorm_gated`` and ``fla.modules.layernorm_gated``.

    Args:
        x: [..., D], bfloat16, float16 or float32 (float64 runs in plain torch), any strides. weight, bias: [D] or None, of any float dtype.
        z: of x's shape and any float dtype, or None for no gate.
        group_size: a divisor of D; None means D. norm_before_gate: norm(x) * silu(z), else norm(x * silu(z)).

    Returns:
        y in x's shape and dtype. Arithmetic is in float32, x * silu(z) included; gradients reach x, weight, bias and z. Errors as ``layer_norm``.
    """
    return mamba_norm("rmsnorm_fn", RMS, x, weight, bias, z, eps, group_size, norm_before_gate)


def layernorm_fn(x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6, group_size: int | None = None,
                 norm_before_gate: bool = True, is_rms_norm: bool = False) -> Tensor:
    """``rmsnorm_fn`` with a layer norm of each group, unless is_rms_norm. Drop-in for ``layernorm_fn`` of the same modules."""
    scalars.flags(is_rms_norm=is_rms_norm)
    return mamba_norm("layernorm_fn", RMS if is_rms_norm else LAYER, x, weight, bias, z, eps, group_size, norm_before_gate)


def mamba_norm(op: str, kind: int, x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None, eps: float, group_size: int | None,
               norm_before_gate: bool, dtype: torch.dtype | None = None) -> Tensor:
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
    y = _run(op, kind, x, None, weight, bias, eps, False, False, output_dtype=dtype, groups=D // size, gate=gate,
             activation=None if gate is None else "silu")
    assert isinstance(y, Tensor)  # for the type checker: only prenorm gives two
    return y


def _run(op: str, kind: int, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, prenorm: bool,
         residual_in_fp32: bool, *, output_dtype: torch.dtype | None = None, groups: int = 1, gate: Tensor | None = None,
         activation: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    scalars.flags(prenorm=prenorm, residual_in_fp32=residual_in_fp32)
    eps = check(x, residual, weight, bias, eps, groups, gate, activation)
    return run(op, kind, x, residual, weight, bias, eps, prenorm, residual_in_fp32, output_dtype=output_dtype, groups=groups, gate=gate,
               activation=activation)


def run(op: str, kind: int, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, prenorm: bool,
        residual_in_fp32: bool, *, output_dtype: torch.dtype | None = None, groups: int = 1, gate: Tensor | None = None,
        activation: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Every op of the family, of tensors that have been checked: plan, run. gate counts where there is an activation."""
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
        path, dot = _route(call, x.device)
    else:
        plan = planned(problem_of(call, x, groups, needs_grad), x.device)
        path, dot = plan.problem.path, plan.problem.dot
    if path == "torch":
        y, total = torch_path.run(x, residual, weight, bias, gate, eps, kind, opening, groups)
        y = y.to(y_dtype).reshape(given.shape)
        return (y, given if returns_x else total.to(total_dtype).reshape(given.shape)) if prenorm else y
    kernel_y, kernel_total = y_dtype, total_dtype
    if dot == "fp32":
        x, residual, weight, bias, gate = (None if t is None else t.float()  # type: ignore[assignment]
                                           for t in (x, residual, weight, bias, gate))
        kernel_y = kernel_total = torch.float32
    elif residual is not None:  # the sum is kept for backward, so it must not be rounded more coarsely than x and residual are
        kernel_total = torch.promote_types(x.dtype, residual.dtype)
        residual = residual.to(kernel_total)
    x = x.contiguous()
    residual, weight, bias, gate = (None if t is None else t.contiguous() for t in (residual, weight, bias, gate))
    wanted = kernel_total if prenorm and not returns_x else None
    if torch.compiler.is_compiling():
        y, total, _, _ = _library_op(x, residual, weight, bias, gate, eps, kind, opening, groups, kernel_y, wanted, needs_grad, call)
    else:
        y, total = _Norm.apply(plan, x, residual, weight, bias, gate, eps, kind, opening, kernel_y, wanted, needs_grad)
    y = y.to(y_dtype).reshape(given.shape)
    return (y, given if returns_x else total.to(total_dtype).reshape(given.shape)) if prenorm else y


def check(x: Any, residual: Any, weight: Any, bias: Any, eps: float, groups: int, gate: Any, activation: str | None,
          names: tuple[str, str] = ("weight", "bias")) -> float:
    """eps as a float. names: what weight and bias are called."""
    check_floats("x", x, "[..., D]")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: got shape {shown(x.shape)}, need [..., D] with D of at least 1")
    D = x.shape[-1]
    for name, given, shape, meaning in ((names[0], weight, (D,), "[D]"), (names[1], bias, (D,), "[D]"),
                                        ("residual", residual, tuple(x.shape), "x's shape"), ("g", gate, tuple(x.shape), "x's shape")):
        if given is not None or (name == "g" and activation is not None):
            need_tensor(name, given, shape, meaning, x.device, "x")
    if D % scalars.integer("num_groups", groups, 1, f"a divisor of D = {D}"):
        raise ValueError(f"num_groups: got {groups}, need a divisor of D = {D}")
    if activation is not None:
        scalars.choice("activation", activation, ACTIVATIONS)
    return scalars.number("eps", eps, 0.0, need="a number of at least 0")


def _call_of(op: str, kind: int, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None,
             y_dtype: torch.dtype) -> str:
    """Op, dtype and options in one string, because a library operator takes no tuple of strings. The dtype is the strictest of any tensor."""
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
    return Problem(op, "norm", "", 1, tokens, groups, D, D, 1, dtype, False, needs_grad, options)


@lru_cache(maxsize=256)
def _parsed(call: str) -> tuple[str, str, tuple[str, ...]]:
    op, dtype, *options = call.split(" ")
    return op, dtype, tuple(sorted(options))


@constant_while_tracing
def _route(call: str, device: torch.device) -> tuple[str, str]:
    """What torch.compile may know while tracing: no size, which may be symbolic; there are kernels for all of them."""
    problem = planned(_problem(call, 1, 1, 1, True), device).problem
    return problem.path, problem.dot


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None,
                eps: float, kind: int, activation: int, y_dtype: torch.dtype, total_dtype: torch.dtype | None, needs_grad: bool) -> Any:
        y, total, mean, rstd = _forward(plan, x, residual, weight, bias, gate, eps, kind, activation, y_dtype, total_dtype, needs_grad)
        if needs_grad:
            kept, ctx.normed = _kept(x, residual, y, total, kind)
            ctx.save_for_backward(kept, weight, None if gate is None else bias, gate, mean, rstd)
            ctx.plan, ctx.kind, ctx.activation = plan, kind, activation
            ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, weight, bias)]
            ctx.set_materialize_grads(False)
        return y, total     # an output even where only backward wants it: see ops/_common/gradients.py

    @staticmethod
    @once()
    def backward(ctx: Any, saved: tuple[Any, ...], dy: Tensor | None, dtotal: Tensor | None) -> Any:
        x_dtype, residual_dtype, weight_dtype, bias_dtype = ctx.dtypes
        _, _, needs_dresidual, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        if dy is None:
            dx, dresidual, dgate, dweight, dbias = dtotal, dtotal, None, None, None
        else:
            kept, weight, bias, gate, mean, rstd = saved
            dx, dresidual, dgate, dweight, dbias = _gradients(ctx.plan, kept, weight, bias, gate, mean, rstd, dy, dtotal, ctx.kind, ctx.activation,
                                                              ctx.normed, x_dtype, residual_dtype if needs_dresidual else None, needs_dweight,
                                                              needs_dbias)
        return (None, _to(dx, x_dtype), _to(dresidual, residual_dtype), _to(dweight, weight_dtype), _to(dbias, bias_dtype), dgate, *[None] * 6)


def _to(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if x is None or dtype is None else x.to(dtype)


def _forward(plan: Plan, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, eps: float,
             kind: int, activation: int, y_dtype: torch.dtype, total_dtype: torch.dtype | None, needs_grad: bool) -> Any:
    """forward.run, which also writes the sum if only backward wants it."""
    from flashlin.kernels.norm import forward
    if total_dtype is None and needs_grad and residual is not None:
        total_dtype = residual.dtype
    return forward.run(plan, x, residual, weight, bias, gate, eps, kind, activation, y_dtype, total_dtype, needs_grad)


def _kept(x: Tensor, residual: Tensor | None, y: Tensor, total: Tensor | None, kind: int) -> tuple[Tensor | None, bool]:
    """What backward needs of the rows, and whether they are normalised already: an l2 norm keeps y, which the next op keeps anyway."""
    if kind == L2 and y.dtype == x.dtype:
        return y, True
    return x if residual is None else total, False


def _gradients(plan: Plan, kept: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, mean: Tensor | None, rstd: Tensor,
               dy: Tensor, dtotal: Tensor | None, kind: int, activation: int, normed: bool, x_dtype: torch.dtype,
               residual_dtype: torch.dtype | None, needs_dweight: bool, needs_dbias: bool) -> Any:
    """backward.run; dresidual, where it is wanted, is dx itself if the dtype is the same."""
    from flashlin.kernels.norm import backward
    other = None if residual_dtype == x_dtype else residual_dtype
    dx, dresidual, *rest = backward.run(plan, kept, weight, bias, gate, mean, rstd, dy.contiguous(), None if dtotal is None else dtotal.contiguous(),
                                        kind, activation, normed, x_dtype, other, needs_dweight, needs_dbias)
    return dx, dx if residual_dtype == x_dtype else dresidual, *rest


def _gradients_on_torch(kept: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, rstd: Tensor, dy: Tensor,
                        dtotal: Tensor | None, eps: float, kind: int, activation: int, groups: int, normed: bool, x_dtype: torch.dtype,
                        residual_dtype: torch.dtype | None, needs_dweight: bool, needs_dbias: bool) -> Any:
    """The same by plain torch. A bias that backward has no use for is not there; its gradient is that of zeros."""
    s = kept.float() / rstd[..., None] if normed else kept.float()
    zeros = kept.new_zeros(kept.shape[-1] * groups, dtype=torch.float32)
    weight, bias = (zeros + 1 if weight is None else weight.float()), (zeros if bias is None else bias.float())
    ds, dweight, dbias, dgate = pulled_back(lambda s, weight, bias, gate: torch_path.run(s, None, weight, bias, gate, eps, kind, activation, groups),
                                            (s, weight, bias, gate), (True, needs_dweight, needs_dbias, True), (dy, dtotal))
    assert ds is not None  # wanted
    dx = ds.to(x_dtype)
    return dx, None if residual_dtype is None else dx if residual_dtype == x_dtype else ds.to(residual_dtype), dgate, dweight, dbias


# Under torch.compile the same two functions run inside one library operator per direction, planned at run time.
@torch.library.custom_op(
    "flashlin::norm", mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? gate, float eps, int kind, int activation, int groups, "
           "ScalarType y_dtype, ScalarType? total_dtype, bool needs_grad, str call) -> (Tensor, Tensor, Tensor, Tensor)")
def _library_op(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, eps: float, kind: int,
                activation: int, groups: int, y_dtype: torch.dtype, total_dtype: torch.dtype | None, needs_grad: bool,
                call: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = planned(problem_of(call, x, groups, needs_grad), x.device)
    if plan.problem.path == "torch":
        y, s = torch_path.run(x, residual, weight, bias, gate, eps, kind, activation, groups)
        room = _room(x, residual, kind, y_dtype, total_dtype, needs_grad)
        for out, found in zip(room, (y, s, *torch_path.statistics(s, eps, kind)[1:]), strict=True):
            if out.numel() and found is not None:
                out.copy_(found.view_as(out))
        return room
    y, total, mean, rstd = _forward(plan, x, residual, weight, bias, gate, eps, kind, activation, y_dtype, total_dtype, needs_grad)
    return y, *(x.new_empty(0, dtype=torch.float32) if t is None else t for t in (total, mean, rstd))


@_library_op.register_fake
def _(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, eps: float, kind: int,
      activation: int, groups: int, y_dtype: torch.dtype, total_dtype: torch.dtype | None, needs_grad: bool,
      call: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _room(x, residual, kind, y_dtype, total_dtype, needs_grad)


def _room(x: Tensor, residual: Tensor | None, kind: int, y_dtype: torch.dtype, total_dtype: torch.dtype | None,
          needs_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For the outputs of the operator: y, the sum, and the rows' statistics; empty vectors for what is not wanted."""
    if total_dtype is None and needs_grad and residual is not None:
        total_dtype = residual.dtype
    nothing = [0]
    total = x.new_empty(nothing, dtype=torch.float32) if total_dtype is None else torch.empty_like(x, dtype=total_dtype)
    mean = x.new_empty(x.shape[:-1] if needs_grad and kind == LAYER else nothing, dtype=torch.float32)
    rstd = x.new_empty(x.shape[:-1] if needs_grad else nothing, dtype=torch.float32)
    return torch.empty_like(x, dtype=y_dtype), total, mean, rstd


@torch.library.custom_op(
    "flashlin::norm_backward", mutates_args=(),
    schema="(Tensor kept, Tensor? weight, Tensor? bias, Tensor? gate, Tensor? mean, Tensor rstd, Tensor dy, Tensor? dtotal, float eps, int kind, "
           "int activation, int groups, bool normed, ScalarType x_dtype, ScalarType? residual_dtype, bool needs_dweight, bool needs_dbias, "
           "str call) -> Tensor[]")
def _library_backward(kept: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, mean: Tensor | None, rstd: Tensor,
                      dy: Tensor, dtotal: Tensor | None, eps: float, kind: int, activation: int, groups: int, normed: bool, x_dtype: torch.dtype,
                      residual_dtype: torch.dtype | None, needs_dweight: bool, needs_dbias: bool, call: str) -> list[Tensor]:
    plan = planned(problem_of(call, kept, groups, True), kept.device)
    if plan.problem.path == "torch":
        dx, dresidual, dgate, dweight, dbias = _gradients_on_torch(kept, weight, bias, gate, rstd, dy, dtotal, eps, kind, activation, groups, normed,
                                                                   x_dtype, residual_dtype, needs_dweight, needs_dbias)
    else:
        dx, dresidual, dgate, dweight, dbias = _gradients(plan, kept, weight, bias, gate, mean, rstd, dy, dtotal, kind, activation, normed, x_dtype,
                                                          residual_dtype, needs_dweight, needs_dbias)
    if dweight is not None and dbias is not None:  # rows of one tensor, which an operator may not return
        dbias = dbias.clone()
    return [dx, *(kept.new_empty(0) if t is None or t is dx else t for t in (dresidual, dgate, dweight, dbias))]


@_library_backward.register_fake
def _(kept: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, mean: Tensor | None, rstd: Tensor, dy: Tensor,
      dtotal: Tensor | None, eps: float, kind: int, activation: int, groups: int, normed: bool, x_dtype: torch.dtype,
      residual_dtype: torch.dtype | None, needs_dweight: bool, needs_dbias: bool, call: str) -> list[Tensor]:
    D = kept.shape[-1] * groups
    dresidual = kept.new_empty(0) if residual_dtype in (None, x_dtype) else torch.empty_like(kept, dtype=residual_dtype)
    return [torch.empty_like(kept, dtype=x_dtype), dresidual, kept.new_empty(0) if gate is None else torch.empty_like(gate),
            *(kept.new_empty(D, dtype=torch.float32) if needed else kept.new_empty(0) for needed in (needs_dweight, needs_dbias))]


once_traced(_library_backward, lambda inputs: inputs[-1].split(" ")[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, residual, weight, bias, gate, ctx.eps, ctx.kind, ctx.activation, ctx.groups, _, total_dtype, _, ctx.call = inputs
    y, total, mean, rstd = output
    kept, ctx.normed = _kept(x, residual, y, total, ctx.kind)
    ctx.save_for_backward(kept, weight, None if gate is None else bias, gate, mean if ctx.kind == LAYER else None, rstd)
    ctx.dtypes, ctx.has_total = [None if t is None else t.dtype for t in (x, residual, weight, bias)], total_dtype is not None


def _differentiate(ctx: Any, dy: Tensor, dtotal: Tensor, dmean: Tensor, drstd: Tensor) -> Any:
    gate = ctx.saved_tensors[3]
    x_dtype, residual_dtype, weight_dtype, bias_dtype = ctx.dtypes
    dx, dresidual, dgate, dweight, dbias = _library_backward(
        *ctx.saved_tensors, dy, dtotal if ctx.has_total else None, ctx.eps, ctx.kind, ctx.activation, ctx.groups, ctx.normed, x_dtype, residual_dtype,
        weight_dtype is not None, bias_dtype is not None, ctx.call)
    dresidual = None if residual_dtype is None else dx if residual_dtype == x_dtype else dresidual
    return dx, dresidual, _to(dweight, weight_dtype), _to(dbias, bias_dtype), None if gate is None else dgate, *[None] * 8


_library_op.register_autograd(_differentiate, setup_context=_save)
