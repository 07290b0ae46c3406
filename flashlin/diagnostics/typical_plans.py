"""The plans of dispatch for typical calls on a target, one row per op, and the known issues that they meet.

Pure functions: they do not examine the machine.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flashlin import dispatch
from flashlin.compat.known import KnownIssue
from flashlin.compat.known_issues import KNOWN_ISSUES, issues_here
from flashlin.compat.releases import RELEASES, planned_as
from flashlin.compat.target import GPUS, Target
from flashlin.compat.versions import is_unreleased, release
from flashlin.diagnostics.report import STATUSES, Check, Issue, OpPlan, Status, line
from flashlin.guards import launch_table
from flashlin.guards.family import USES, problem_of
from flashlin.guards.launch_table import TRUST
from flashlin.guards.plan_types import Plan, advice
from flashlin.kernels.families import PUBLIC, family_of
from flashlin.kernels.families import typical as usual
from flashlin.kernels.remedies import REMEDIES
from flashlin.policy import Policy

DTYPES = ("bfloat16", "float16", "float32")


class Kind(NamedTuple):
    """The properties that distinguish the typical calls of an op.

    dtype: dtype of the inputs.
    size: name of the use, such as ``training`` or ``decoding``.
    grad: True for a call with gradients.
    """
    dtype: str
    size: str
    grad: bool


# The ways to run a call, best first.
WAYS = ("kernels", "fewer warps", "batch in parts", "slow kernels", "untested kernels", "fp32 copies",
        "plain torch", "cannot run")
WAY_OF = {"limit_num_warps": "fewer warps", "chunk_batch": "batch in parts", "via_fp32": "fp32 copies"}
Planned = dict[Kind, Plan]
ISSUES = {issue.id for issue in KNOWN_ISSUES}


def typical(op: str, target: Target, policy: Policy) -> Planned:
    """Return the plans of an op's typical calls."""
    return {Kind(dtype, use, grad): dispatch.plan(
                problem_of(family_of(op), PUBLIC[op], sizes, dtype, grad), target, policy)
            for use, sizes in usual(op).items()
            for grad in ((False,) if use == "decoding" else (False, True)) for dtype in DTYPES}


def summary(op: str, where: str, planned: Planned) -> OpPlan:
    """Return one row of the report for all typical calls of an op."""
    told: list[tuple[str, str]] = []  # (reason, remedy)
    for plan in planned.values():
        told += [(reason.code if reason.code in ISSUES else f"{reason.code}: {reason.got}",
                  REMEDIES[remedy].means)
                 for reason, remedy in plan.steps if reason.forced or remedy == "torch_path"]
        told += [(str(reason), advice(plan)) for reason in plan.refused]
        told += [(f"may be wrong: {issue.id}, whose check is switched off",
                  "FLASHLIN_POLICY=auto and no FLASHLIN_IGNORE") for issue in unguarded(plan)]
    doubts = sorted({doubted(plan) for plan in planned.values()} - {PROVEN}, key=lambda one: one.order)
    told += [(one.because, one.remedy) for one in {one.way: one for one in doubts}.values()]  # worst of each
    by_way = sorted(planned.values(), key=lambda plan: WAYS.index(_way_of(plan)))
    return OpPlan(op=op, where=where, path=ways(planned),
                  way=max([way_of(planned), *(one.way for one in doubts)], key=WAYS.index),
                  verdict=min(map(judged, planned.values()), key=STATUSES.index),
                  because=_once(because for because, _ in told), remedy=_once(remedy for _, remedy in told),
                  cost=_once(filter(None, map(cost, by_way))), evidence=evidence(planned.values()))


def _once(texts: Iterable[str]) -> str:
    """Join the texts without repetitions, in the order of their first occurrence."""
    return "; ".join(dict.fromkeys(texts))


def judged(plan: Plan) -> Status:
    """Return the status of a plan."""
    if plan.refused or unguarded(plan):
        return "problem"
    if cost(plan):
        return "degraded"
    return "worked around" if any(reason.forced for reason, _ in plan.steps) else "ok"


