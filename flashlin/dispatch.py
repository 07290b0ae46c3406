"""plan(problem, target, policy): the only place that decides.

How it works. A family's recipe says which launches the problem would make on the target. The checks look at
them in order; the first one that objects answers with a Reason, which names remedies, best first. The first
remedy that the policy allows and that can still make the problem smaller rewrites it. Then everything is
asked again, from the start, so that a remedy that runs into another limit is caught and remedies combine.
When nothing objects, the trail is the Plan; when no remedy is left, the Plan is a refusal, which is a value
too: only ops raise. Pure and cached; imports neither torch nor triton.
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

# Every public op: its family, and the mode it asks for.
OPS: dict[str, tuple[str, str]] = {
    op.name: (op.family, op.mode) for op in PUBLIC.values() if not op.planned_as}


@lru_cache(maxsize=4096)
def plan(problem: Problem, target: Target, policy: Policy = Policy()) -> Plan:
    """What this call would do on that machine, and why. Never raises for an unsupported call: see
    ``Plan.refused``.

    Raises KeyError for a family that has no record.
    """
    family = FAMILIES[problem.family]
    asked = problem._replace(invariant=policy.invariant, trial=policy.canary == "trial")
    problem, steps = asked, list[tuple[Reason, str]]()
    while True:
        if problem.path == "torch":  # none of the limits of a kernel applies
            return Plan(asked, problem, target, (), tuple(steps))
        draft = Draft(problem, family, family.launches(problem, target), target, policy)
        reason = next((reason for check in CHECKS for reason in check(draft)), None)
        if reason is None:
            return Plan(asked, problem, target, draft.launches, tuple(steps))
        remedy = _remedy(reason, draft)
        if remedy is None:
            return Plan(asked, problem, target, (), tuple(steps), (reason,))
        name, problem = remedy
        # 8 warps allowed, then 4: one step to the reader where 4 are in use
        if not steps or steps[-1] != (reason, name):
            steps.append((reason, name))


@contextmanager
def watching(see: Callable[[Plan], None]) -> Iterator[None]:
    """Meanwhile ``see`` is given every plan that is asked for, in all threads; what it raises ends the call
    that asked. The last block begun has to end first."""
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
    """The best remedy that the policy allows, and the smaller problem that it makes."""
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
    """The steps a user should hear about once: forced, and not the same kernels on the same operands."""
    return tuple((reason, name)
                 for reason, name in the_plan.steps if reason.forced and not REMEDIES[name].exact)
