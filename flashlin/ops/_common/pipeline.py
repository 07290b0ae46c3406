"""The steps that every op takes from its checked arguments to its kernels: plan, cast and run.

An op checks its arguments by name (arguments.py, guards/) and puts them into two NamedTuples: ``x``, the
tensors, and ``how``, the scalars. ``Planned.run_planned`` takes the other steps:

- plan: in eager mode, ``planned`` turns the call's Problem into a Plan for this machine. While torch.compile
  traces, only the path is chosen, as a constant of the graph. It depends only on facts that are the same for
  all lengths.
- cast: the tensors get the dtype and the layout that the plan's kernels need (casting.py).
- run: the kernels (operator.py), or plain torch if that is the planned path.
"""
from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashlin import dispatch, policy
from flashlin.compat.target import probe
from flashlin.guards import deferred_checks
from flashlin.guards.plan_types import Plan, Problem, UnsupportedError
from flashlin.kernels.remedies import REMEDIES
from flashlin.ops._common import compile_ahead
from flashlin.ops._common.casting import DTYPE_NAMES, strictest
from flashlin.ops._common.replay import calls, remember
from flashlin.trial import canary

# Read the policy at import. Inside torch.compile the first read of os.environ would fail, and the policy
# would not be stored.
policy.current()
X = TypeVar("X", bound=tuple[Any, ...])
S = TypeVar("S", bound=tuple[Any, ...])
_told: set[tuple[str, str]] = set()


class TracedCall(NamedTuple):
    """The facts about a traced call that are the same for all its lengths.

    call: a string made by ``call_of``.
    K, V: head sizes, rounded up by ``head_size_class``.
    """
    call: str
    mode: str = ""
    K: int = 1
    V: int = 1


@dataclass(eq=False, kw_only=True)
class Planned(Generic[X, S]):
    """A set of kernels that a plan chooses, with the functions that plan, cast and run a checked call.

    family: name of the family that plans a traced call.
    problem: ``problem(x, how)`` returns the Problem.
    on_torch: ``on_torch(x, how)`` returns the kernels' results by plain torch; None if ``__call__``
        itself runs kernels or plain torch, as the plan says.
    cast: ``cast(x, how, dot)`` returns x and how in the form that the kernels need; None if no cast is
        needed.
    while_tracing: ``while_tracing(x, how)`` returns the TracedCall; None if torch.compile sees plain torch.
    inside: ``inside(x)`` is True if plain torch runs inside the library operator while torch.compile traces,
        because its graph would not be valid for all lengths.
    """
    family: str = ""
    problem: Callable[[X, S], Problem]
    on_torch: Callable[[X, S], Any] | None = None
    cast: Callable[[X, S, str], tuple[Any, S]] | None = None
    while_tracing: Callable[[X, Any], TracedCall] | None = lambda x, how: TracedCall(how.call)
    inside: Callable[[X], bool] = lambda x: False

    def __call__(self, plan: Plan | None, x: Any, how: S, *call: Any) -> Any:
        """Run the kernels.

        plan: None while torch.compile traces.
        call: the record of the call, if it may be replayed.
        """
        raise NotImplementedError

    def run_planned(self, x: X, how: S, key: Any = None, given: Sequence[Tensor | None] = ()) -> Any:
        """Plan, cast and run a checked call. Raises UnsupportedError if it cannot run on this machine.

        key: the call's key (``replay.key_of``) if ``run_again`` may repeat the call. In that case x may
            differ from the user's tensors only by casts.
        """
        plan = None
        path, dot = "torch", "native"
        if not torch.compiler.is_compiling():
            plan = planned(self.problem(x, how), x[0].device)
            path, dot = plan.problem.path, plan.problem.dot
        elif self.while_tracing is not None:  # library operators plan later, when they run
            path, dot = _route_of_traced(*self.while_tracing(x, how), self.family, x[0].device)
        if path == "torch" and self.on_torch is not None and not (plan is None and self.inside(x)):
            return self.on_torch(x, how)
        if self.cast is not None:
            x, how = self.cast(x, how, dot)
        return self(plan, x, how) if key is None else self(plan, x, how, remember(key, plan, given, x, how))

    def run_again(self, key: Any, given: Sequence[Tensor | None]) -> Any:
        """Run a call again without checks, if an earlier call had this key.

        Return None if no earlier call had the key, or if the call's plan now needs another path or dtype.
        """
        # Check the key first: a traced graph would guard on the contents of the table.
        if key is None or (call := calls.get(key)) is None:
            return None
        plan = planned(call.problem, given[0].device)  # type: ignore[union-attr]  # it has passed the checks
        if plan.problem.path != "triton" or plan.problem.dot != "native":
            return None
        return self(plan, call.cast(given) if call.copied else given, call.how, call)


