"""One token of a selective state space model; mirrors ``mamba_ssm.ops.triton.selective_state_update``.

    h = e^{dt A} h + dt x B^T        y = (h C + D x) silu(z)
Source: Gu and Dao 2023 (Mamba), Dao and Gu 2024 (Mamba2, where a head has one dt and one A).
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.problem import Problem
from flashlin.guards.tensors import check_apart, check_device, check_floats, check_integers, shown
from flashlin.kernels.mamba import torch_path
from flashlin.kernels.mamba.recipe import STATE_UPDATE
from flashlin.ops._common.operator import kernels, writing_operator
from flashlin.ops._common.planned import as_planned, constant_while_tracing, name_of, planned, wants_grad
from flashlin.ops._common.pointwise import check_beside
from flashlin.ops.norm import STRICTEST

OP = "selective_state_update"


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token of each sequence. Drop-in for
    ``mamba_ssm.ops.triton.selective_state_update.selective_state_update``.

    Args:
        state: [b, H, P, N] or, without heads, [b, P, N], of any float dtype and any strides: UPDATED IN
            PLACE, also where it is a view.
        x, dt: [b, H, P] or [b, P]; z: the same or None, a gate. A: [H, P, N] or [P, N], normally negative; D,
            dt_bias: [H, P] or [P] or None. Expanded tensors (stride 0) are read as they are; where dt,
            dt_bias and A are expanded along P and N, as in Mamba2, a head has a single exponential.
        B, C: [b, G, N] or [b, N], where G divides H: head h reads group h // (H / G).
        dt_softplus: dt is softplus(dt + dt_bias).
        state_batch_indices: [b] int32 or int64: the row of state of each sequence; state may then have any
            number of rows. Sequences whose index is negative or past the end have none: their y is zero.

    Each tensor may have a dtype of its own; all arithmetic is in float32 (float64 runs in plain torch).

    Returns:
        y of x's shape and dtype.

    Raises:
        TypeError, ValueError: an argument that does not fit, by name; a state that requires a gradient, which
            cannot pass through a tensor
        updated in place. UnsupportedError: this machine cannot run the call.

    Differs from mamba_ssm: dt_bias may be None (an error there in 2.2.6 and 2.3), the other tensors have
    gradients (by plain torch; there they are silently none), indices past the end touch nothing, and CPU
    tensors work.
    """
    scalars.flags(dt_softplus=dt_softplus)
    heads, pool = _pool(state, x)
    (_, H, P, N), b = pool.shape, x.shape[0]
    check_apart("state", state, OP)
    tensors = [_with_heads(name, given, shape, meaning, at, x) for name, given, shape, meaning, at in (
        ("x", x, (b, H, P), "[b, H, P]", 1), ("dt", dt, (b, H, P), "[b, H, P]", 1),
        ("A", A, (H, P, N), "[H, P, N]", 0), ("B", B, (b, None, N), "[b, G, N]", 1),
        ("C", C, (b, None, N), "[b, G, N]", 1))]
    x, dt, A, B, C = tensors
    D, z, dt_bias = (None if given is None else _with_heads(name, given, shape, meaning, at, x)
                     for name, given, shape, meaning, at in (
("D", D, (H, P), "[H, P]", 0), ("z", z, (b, H, P), "[b, H, P]", 1),
("dt_bias", dt_bias, (H, P), "[H, P]", 0)))
    if H % max(B.shape[1], 1) or (H and not B.shape[1]):
        raise ValueError(f"B: got {B.shape[1]} groups, need a divisor of the {H} heads of state")
    if C.shape != B.shape:
        raise ValueError(f"C: got shape {shown(C.shape)}, need {shown(B.shape)}, as B")
    if state_batch_indices is not None:
        # kernels skip values outside of state
        check_integers("state_batch_indices", state_batch_indices, (b,), "[b]", x.device, "x")
    elif pool.shape[0] != b:
        raise ValueError(f"state: got {pool.shape[0]} rows, need {b}, as x (or state_batch_indices)")
    given, how = Tensors(pool, x, dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias,
                         indices=state_batch_indices), Scalars(dt_softplus)
    y = (_in_torch if wants_grad(x, dt, A, B, C, D, z, dt_bias) else _run)(given, how)
    return y if heads else y.squeeze(1)


