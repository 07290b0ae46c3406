"""One token of a selective state space model; mirrors ``mamba_ssm.ops.triton.selective_state_update``.

    h = e^{dt A} h + dt x B^T        y = (h C + D x) silu(z)

Source: Gu and Dao 2023 (Mamba); Dao and Gu 2024 (Mamba2, in which each head has one dt and one A).
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
def selective_state_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                           D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
                           dt_softplus: bool = False, state_batch_indices: Tensor | None = None) -> Tensor:
    """Compute the next token of each sequence and update its state in place.

    Drop-in for ``mamba_ssm.ops.triton.selective_state_update.selective_state_update``. It computes

        h = e^{dt A} h + dt x B^T        y = (h C + D x) silu(z)

    Each tensor may have its own dtype. All arithmetic is in float32 (float64 runs in plain torch). Expanded
    tensors (stride 0) are read without a copy. If dt, dt_bias and A are expanded along P and N, as in Mamba2,
    each head computes a single exponential.

    Args:
        state: [b, H, P, N] or, without heads, [b, P, N], any float dtype and strides: the states h. It is
            UPDATED IN PLACE, also if it is a view.
        x: [b, H, P] or [b, P].
        dt: shape of x, the step.
        A: [H, P, N] or [P, N], normally negative.
        B: [b, G, N] or [b, N], G a divisor of H. Head h reads group h // (H / G).
        C: like B.
        D: [H, P] or [P], a skip connection, or None.
        z: shape of x, a gate, or None: y is multiplied by silu(z).
        dt_bias: [H, P] or [P], added to dt, or None.
        dt_softplus: use softplus(dt + dt_bias) in place of dt + dt_bias.
        state_batch_indices: [b] int32 or int64: the row of state for each sequence. With it, state may have
            any number of rows. A sequence whose index is negative or past the end has no state, and its y is
            zero.

    Returns:
        y in the shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it. state must not require a
            gradient, because gradients cannot pass through an in-place update. ``mamba_chunk_scan_combined``
            with initial_states has that gradient.
        UnsupportedError: this machine cannot run the call.

    Differences from mamba_ssm: dt_bias may be None, which is an error in mamba_ssm 2.2.6 and 2.3. The other
    tensors get gradients (in plain torch), which are silently missing there. Indices past the end access no
    memory, and CPU tensors work.
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
        # Kernels skip indices outside state.
        check_integers("state_batch_indices", state_batch_indices, (b,), "[b]", x.device, "x")
    elif pool.shape[0] != b:
        raise ValueError(f"state: got {pool.shape[0]} rows, need {b}, as x (or state_batch_indices)")
    how = Scalars(dt_softplus)
    y = _in_torch(given, how) if wants_grad(*given) else UPDATE.run_planned(given, how)
    return y if heads else y.squeeze(1)


def _pool(state: Any, x: Any) -> tuple[bool, Tensor]:
    """Check state and x, and return (True if state has heads, state with a dimension of heads)."""
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
    """Check one argument of the update and return it with a dimension of heads.

    given: the argument. Only D, z and dt_bias may be None.
    kind: (its shape with heads, the text for that shape in errors, the number of the dimension of heads).
    x: the tensor with the required device.
    """
    shape, meaning, at = kind
    if given is None and name in ("D", "z", "dt_bias"):
        return None
    if isinstance(given, Tensor) and given.ndim == len(shape) - 1:
        check_floats(name, given, meaning)
        given = given.unsqueeze(at)
    need_tensor(name, given, shape, meaning, x.device, "x")
    return given


class Tensors(NamedTuple):
    """The tensor arguments of one update, with heads.

    pool: the states, [rows, H, P, N], updated in place.
    x, dt, z: [b, H, P].
    A: [H, P, N].
    B, C: [b, G, N].
    D, dt_bias: [H, P].
    indices: the row of pool for each sequence, [b], or None.
    """
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
    """The only option of an update: apply softplus to the step or not."""
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
    y: Tensor = kernels("mamba", "forward").update(
        plan, states, x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, indices=contiguous(indices)[0],
        softplus=how.softplus, dtype=x.dtype)
    if states is not given.pool:
        given.pool.copy_(states)
    return y.to(given.x.dtype)


def _rows_contiguous(x: Tensor) -> Tensor:
    """Return x itself if each x[n] is contiguous, else a contiguous copy."""
    return x if x.shape[0] and x[0].is_contiguous() else x.contiguous()


def problem_of(given: Tensors, how: Scalars) -> Problem:
    """Return the problem of one update for planning, with N as K and P as V."""
    (b, H, P), N = given.x.shape, given.A.shape[2]
    return Problem(OP, STATE_UPDATE, "", B=b, T=1, H=H, K=N, V=P, N=b, dtype=strictest(dtypes_of(given)))


UPDATE = Overwriting(
    "selective_state_update", Tensors, Scalars, "pool", family=STATE_UPDATE, problem=problem_of,
    on_torch=_in_torch, while_tracing=lambda x, how: TracedCall(call_of(OP, dtypes_of(x))), launch=_update,
    empty=lambda x, how: x.x.new_empty(x.x.shape))