def planned(problem: Problem, device: torch.device) -> Plan:
    """Return the plan for this call on this device under the current settings.

    Raises UnsupportedError for a refused plan. Warns once per op and reason if a remedy
    changes results or speed.
    """
    foreseen = compile_ahead.place.get() if device.type == "meta" else None
    if deferred_checks.owed and foreseen is None:
        deferred_checks.poll()
    the_plan = dispatch.plan(problem, probe(foreseen or device), policy.current())
    if the_plan.refused:
        raise UnsupportedError(the_plan)
    if the_plan.problem.path == "triton" and id(the_plan) not in canary.settled and foreseen is None:
        the_plan = canary.tried(the_plan, device, users_line() + 1)
    if the_plan.steps:
        _tell(the_plan)
    return the_plan


def _tell(the_plan: Plan) -> None:
    for reason, remedy in dispatch.inexact_steps(the_plan):
        if (the_plan.asked.op, reason.code) not in _told:
            _told.add((the_plan.asked.op, reason.code))
            warnings.warn(f"{the_plan.asked.op} {REMEDIES[remedy].means} here. {reason}",
                          stacklevel=users_line())


def users_line() -> int:
    """Return the stacklevel of the first frame outside flashlin, for a warning that the caller gives."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "flashlin":
        frame, level = frame.f_back, level + 1
    return level


# --- problems ---

def call_of(op: str, dtypes: Collection[torch.dtype], options: Iterable[str] = ()) -> str:
    """Return the op, the strictest dtype and the options joined into one string.

    A library operator accepts no tuple of strings, so they are joined.
    """
    return " ".join([op, strictest(dtypes), *options])


@lru_cache(maxsize=256)
def parsed(call: str) -> tuple[str, str, tuple[str, ...]]:
    """Return (op, dtype, sorted options) of a string that ``call_of`` made."""
    op, dtype, *options = call.split(" ")
    return op, dtype, tuple(sorted(options))


def problem_of_heads(op: str, family: str, mode: str, q: Tensor, v: Tensor, bounds: Tensor | None,
                     needs_grad: bool, options: Iterable[str]) -> Problem:
    """Return the Problem of an op over sequences of heads: q [B, T, H, K], v [B, T, HV, V].

    The Problem's H is HV, because each value head has its own state.
    """
    B, T, HV, V = v.shape
    return Problem(op, family, mode, B=B, T=T, H=HV, K=q.shape[3], V=V,
                   N=B if bounds is None else bounds.shape[0] - 1, dtype=DTYPE_NAMES[q.dtype],
                   varlen=bounds is not None, needs_grad=needs_grad, options=tuple(sorted(options)))


def traced_over_heads(x: Any, how: Any, mode: str, options: Sequence[str] = ()) -> TracedCall:
    """Return the TracedCall of an op over sequences of heads."""
    return TracedCall(call_of(how.call, {x.q.dtype}, options), mode, head_size_class(x.q.shape[3]),
                      head_size_class(x.v.shape[3]))


# --- tracing ---

def constant_while_tracing(function: Any) -> Any:
    """Mark a function that torch.compile runs during tracing, with its result a constant of the graph.

    It does the same as torch.compiler.assume_constant_result. That function would import the whole compiler,
    which eager calls do not need.
    """
    function._dynamo_marked_constant = True
    return function


@constant_while_tracing
def _route_of_traced(call: str, mode: str, K: int, V: int, family: str,
                     device: torch.device) -> tuple[str, str]:
    """Return (path, dot) of a traced call without reading B, T or H, so that none is specialised."""
    op, dtype, options = parsed(call)
    problem = planned(Problem(op, family, mode, B=1, T=1, H=1, K=K, V=V, N=1, dtype=dtype, varlen=False,
                              needs_grad=True, options=options), device).problem
    return problem.path, problem.dot


def exporting() -> bool:
    """Return True if torch.export traces this call.

    Exported lengths may be named dimensions. A graph of plain torch would guard on them, because the last
    chunk of a sequence is shorter.
    """
    return torch.compiler.is_compiling() and hasattr(torch.compiler,
                                                     "is_exporting") and torch.compiler.is_exporting()


def head_size_class(size: int) -> int:
    """Return the power of two to which recipes round up a head size.

    The size may be symbolic. Comparisons only add guards, so the size stays symbolic.
    """
    for power in (16, 32, 64, 128, 256, 512):
        if size <= power:
            return power
    return 1024
