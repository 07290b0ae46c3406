"""What the ops over sequences share, chunk by chunk (chunked.py) and token by token (recurrent.py).

Their tensors, x, are NamedTuples with q [B, T, H, K], v [B, T, HV, V] and bounds [N + 1] or None; the scalars
beside them, how, have call, needs_grad, has_ht and out_dtype."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashlin.guards.problem import Plan, Problem
from flashlin.ops._common.planned import (
    constant_while_tracing,
    head_size_class,
    name_of,
    planned,
    suspect_layout,
)

Tensors = TypeVar("Tensors", bound=tuple[Any, ...])
ALIGNED = 16  # bytes


def problem_of(
    op: str,
    family: str,
    mode: str,
    q: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    needs_grad: bool,
    options: Iterable[str],
) -> Problem:
    """H counts value heads, since each of them has a state."""
    B, T, HV, V = v.shape
    return Problem(op, family, mode, B=B, T=T, H=HV, K=q.shape[3], V=V, N=sequences(v, bounds),
                   dtype=name_of(q.dtype), varlen=bounds is not None, needs_grad=needs_grad,
                   options=tuple(sorted(options)))


def way(problem: Callable[[Any, Any], Problem], x: Any, how: Any, family: str, mode: str,
        v_first: bool = False) -> tuple[Plan | None, str, str]:
    """The plan of a call with its path and its dot. A traced call has no plan before it runs."""
    q, v = x.q, x.v
    if torch.compiler.is_compiling():
        return None, *_traced_way(how.call, family, mode, name_of(q.dtype), head_size_class(q.shape[3]),
                                  head_size_class(v.shape[3]), v_first, q.device)
    T, H = q.shape[1:3]
    if 1 < T < H and x.bounds is None:  # packed tokens are counted by their bounds
        suspect_layout(how.call, T, H)
    plan = planned(problem(x, how), q.device)
    return plan, plan.problem.path, plan.problem.dot


@constant_while_tracing
def _traced_way(
    op: str,
    family: str,
    mode: str,
    dtype: str,
    K: int,
    V: int,
    v_first: bool,
    device: torch.device,
) -> tuple[str, str]:
    """Path and dot by what torch.compile may know while tracing: no B, T or H, so that none is ever
    specialised."""
    problem = planned(Problem(op, family, mode, B=1, T=1, H=1, K=K, V=V, N=1, dtype=dtype, varlen=False,
                              needs_grad=True, options=("v_first",) * v_first), device).problem
    return problem.path, problem.dot


def sequences(v: Tensor, bounds: Tensor | None) -> int:
    """How many sequences there are, each of which has states."""
    return v.shape[0] if bounds is None else bounds.shape[0] - 1


def empty_outputs(x: Any, how: Any, v_first: bool) -> tuple[Tensor, Tensor | None]:
    """Tensors like o and the final state (None where it is not asked for) as kernels return them."""
    (HV, V), K, N = x.v.shape[2:], x.q.shape[3], sequences(x.v, x.bounds)
    state = (N, HV, V, K) if v_first else (N, HV, K, V)
    wide = torch.promote_types(x.q.dtype, torch.float32)
    return (x.v.new_empty(x.v.shape, dtype=how.out_dtype),
            x.q.new_empty(state, dtype=wide) if how.has_ht else None)


def contiguous(grads: Any, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients of o, zeros like v for None, and of the final state, as kernels load them."""
    return (torch.zeros_like(v) if grads.o is None else grads.o.contiguous(),
            None if grads.ht is None else grads.ht.contiguous())


def aligned(x: Tensors) -> Tensors:
    """The same tensors, copies of those whose address is no multiple of 16: descriptors cannot begin there,
    and plain Triton compiles other code for them, in which no load is on its way beside a product, which faults
    where states are narrow (hopper-narrow-state). Copies tell, too, whether a gradient is wanted, by which
    backward's kernels are foreseen (ahead.py)."""
    if not reduce(or_, [0 if y is None else y.data_ptr() for y in x], 0) % ALIGNED:
        return x
    make: Any = x._make if hasattr(x, "_make") else tuple
    copied: Tensors = make([y if y is None or not y.data_ptr() % ALIGNED else
                            y.clone().requires_grad_(y.requires_grad) for y in x])
    return copied