def _pool(state: Any, x: Any) -> tuple[bool, Tensor]:
    """Whether state has heads, and state with heads."""
    for name, given, dims, meaning in (("state", state, (3, 4), "[b, H, P, N] or [b, P, N]"),
                                       ("x", x, (2, 3), "[b, H, P] or [b, P]")):
        check_floats(name, given, meaning)
        if given.ndim not in dims or (name == "state" and 0 in given.shape[-2:]):
            raise ValueError(f"{name}: got shape {shown(given.shape)}, need {meaning}"
                             + " with P and N of at least 1" * (name == "state"))
    check_device("state", state, x.device, "x")
    if state.requires_grad and torch.is_grad_enabled():
        raise ValueError("state: got a tensor that requires a gradient, need one that does not: it is "
                         "updated in place. "
                         "mamba_chunk_scan_combined with initial_states has the gradient")
    return state.ndim == 4, state if state.ndim == 4 else state.unsqueeze(1)


def _with_heads(name: str, given: Any, shape: tuple[int | None, ...], meaning: str, at: int,
                x: Tensor) -> Tensor:
    if isinstance(given, Tensor) and given.ndim == len(shape) - 1:
        check_floats(name, given, meaning)
        given = given.unsqueeze(at)
    check_beside(name, given, shape, meaning, "x", x)
    found: Tensor = given
    return found


def put_rows(pool: Tensor, rows: Tensor, known: Tensor, values: Tensor) -> None:
    """pool[rows] = values, of those that are known."""
    if not torch.compiler.is_compiling() and pool.device.type != "meta":
        pool[rows[known]] = values[known].to(pool.dtype)
    # there is no room for a number of rows that nobody knows: those without one go to a row that is cut off
    # again
    else:
        larger = torch.cat([pool, pool.new_zeros(1, *pool.shape[1:])])
        pool.copy_(larger.index_copy(0, torch.where(known, rows, pool.shape[0]), values.to(pool.dtype))[:-1])


class Tensors(NamedTuple):
    pool: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    indices: Tensor | None


class Scalars(NamedTuple):
    softplus: bool


def _in_torch(given: Tensors, how: Scalars) -> Tensor:
    pool, x, dt, A, B, C, D, z, dt_bias, indices = given
    if indices is None:
        y, after = torch_path.step(pool.clone(), x, dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias,
                                   softplus=how.softplus)
        pool.copy_(after.detach())
        return y.to(x.dtype)
    known = (indices >= 0) & (indices < pool.shape[0])
    rows = indices.long().clamp(0, max(pool.shape[0] - 1, 0))
    before = pool[rows] if pool.shape[0] else pool.new_zeros(x.shape[0], *pool.shape[1:])
    y, after = torch_path.step(before, x, dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, softplus=how.softplus)
    put_rows(pool, rows, known, after.detach())
    return torch.where(known[:, None, None], y, 0).to(x.dtype)


def _run(given: Tensors, how: Scalars) -> Tensor:
    dtype, device = given.x.dtype, given.x.device
    dtypes = {t.dtype for t in given[:-1] if t is not None}
    strictest = name_of(next(one for one in STRICTEST if one in dtypes))
    if torch.compiler.is_compiling():
        if _path(strictest, device) == "torch":
            return _in_torch(given, how)
        traced: Tensor = _library_op(*given, *how)
        return traced
    plan = planned(problem_of(given.x, given.A, strictest), device)
    if plan.problem.path == "torch":
        return _in_torch(given, how)
    states, x, dt, A, B, C, D, z, dt_bias, indices = as_planned(given, plan.problem.dot)
    x, B, C = (rows_contiguous(t) for t in (x, B, C))
    z = None if z is None else rows_contiguous(z)
    indices = None if indices is None else indices.contiguous()
    y: Tensor = kernels("mamba", "forward").update(plan, states, x, dt=dt, A=A, B=B, C=C, D=D, z=z,
                                                   dt_bias=dt_bias, indices=indices, softplus=how.softplus,
                                                   dtype=x.dtype)
    if states is not given.pool:
        given.pool.copy_(states)
    return y.to(dtype)


def rows_contiguous(x: Tensor) -> Tensor:
    """x, copied unless each x[n] is contiguous."""
    return x if x.shape[0] and x[0].is_contiguous() else x.contiguous()


def problem_of(x: Tensor, A: Tensor, dtype: str) -> Problem:
    """dtype: the strictest of any tensor."""
    b, H, P = x.shape
    return Problem(OP, STATE_UPDATE, "", B=b, T=1, H=H, K=A.shape[2], V=P, N=b, dtype=dtype)


@constant_while_tracing
def _path(dtype: str, device: torch.device) -> str:
    """What torch.compile may know while tracing: no size, which may be symbolic."""
    return planned(Problem(OP, STATE_UPDATE, "", B=1, T=1, H=1, K=1, V=1, N=1, dtype=dtype),
                   device).problem.path


_library_op = writing_operator("selective_state_update", Tensors, Scalars, "pool", _run,
                               lambda x, how: x.x.new_empty(x.x.shape))
