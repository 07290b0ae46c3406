"""Planning: ``plan(problem, target, policy)`` is the only function that decides how a call runs.

How it works:

1. The family's recipe lists the launches of the problem on the target.
2. The checks examine the launches in order. The first check that rejects one returns a Reason, which names
   remedies, best first.
3. The first remedy that the policy allows and that changes the problem rewrites it.
4. Everything is repeated from the start. This catches a remedy that runs into another limit, and it combines
   remedies.

When no check rejects the launches, the steps form the Plan. When no remedy is left, the Plan is a refusal,
which is also a value. Only ops raise an error for it.

``plan`` is pure and cached. This module imports neither torch nor triton.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps

from flashlin.compat.target import Target
from flashlin.guards.checks import CHECKS, Draft
from flashlin.guards.plan_types import Plan, Problem, Reason
from flashlin.kernels.families import FAMILIES, PUBLIC
from flashlin.kernels.remedies import REMEDIES
from flashlin.policy import Policy

# The family and the requested mode of every public op.
OPS: dict[str, tuple[str, str]] = {
    op.name: (op.family, op.mode) for op in PUBLIC.values() if not op.planned_as}


@lru_cache(maxsize=4096)
def plan(problem: Problem, target: Target, policy: Policy = Policy()) -> Plan:
    """Return the plan of a problem on a target: its launches, and the reasons for each rewrite.

    It never raises for an unsupported call: see ``Plan.refused``. Raises KeyError for a family that has no
    record.
    """
    family = FAMILIES[problem.family]
    asked = problem._replace(invariant=policy.invariant, portable=policy.portable,
                             trial=policy.canary == "trial")
    problem, steps = asked, list[tuple[Reason, str]]()
    while True:
        if problem.path == "torch":  # the limits of kernels do not apply to plain torch
            return Plan(asked, problem, target, (), tuple(steps))
        draft = Draft(problem, family, family.launches(problem, target), target, policy)
        reason = next((reason for check in CHECKS for reason in check(draft)), None)
        if reason is None:
            return Plan(asked, problem, target, draft.launches, tuple(steps))
        remedy = _remedy(reason, draft)
        if remedy is None:
            return Plan(asked, problem, target, (), tuple(steps), (reason,))
        name, problem = remedy
        # If one reason needs two rewrites by the same remedy, such as 8 warps and then 4, show them as one
        # step.
        if not steps or steps[-1] != (reason, name):
            steps.append((reason, name))


@contextmanager
def watching(see: Callable[[Plan], None]) -> Iterator[None]:
    """Pass every plan that any thread requests within the ``with`` block to ``see``.

    An exception in ``see`` ends the call that requested the plan. Nested blocks must end in reverse order.
    """
    watched = plan

    @wraps(watched)
    def seen(problem: Problem, target: Target, policy: Policy = Policy()) -> Plan:
        made = watched(problem, target, policy)
        see(made)
        return made
    vars(seen).update(cache_clear=watched.cache_clear, cache_info=watched.cache_info)
    globals()["plan"] = seen
    try:
        yield
    finally:
        globals()["plan"] = watched


def _remedy(reason: Reason, draft: Draft) -> tuple[str, Problem] | None:
    """Return the name of the best allowed remedy and the problem as it rewrites it, or None."""
    for name in reason.remedies:
        remedy = REMEDIES[name]
        if draft.policy.policy == "strict" and reason.forced and not remedy.exact:
            continue
        if draft.policy.path == "triton" and name == "torch_path":
            continue
        smaller = remedy.rewrite(draft.problem, draft.target, reason)
        if smaller is not None:
            return name, smaller
    return None


def inexact_steps(the_plan: Plan) -> tuple[tuple[Reason, str], ...]:
    """Return the steps that a user should be warned about once.

    These are the forced steps after which other kernels run, or the same kernels on other operands.
    """
    return tuple((reason, name)
                 for reason, name in the_plan.steps if reason.forced and not REMEDIES[name].exact)