def cost(plan: Plan) -> str:
    """Return the cost on a GPU of the plan's remedies, in words; ``""`` if kernels run on unchanged tensors.

    If several remedies have a cost, the last one is returned. Without any, the cost of untested or slow
    kernels is returned (``doubted``).
    """
    if plan.target.other_build:
        return "the GPU is not used: torch computes on the CPU"
    costs = [REMEDIES[remedy].cost for _, remedy in plan.steps if REMEDIES[remedy].cost]
    return (costs or [doubted(plan).cost])[-1] if plan.target.backend in GPUS else ""


class Doubt(NamedTuple):
    """A reason to doubt that the kernels of a plan are right or fast on a GPU.

    order: the sort key; the largest is the worst.
    way: one of WAYS.
    because, cost, remedy: texts of the report.
    """
    order: int
    way: str
    because: str
    cost: str
    remedy: str


PROVEN = Doubt(0, "kernels", "", "", "")
UNTESTED = Doubt(10 ** 9, "untested kernels", "never tested on this kind of GPU under this Triton",
                 "the first call tests them in a child process, which takes some seconds",
                 "flashlin warmup --head-dim 64 --head-dim 128 --head-dim 256 tests most of them in advance")


def doubted(plan: Plan) -> Doubt:
    """Return the doubt about a plan; PROVEN if its kernels ran on such a GPU, or compile with few spills."""
    if plan.path != "triton" or plan.target.backend not in GPUS:
        return PROVEN
    unproven = {launch.config: launch for launch in plan.launches
                if launch_table.trust(launch.config, plan.target) != "ran"}
    if any(launch_table.trust(config, plan.target) == "unknown" for config in unproven):
        return UNTESTED
    slow = launch_table.slow_on(plan.target.sm, plan.target.triton)
    return max((Doubt(slow[config].spills, "slow kernels", f"{launch.kernel} {slow[config]}",
                      "registers that do not fit are kept in GPU memory, and the calls have not been timed",
                      "flashlin uses the configuration that spills least")
                for config, launch in unproven.items() if config in slow), default=PROVEN)


def unguarded(plan: Plan) -> list[KnownIssue]:
    """Return the known issues that a plan meets although a remedy exists, because the policy ignores them."""
    return [issue for issue in issues_here(plan.target) if issue.remedies and meets(issue, plan)]


def meets(issue: KnownIssue, plan: Plan) -> bool:
    """Return True if a launch of the plan has the traits of the issue."""
    return any(issue.hits(launch.traits, launch.num_warps, launch.num_stages) for launch in plan.launches)


def way(plan: Plan) -> str:
    """Return two or three words that say how a call runs."""
    if plan.path != "triton":
        return "cannot run" if plan.refused else plan.path
    taken = {remedy for _, remedy in plan.steps}
    return " ".join(["triton",
                     *(remedy.note.format(plan.problem)
                       for name, remedy in REMEDIES.items() if name in taken and remedy.note)])


def way_of(planned: Planned) -> str:
    """Return the most costly path of the typical calls, such as ``plain torch`` (see ``WAYS``)."""
    return max(map(_way_of, planned.values()), key=WAYS.index)


def _way_of(plan: Plan) -> str:
    """Return the most costly path that a plan takes."""
    base = "cannot run" if plan.refused else "plain torch" if plan.path == "torch" else "kernels"
    return max([base, *(WAY_OF[remedy] for reason, remedy in plan.steps
                        if reason.forced and remedy in WAY_OF and plan.path == "triton")], key=WAYS.index)


def ways(planned: Planned) -> str:
    """Return a text that says how the typical calls run, by dtype and kind of call.

    Examples are ``triton``, and ``bfloat16: torch (with gradients), else triton; float16: triton``.
    """
    by_dtype: dict[str, list[str]] = {}
    for dtype in DTYPES:
        mine = {kind: way(plan) for kind, plan in planned.items() if kind.dtype == dtype}
        # the most common way comes last, without conditions
        counted = sorted(dict.fromkeys(mine.values()), key=list(mine.values()).count)
        parts = [f"{one} ({_condition({kind for kind in mine if mine[kind] == one}, set(mine))})"
                 for one in counted[:-1]]
        by_dtype.setdefault(", ".join([*parts, f"else {counted[-1]}" if parts else counted[-1]]),
                            []).append(dtype)
    return "; ".join(f"{', '.join(dtypes)}: {text}" if len(by_dtype) > 1 else text
                     for text, dtypes in by_dtype.items())


