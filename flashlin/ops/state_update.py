"""One token of a selective state space model; mirrors ``mamba_ssm.ops.triton.selective_state_update``.

    h = e^{dt A} h + dt x B^T        y = (h C + D x) silu(z)
Source: Gu and Dao 2023 (Mamba), Dao and Gu 2024 (Mamba2, where a head has one dt and one A).
"""
from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flashlin.guards import scalars
from flashlin.guards.plan_types import Plan, Problem
from flashlin.guards.tensors import check_device, check_floats, check_integers, need_tensor, shown
from flashlin.kernels.mamba import torch_path
from flashlin.kernels.mamba.recipe import STATE_UPDATE
from flashlin.ops._common.arguments import check_written
from flashlin.ops._common.casting import as_planned, contiguous, dtypes_of, strictest, wants_grad
from flashlin.ops._common.entry import entry
from flashlin.ops._common.operator import Overwriting, kernels
from flashlin.ops._common.pipeline import TracedCall, call_of
from flashlin.ops._common.pool import put_back, taken

OP = "selective_state_update"


@entry
def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
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
    row, head, group = ((b, H, P), "[b, H, P]", 1), ((H, P), "[H, P]", 0), ((b, None, N), "[b, G, N]", 1)
    given = Tensors(*[pool, *(_with_heads(name, t, kind, x) for name, t, kind in (
        ("x", x, row), ("dt", dt, row), ("A", A, ((H, P, N), "[H, P, N]", 0)), ("B", B, group),
        ("C", C, group), ("D", D, head), ("z", z, row), ("dt_bias", dt_bias, head))), state_batch_indices])
    groups = given.B.shape[1]
    if H % max(groups, 1) or (H and not groups):
        raise ValueError(f"B: got {groups} groups, need a divisor of the {H} heads of state")
    if given.C.shape != given.B.shape:
        raise ValueError(f"C: got shape {shown(given.C.shape)}, need {shown(given.B.shape)}, as B")
    if state_batch_indices is not None:
        # kernels skip values outside of state
        check_integers("state_batch_indices", state_batch_indices, (b,), "[b]", x.device, "x")
    elif pool.shape[0] != b:
        raise ValueError(f"state: got {pool.shape[0]} rows, need {b}, as x (or state_batch_indices)")
    how = Scalars(dt_softplus)
    y = _in_torch(given, how) if wants_grad(*given) else UPDATE.run_planned(given, how)
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
    check_written("state", state, OP, "updated in place. mamba_chunk_scan_combined with initial_states has "
                                      "the gradient")
    return state.ndim == 4, state if state.ndim == 4 else state.unsqueeze(1)


def _with_heads(name: str, given: Any, kind: tuple[tuple[int | None, ...], str, int], x: Tensor) -> Any:
    """given, which may be None only where the formula does without. kind: its shape, what an error calls
    that, and which dimension is that of heads."""
    shape, meaning, at = kind
    if given is None and name in ("D", "z", "dt_bias"):
        return None
    if isinstance(given, Tensor) and given.ndim == len(shape) - 1:
        check_floats(name, given, meaning)
        given = given.unsqueeze(at)
    need_tensor(name, given, shape, meaning, x.device, "x")
    return given


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
    rows = taken(given.pool, given.indices)
    _, x, dt, A, B, C, D, z, dt_bias, _ = given
    y, states = torch_path.step(rows.states, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, softplus=how.softplus)
    return put_back(rows, states, y).to(given.x.dtype)


def _update(plan: Plan, given: Tensors, how: Scalars) -> Tensor:
    states, x, dt, A, B, C, D, z, dt_bias, indices = as_planned(given, plan.problem.dot)
    x, B, C = (_rows_contiguous(t) for t in (x, B, C))
    z = None if z is None else _rows_contiguous(z)
    indices, = contiguous(indices)
    y: Tensor = kernels("mamba", "forward").update(plan, states, x, dt=dt, A=A, B=B, C=C, D=D, z=z,
                                                   dt_bias=dt_bias, indices=indices, softplus=how.softplus,
                                                   dtype=x.dtype)
    if states is not given.pool:
        given.pool.copy_(states)
    return y.to(given.x.dtype)


def _rows_contiguous(x: Tensor) -> Tensor:
    """x, copied unless each x[n] is contiguous."""
    return x if x.shape[0] and x[0].is_contiguous() else x.contiguous()


def problem_of(given: Tensors, how: Scalars) -> Problem:
    (b, H, P), N = given.x.shape, given.A.shape[2]
    return Problem(OP, STATE_UPDATE, "", B=b, T=1, H=H, K=N, V=P, N=b, dtype=strictest(dtypes_of(given)))


UPDATE = Overwriting(
    "selective_state_update", Tensors, Scalars, "pool", family=STATE_UPDATE, problem=problem_of,
    on_torch=_in_torch, while_tracing=lambda x, how: TracedCall(call_of(OP, dtypes_of(x))), launch=_update,
    empty=lambda x, how: x.x.new_empty(x.x.shape))
