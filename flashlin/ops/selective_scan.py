"""Mamba's selective scan, each channel with states of its own; mirrors ``mamba_ssm.ops.selective_scan_interface``.

    h_t = e^{dt_t A} h_{t-1} + dt_t u_t B_t        y_t = (h_t . C_t + D u_t) silu(z_t)
Source: Gu and Dao 2023 (arXiv 2312.00752).
"""
from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import shown
from flashlin.kernels.selective import torch_path
from flashlin.kernels.selective.recipe import FAMILY, kept
from flashlin.ops._common.gradients import emptied, once, once_traced, pulled_back
from flashlin.ops._common.planned import constant_while_tracing, head_size_class, name_of, planned, wants_grad
from flashlin.ops._common.pointwise import check_beside, check_rows
from flashlin.ops.norm import STRICTEST

OP = "selective_scan_fn"


def selective_scan_fn(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
                      delta_bias: Tensor | None = None, delta_softplus: bool = False,
                      return_last_state: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba's scan. Drop-in for ``mamba_ssm.ops.selective_scan_interface.selective_scan_fn``.

    Args:
        u, delta: [b, D, T]; z: the same or None, a gate: y is multiplied by silu(z). bfloat16, float16 or float32 (float64 runs in plain
            torch), any strides; with channels next to each other, as a projection leaves them, forward takes little more than half
            the time that it takes with tokens next to each other.
        A: [D, N], real, normally negative; D, delta_bias: [D] or None.
        B, C: [b, N, T], or [b, G, N, T] where G divides D: channel d reads group d // (D / G); or [D, N] for all tokens (in plain torch).
        delta_softplus: the step dt is softplus(delta + delta_bias).
        return_last_state: also return the state after the last token.

    Each tensor may have a dtype of its own; all arithmetic is in float32.

    Returns:
        y [b, D, T] in u's dtype (of the kernels: lying as u does); or (y, last state [b, D, N] in float32, float64 for float64 tensors).
        Gradients reach every argument through both, and repeat to the bit. For those of B and C backward takes D / 4 bytes for each state and
        token: sums of 32 channels each, in float32.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name. UnsupportedError: this machine cannot run the call.

    Differs from mamba_ssm: it needs no CUDA extension and works on CPUs; the last state passes gradients on, where there they are left
    out; N may be up to 256 in kernels, and larger in plain torch; complex A is an error.
    """
    scalars.flags(delta_softplus=delta_softplus, return_last_state=return_last_state)
    check_rows("u", u, "[b, D, T]", 3, columns=0)
    b, channels, T = u.shape
    if not channels:
        raise ValueError(f"u: got shape {shown(u.shape)}, need [b, D, T] with D of at least 1")
    check_beside("delta", delta, (b, channels, T), "u's shape", "u", u)
    check_beside("A", A, (channels, None), "[D, N]", "u", u)
    N = A.shape[1]
    if not N:
        raise ValueError(f"A: got shape {shown(A.shape)}, need [D, N] with N of at least 1")
    B, C = (_with_groups(name, x, b, channels, N, T, u) for name, x in (("B", B), ("C", C)))
    if B.ndim == C.ndim == 4 and B.shape[1] != C.shape[1]:
        raise ValueError(f"C: got {C.shape[1]} groups, need {B.shape[1]}, as B")
    for name, given, shape, meaning in (("D", D, (channels,), "[D]"), ("z", z, (b, channels, T), "u's shape"),
                                        ("delta_bias", delta_bias, (channels,), "[D]")):
        if given is not None:
            check_beside(name, given, shape, meaning, "u", u)
    y, last = _run(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return (y, last) if return_last_state else y


def _with_groups(name: str, x: Any, b: int, channels: int, N: int, T: int, u: Tensor) -> Tensor:
    """B or C as [b, G, N, T], or [D, N] where it has no tokens."""
    shapes: dict[int, tuple[int | None, ...]] = {2: (channels, N), 3: (b, N, T)}
    shape = shapes.get(x.ndim, (b, None, N, T)) if isinstance(x, Tensor) else (b, N, T)
    check_beside(name, x, shape, "[D, N], [b, N, T] or [b, G, N, T]", "u", u)
    found: Tensor = x.unsqueeze(1) if x.ndim == 3 else x
    if found.ndim == 4 and (not found.shape[1] or channels % found.shape[1]):
        raise ValueError(f"{name}: got {found.shape[1]} groups, need a divisor of the {channels} channels of u")
    return found


def _run(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
         softplus: bool) -> tuple[Tensor, Tensor]:
    given = (u, delta, A, B, C, D, z, bias)
    dtypes = {x.dtype for x in given if x is not None}
    strictest, fixed = name_of(next(one for one in STRICTEST if one in dtypes)), B.ndim == 2 or C.ndim == 2
    if torch.compiler.is_compiling():
        path, dot = _route(strictest, head_size_class(A.shape[1]), fixed, u.device)
    else:
        plan = planned(problem_of(u, A, B, strictest, fixed, wants_grad(*given)), u.device)
        path, dot = plan.problem.path, plan.problem.dot
    if path == "torch":
        y, last = torch_path.run(*given, softplus)
        return y.to(u.dtype), last
    dtype = u.dtype
    if dot == "fp32":  # nothing of 16 bits may reach a kernel, not even to be loaded or stored
        u, delta, B, C, z = u.float(), delta.float(), B.float(), C.float(), None if z is None else z.float()
    A, D, bias = A.float().contiguous(), None if D is None else D.float().contiguous(), None if bias is None else bias.float().contiguous()
    if torch.compiler.is_compiling():
        y, last, _ = _library_op(u, delta, A, B, C, D, z, bias, softplus, strictest, wants_grad(u, delta, A, B, C, D, z, bias))
    else:
        y, last = _Scan.apply(plan, softplus, u, delta, A, B, C, D, z, bias)
    return y.to(dtype), last


def problem_of(u: Tensor, A: Tensor, B: Tensor, dtype: str, fixed: bool, needs_grad: bool) -> Problem:
    """dtype: the strictest of any tensor."""
    b, channels, T = u.shape
    groups = B.shape[1] if B.ndim == 4 else 1
    return Problem(OP, FAMILY, "", b, T, groups, A.shape[1], channels, b, dtype, False, needs_grad, ("fixed",) * fixed)


@constant_while_tracing
def _route(dtype: str, N: int, fixed: bool, device: torch.device) -> tuple[str, str]:
    """What torch.compile may know while tracing: no b, D or T, which may be symbolic."""
    problem = planned(Problem(OP, FAMILY, "", 1, 1, 1, N, 64, 1, dtype, False, True, ("fixed",) * fixed), device).problem
    return problem.path, problem.dot


def _kernels(direction: str) -> Any:
    """Triton is imported when it is needed, not before."""
    return import_module(f"flashlin.kernels.{FAMILY}.{direction}")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, softplus: bool, *tensors: Any) -> Any:
        y, last, states = _kernels("forward").run(plan, *tensors, softplus)
        ctx.plan, ctx.softplus = plan, softplus
        ctx.save_for_backward(*tensors, states)
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once()
    def backward(ctx: Any, saved: tuple[Any, ...], dy: Tensor | None, dlast: Tensor | None) -> Any:
        return None, None, *_gradients(ctx.plan, saved, ctx.softplus, dy, dlast)


def _gradients(plan: Plan, saved: tuple[Any, ...], softplus: bool, dy: Tensor | None, dlast: Tensor | None) -> tuple[Any, ...]:
    dy = torch.zeros_like(saved[0]) if dy is None else dy
    found: tuple[Any, ...] = _kernels("backward").run(plan, *saved, softplus, dy, None if dlast is None else dlast.contiguous())
    return found


# Under torch.compile the same functions run inside library operators, planned at run time; see ops/_common/chunked.py.
_TENSORS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? bias"


@torch.library.custom_op("flashlin::selective_scan", mutates_args=(),
                         schema=f"({_TENSORS}, bool softplus, str dtype, bool needs_grad) -> (Tensor, Tensor, Tensor)")
def _library_op(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
                softplus: bool, dtype: str, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    plan = planned(problem_of(u, A, B, dtype, False, needs_grad), u.device)
    if plan.problem.path == "torch":
        if needs_grad:
            emptied.add(FAMILY)
        y, last = torch_path.run(u, delta, A, B, C, D, z, bias, softplus)
        return torch.empty_like(u).copy_(y), last, _kept(u, A, needs_grad)
    y, last, states = _kernels("forward").run(plan, u, delta, A, B, C, D, z, bias, softplus)
    return y, last, last.new_empty(0) if states is None else states


@_library_op.register_fake
def _(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
      softplus: bool, dtype: str, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(u), A.new_empty(u.shape[0], u.shape[1], A.shape[1]), _kept(u, A, needs_grad)


def _kept(u: Tensor, A: Tensor, needs_grad: bool) -> Tensor:
    """Room for the states that backward's kernels want."""
    b, channels, T = u.shape
    return A.new_empty(b, kept(T), A.shape[1], channels) if needs_grad else A.new_empty(0)


@torch.library.custom_op("flashlin::selective_scan_backward", mutates_args=(),
                         schema=f"({_TENSORS}, Tensor states, bool softplus, str dtype, Tensor dy, Tensor? dlast) -> Tensor[]")
def _library_backward(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
                      states: Tensor, softplus: bool, dtype: str, dy: Tensor, dlast: Tensor | None) -> list[Tensor]:
    plan = planned(problem_of(u, A, B, dtype, False, True), u.device)
    tensors = (u, delta, A, B, C, D, z, bias)
    if plan.problem.path == "torch":
        def again(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *optional: Tensor | None) -> tuple[Tensor, Tensor]:
            return torch_path.run(u, delta, A, B, C, *optional, softplus)  # type: ignore[call-arg, arg-type]
        found: Sequence[Tensor | None] = pulled_back(again, tensors, [True] * len(tensors), (dy, dlast))
    else:
        if FAMILY in emptied:
            states = _kernels("forward").run(plan, *tensors, softplus)[2]
        found = _gradients(plan, (*tensors, states), softplus, dy, dlast)
    return [u.new_empty(0) if x is None else x.contiguous() for x in found]


@_library_backward.register_fake
def _(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
      states: Tensor, softplus: bool, dtype: str, dy: Tensor, dlast: Tensor | None) -> list[Tensor]:
    return [u.new_empty(0) if x is None else x.new_empty(x.shape) for x in (u, delta, A, B, C, D, z, bias)]


once_traced(_library_backward, lambda inputs: OP)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.softplus, ctx.dtype, _ = inputs
    ctx.given = [x is not None for x in tensors]
    ctx.save_for_backward(*tensors, output[2])


def _differentiate(ctx: Any, dy: Tensor, dlast: Tensor | None, _: Any) -> Any:
    found = _library_backward(*ctx.saved_tensors, ctx.softplus, ctx.dtype, dy, dlast)
    return *(x if given else None for x, given in zip(found, ctx.given, strict=True)), None, None, None


_library_op.register_autograd(_differentiate, setup_context=_save)