def _condition(some: set[Kind], every: set[Kind]) -> str:
    """Return a property that all calls in ``some`` have, and no other call of ``every`` has."""
    for grad, words in ((True, "with gradients"), (False, "without gradients")):
        if some == {kind for kind in every if kind.grad == grad}:
            return words
    sizes = sorted({kind.size for kind in some}, key=USES.index)
    if some == {kind for kind in every if kind.size in sizes}:
        return ", ".join(sizes)
    return ", ".join(f"{kind.size} {'with' if kind.grad else 'without'} gradients" for kind in sorted(some))


def evidence(plans: Iterable[Plan]) -> str:
    """Return the evidence for the plans that launch kernels of flashlin.

    Each plan counts with its least proven launch, see ``guards.launch_table``. The slowest launch that is
    only compiled is also named.
    """
    kernels = [plan for plan in plans if plan.path == "triton"]
    if not kernels:
        return "plain torch"
    if kernels[0].target.backend == "interpreter":
        return "interpreter"
    known = [max((launch_table.trust(launch.config, plan.target) for launch in plan.launches),
                 key=TRUST.index, default="unknown") for plan in kernels]
    levels = sorted(set(known), key=TRUST.index)
    words = {"unknown": "no record", "failed": "does not hold"}
    told = [words.get(level, level) + (f" ({known.count(level)} of {len(known)} calls)" if levels[1:] else "")
            for level in levels]
    slow = {(figures.spills, f"slow: {launch.kernel} {figures}") for plan in kernels
            for launch in plan.launches
            if (figures := launch_table.slow_on(plan.target.sm, plan.target.triton).get(launch.config))
            and launch_table.trust(launch.config, plan.target) != "ran"}
    return ", ".join([*told, *(text for _, text in sorted(slow)[-1:])])


def issue_row(issue: KnownIssue, where: str, plans: list[Plan]) -> Issue:
    """Return the row of the report for a known issue on these devices, given all their plans."""
    status: Status = "ok"
    detail = "the typical calls do not meet it"
    if any(issue in unguarded(plan) for plan in plans):
        status, detail = "problem", f"met, and its check is switched off; need {issue.need}"
    elif any(reason.code == issue.id for plan in plans for reason, _ in plan.steps):
        status, detail = "worked around", f"need {issue.need}"
    elif any(meets(issue, plan) for plan in plans):
        status, detail = "could not check", f"no plan avoids it; need {issue.need} ({issue.proof})"
    return Issue(id=issue.id, where=where, status=status, effect=issue.effect, detail=detail, url=issue.url)


def unknown(where: str, target: Target) -> Iterator[Check]:
    """Yield the lines on a Triton that is not in the table of releases.

    For a nightly or a build from git, it is unknown which fixes it contains.
    """
    place, other = "" if where == "named" else f"{where}: ", planned_as(target.triton)
    if other == RELEASES[-1].version:
        yield line("newer", "could not check",
                   f"{place}triton {target.triton} is newer than {other}, the newest known release: planned "
                   "as that release, so newer failures are not avoided")
    elif other:
        yield line("unknown", "could not check",
                   f"{place}triton {target.triton} is not known: planned as {other}, the nearest older release")
    if not is_unreleased(target.triton):
        return
    fixed = ".".join(map(str, release(target.triton)))
    doubtful = [issue.id for issue in issues_here(target)
                if issue not in issues_here(target._replace(triton=fixed))]
    by = f"{', '.join(doubtful)}, fixed in {fixed}" if doubtful else "the same issues as a release"
    yield line("unreleased", "worked around" if doubtful else "ok",
               f"{place}triton {target.triton} is an unreleased build: treated as affected by {by}")


def price(planned: Planned) -> int:
    """Return the price of an op: the sum of the prices of its typical calls.

    A call has price 0 if nothing forces another path than the normal one. Otherwise it has the highest
    ``Remedy.burden`` of its forced remedies: 1 for an exact one such as fewer warps, 2 for fp32 copies and 3
    for plain torch. A call that cannot run has price 4.
    """
    return sum(4 if plan.refused else max((REMEDIES[remedy].burden for reason, remedy in plan.steps
                                           if reason.forced), default=0) for plan in planned.values())
