"""What calls of all ops need on their way to a plan: one string that says which call it is, a plan that
torch.compile may know, tensors as kernels read them, packed sequences, tensors that are written to."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashlin import policy
from flashlin.guards.problem import Plan, Problem
from flashlin.guards.tensors import check_apart, check_cu_seqlens, check_floats, need_tensor, shown
from flashlin.ops._common.entry import without_autocast
from flashlin.ops._common.planned import constant_while_tracing, name_of, planned, under_autocast

# the dtype that machines have most to say about first
STRICTEST = (torch.float64, torch.bfloat16, torch.float16, torch.float32)


def strictest(dtypes: Collection[torch.dtype]) -> str:
    """The name of the dtype, among these, that machines have most to say about."""
    for dtype in STRICTEST:
        if dtype in dtypes:
            return name_of(dtype)
    raise ValueError(f"dtypes: got {sorted(map(str, dtypes))}, need one of {STRICTEST}")


def call_of(op: str, dtypes: Collection[torch.dtype], options: Iterable[str] = ()) -> str:
    """Op, strictest dtype and options in one string, because a library operator takes no tuple of strings."""
    return " ".join([op, strictest(dtypes), *options])


@lru_cache(maxsize=256)
def parsed(call: str) -> tuple[str, str, tuple[str, ...]]:
    """(op, dtype, sorted options) of such a string."""
    op, dtype, *options = call.split(" ")
    return op, dtype, tuple(sorted(options))


def route(call: str, family: str, device: torch.device, problem: Callable[[], Problem], K: int = 1,
          V: int = 1) -> tuple[Plan | None, str, str]:
    """(plan, path, dot). While torch.compile traces, library operators plan when they run, and there is only
    what may be known without sizes, which may be symbolic. K, V: what then stands for those of which kernels
    have limits, as classes of sizes."""
    if torch.compiler.is_compiling():
        return None, *_route_while_tracing(call, family, device, K, V)
    plan = planned(problem(), device)
    return plan, plan.problem.path, plan.problem.dot


@constant_while_tracing
def _route_while_tracing(call: str, family: str, device: torch.device, K: int, V: int) -> tuple[str, str]:
    op, dtype, options = parsed(call)
    problem = planned(Problem(op, family, "", B=1, T=1, H=1, K=K, V=V, N=1, dtype=dtype, varlen=False,
                              needs_grad=True, options=options), device).problem
    return problem.path, problem.dot


def contiguous(*tensors: Tensor | None) -> Any:
    """The tensors, each contiguous, with None where there is none."""
    return [None if t is None else t.contiguous() for t in tensors]


def dense(gradient: Tensor | None, x: Tensor) -> Tensor:
    """The gradient, contiguous; zeros of x's shape and dtype where there is none."""
    return x.new_zeros(x.shape) if gradient is None else gradient.contiguous()


def count_of(x: Tensor, bounds: Tensor | None) -> int:
    """The number of sequences in x [B, T, ...], packed with these edges or one a row."""
    return x.shape[0] if bounds is None else bounds.shape[0] - 1


def sequences(x: Tensor, cu_seqlens: Any, cu_seqlens_cpu: Any = None) -> tuple[Tensor | None, int]:
    """The edges that kernels may trust of the sequences packed in x [B, T, ...], None where each row is a
    sequence; and how many sequences there are."""
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu: got a tensor without cu_seqlens, need both")
        return None, x.shape[0]
    bounds = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, x.shape, x.device, policy.current().debug, "x")
    return bounds, bounds.shape[0] - 1


def check_nonempty(name: str, x: Any, meaning: str, dims: Collection[int], letter: str = "D",
                   at: int = -1) -> None:
    """x is a floating-point tensor of one of these numbers of dimensions (none: any but 0), and dimension
    ``at``, which ``meaning`` calls by that letter, is not empty."""
    check_floats(name, x, meaning)
    if x.ndim == 0 or (dims and x.ndim not in dims) or x.shape[at] == 0:
        raise ValueError(f"{name}: got shape {shown(x.shape)}, need {meaning} with {letter} of at least 1")


def check_optional(beside: str, first: Tensor,
                   given: Iterable[tuple[str, Any, tuple[int | None, ...], str]]) -> None:
    """Each (name, tensor or None, shape, meaning) that is there is as ``need_tensor`` says, on the device of
    ``first``, which is called ``beside``."""
    for name, x, shape, meaning in given:
        if x is not None:
            need_tensor(name, x, shape, meaning, first.device, beside)


def check_linear(first: str, x: Tensor, **given: Tensor | None) -> None:
    """Raise TypeError unless weights and biases of a linear layer have the dtype of x, or autocast casts
    them. first: the name of x in the error."""
    if not under_autocast(x):
        for name, weight in given.items():
            if weight is not None and weight.dtype != x.dtype:
                raise TypeError(f"{name}: got dtype {weight.dtype}, need {x.dtype}, as {first} (or autocast)")


@without_autocast
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x W^T + b of a linear layer, with the product computed in that dtype."""
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def check_written(name: str, x: Tensor, op: str, why: str) -> None:
    """x, which the op overwrites, wants no gradient, and each of its elements has a place of its own. why:
    the end of the sentence that says so."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: got a tensor that requires a gradient, need one that does not: "
                         f"it is {why}")
    check_apart(name, x, op)
