"""Tests of known issues in plans: the releases and GPUs that have them, and the traits that trigger them.

Planning avoids issues with remedies, and only reports the others.
"""
from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from packaging.version import Version

import flashlin
from flashlin.compat.known import KnownIssue
from flashlin.compat.known_issues import KNOWN_ISSUES, issues_here
from flashlin.compat.target import USUAL_AMD, Target, parse
from flashlin.compat.traits import CALL, OVERLAPPED, TILE_FACTS, TRAITS, of_tile, trait_set
from flashlin.guards import checks
from flashlin.guards.plan_types import Launch, Plan, traits_of
from flashlin.kernels import families
from flashlin.kernels.configs import Config, Strip
from flashlin.kernels.dplr.recipe import narrow_grads
from flashlin.kernels.families import FAMILIES
from flashlin.kernels.scans import narrow_state
from flashlin.policy import Policy, from_environment
from tests.plan.test_plan import AUTO, BUILDS, ENDS, RELEASES, asked_of, few, fresh, target, targets

RESULTS = Path(__file__).parents[2] / "matrix" / "results"

# Issues of all AMD GPUs, as compilation for each has shown. Every other AMD issue names its GPUs.
OF_ALL_AMD = {"amd-loop-counts"}


def before(version: str) -> str:
    """Return a release just before ``version``."""
    major, minor, micro = Version(version).release
    return (f"{major}.{minor}.{micro - 1}" if micro else f"{major}.{minor - 1}.99" if minor
            else f"{major - 1}.99.99")


def afflicted(issue: KnownIssue) -> Target:
    """Return a target that has the issue, with the oldest GPU and Triton of its ranges."""
    if issue.amd:
        arch = next(arch for arch in USUAL_AMD if arch.startswith(issue.amd))
        return parse(f"{arch},triton={issue.since or '3.0.0'}")
    major, minor = issue.capabilities[0]
    return target(issue.since or "3.0.0",
                  10 * major + minor)._replace(ptxas=issue.ptxas_since or "12.8.93")


def trigger(issue: KnownIssue) -> Launch:
    return Launch("some_kernel", (1,), issue.min_warps, issue.min_stages, (), 0, 0, issue.traits)


def by_id(issue: KnownIssue) -> str:
    return issue.id


def test_ids_of_known_issues_are_unique() -> None:
    assert len({issue.id for issue in KNOWN_ISSUES}) == len(KNOWN_ISSUES)


@pytest.mark.parametrize("issue", KNOWN_ISSUES, ids=by_id)
def test_a_known_issue_begins_at_since_and_ends_at_fixed_in(issue: KnownIssue) -> None:
    on = afflicted(issue)
    assert issue.here(on)
    since, fixed_in = issue.since, issue.fixed_in
    if since:
        assert issue.here(on._replace(triton=since
                                      + "rc1")) and not issue.here(on._replace(triton=before(since)))
    if fixed_in:
        assert not issue.here(on._replace(triton=fixed_in)) and not issue.here(on._replace(triton=fixed_in
                                                                                           + ".post1"))
        assert all(issue.here(on._replace(triton=fixed_in + build))
                   for build in (".dev20250401", "rc1", "+git1a2b3c"))
        assert issue.here(on._replace(triton=before(fixed_in)))
    if issue.ptxas_fixed_in:
        assert not issue.here(on._replace(ptxas=issue.ptxas_fixed_in))
    assert not issue.here(on._replace(triton=""))


@pytest.mark.parametrize("issue", KNOWN_ISSUES, ids=by_id)
def test_a_known_issue_keeps_to_its_cards(issue: KnownIssue) -> None:
    on, (low, high) = afflicted(issue), issue.capabilities
    elsewhere = [on._replace(backend=backend, arch="") for backend in ("cpu", "hip", "interpreter")]
    assert not any(map(issue.here, elsewhere))
    if issue.amd:
        named = {arch for arch in USUAL_AMD if issue.here(on._replace(arch=arch))}
        assert named and named == {arch for arch in USUAL_AMD if arch.startswith(issue.amd)}
        assert (named == set(USUAL_AMD)) == (issue.id in OF_ALL_AMD)
        # NVIDIA GPUs whose capability resembles gfx90a, gfx11 and gfx12 do not have the issue.
        assert not any(issue.here(target(on.triton, sm)) for sm in (90, 110, 120))
        return
    assert issue.here(on._replace(capability=low)) and not issue.here(on._replace(capability=high))
    assert not issue.here(on._replace(capability=(low[0], low[1] - 1)))


@pytest.mark.parametrize("issue", KNOWN_ISSUES, ids=by_id)
def test_a_known_issue_objects_to_what_triggers_it_and_to_nothing_less(issue: KnownIssue) -> None:
    launch = trigger(issue)
    assert issue.hits(launch.traits, launch.num_warps, launch.num_stages)
    assert not issue.hits(launch.traits, issue.min_warps - 1, launch.num_stages)
    assert not issue.hits(launch.traits, launch.num_warps, issue.min_stages - 1)
    assert not any(issue.hits(launch.traits - {trait}, launch.num_warps, launch.num_stages)
                   for trait in launch.traits)


def test_a_known_issue_spares_what_it_says() -> None:
    issue = next(issue for issue in KNOWN_ISSUES if issue.id == "half-dot-34-pre-ampere")
    assert issue.hits(issue.traits, 4, 2) and not issue.hits(issue.traits | {"foreign"}, 4, 2)
    assert not any(issue.spared & issue.traits for issue in KNOWN_ISSUES)


def constants(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
            and isinstance(node.value, str)}


def test_every_trait_is_one_that_some_launch_can_have() -> None:
    """For each trait, there is a launch that can have it.

    A trait without a rule must occur by name in the code of flashlin.kernels. Traits that follow from a call
    of a function with a known name are excepted.
    """
    kernels = Path(families.__file__).parent
    named = set().union(*(constants(ast.parse(path.read_text())) for path in kernels.rglob("*.py")))
    given = {trait.name for trait in TRAITS.values() if trait.rule is None and trait.found != CALL}
    assert given - named == {"autotuned", OVERLAPPED}  # no launch has the first; recipes use the constant
    assert not {name for on in targets("3.6.0") for asked in few()
                for launch in FAMILIES[asked.family].launches(asked, on) for name in launch.traits} - {*TRAITS}


@pytest.mark.parametrize("make", [
    lambda: trait_set("dot", "half_dott"), lambda: traits_of(few()[0], "half_dott"),
    lambda: of_tile("half_dott", 64, 64, 64),
], ids=["known issue", "recipe", "tile"])
def test_a_misspelt_trait_is_an_error_that_names_the_others(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"trait: got half_dott, need one of .*did you mean half_dot\?"):
        make()


def test_what_asks_for_a_trait_asks_for_one_that_there_is() -> None:
    """Every trait that flashlin's code tests exists.

    A misspelled name in ``"dot" in launch.traits`` raises no error, so the test searches the source code.
    """
    asked = set[str]()
    for path in Path(flashlin.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and any(ast.unparse(side).endswith("traits")
                                                     for side in (node.left, *node.comparators)):
                asked |= constants(node)
    assert asked >= {"dot", "half_dot", "bf16", "narrow_state"} and not asked - {*TRAITS}


def test_facts_of_a_tile_and_other_tile_come_together() -> None:
    for issue in KNOWN_ISSUES:
        assert bool(issue.traits & TILE_FACTS) == (issue.remedies[:1] == ("other_tile",)), issue.id
    assert frozenset[str]().union(*(issue.traits for issue in KNOWN_ISSUES)) >= TILE_FACTS


def test_every_tile_that_failed_on_a_card_is_one_that_an_issue_objects_to() -> None:
    """A known issue rejects every tile that failed in the run of matrix/narrow_tiles.py.

    Each of the three issues on narrow tiles is confirmed by a failure in that record.
    """
    record = json.loads((RESULTS / "narrow-tiles-NVIDIA-H200-triton-3.6.0.json").read_text())
    on, failed = target(record["triton"], 90), set[str]()
    for row in record["rows"]:
        BT, BK, BV = (row["tile"].get(name, 64) for name in ("BT", "BK", "BV"))
        warps, stages = row["num_warps"], row["num_stages"]
        apart = {"dplr_prepare": of_tile("narrow_scores", BT, BK),
                 "dplr_grads": narrow_grads(BT, Strip(BK, BV, warps))}
        facts = apart.get(row["kernel"], narrow_state(Config(BT, BK, BV, warps, stages)))
        ids = {issue.id for issue in issues_here(on)
               if issue.traits & TILE_FACTS and issue.hits(facts | {"half_dot"}, warps, stages)}
        assert ids or row["found"] == "right", row
        failed |= ids if row["found"] != "right" else set()
    assert failed == {"hopper-narrow-state", "hopper-narrow-scores", "hopper-narrow-grads"}


def ours(issue: KnownIssue) -> bool:
    """Return True if a launch of flashlin's kernels would trigger the issue on a machine that has it.

    Other issues concern only kernels of users.
    """
    machines = filter(issue.here, itertools.chain.from_iterable(targets(triton) for triton in RELEASES))
    return any(issue.hits(launch.traits, launch.num_warps, launch.num_stages)
               for on in machines for asked in few() for launch in FAMILIES[asked.family].launches(asked, on))


@lru_cache(maxsize=1)
def codes() -> dict[Target, tuple[frozenset[str], ...]]:
    """Return by target, for each problem of ``few()``, the codes of all reasons in its plan.

    This takes ten seconds. Call it in tests only, because every worker repeats the collection of tests.
    """
    def of(plan: Plan) -> frozenset[str]:
        return frozenset(reason.code for reason in (*plan.refused, *(reason for reason, _ in plan.steps)))
    return {on: tuple(of(fresh(asked, on)) for asked in few()) for triton in BUILDS for on in targets(triton)}


@lru_cache(maxsize=1)
def met() -> frozenset[str]:
    """Return the codes of all reasons that occur in some plan of ``few()``."""
    return frozenset[str]().union(*itertools.chain.from_iterable(codes().values()))


@pytest.mark.parametrize("issue", [issue for issue in KNOWN_ISSUES if issue.remedies], ids=by_id)
@pytest.mark.alternate
def test_a_known_issue_with_remedies_is_met_wherever_it_is_triggered(issue: KnownIssue) -> None:
    assert (issue.id in met()) == ours(issue), (
        "no plan triggers it: another issue, earlier in KNOWN_ISSUES, rejects the same launches")
    asked = few()[0]
    on, family = afflicted(issue), FAMILIES[asked.family]
    draft = checks.Draft(asked, family, (trigger(issue),), on, AUTO)
    # The launch is made by hand, because some issues are triggered by no launch of a recipe.
    assert next(checks.check_known_issues(draft)).remedies


def test_a_known_issue_without_remedies_is_told_and_never_acted_upon() -> None:
    assert not met() & {issue.id for issue in KNOWN_ISSUES if not issue.remedies}


@pytest.mark.parametrize("issue", [issue for issue in KNOWN_ISSUES if issue.remedies], ids=by_id)
@pytest.mark.alternate
def test_ignoring_a_known_issue_removes_its_steps(issue: KnownIssue) -> None:
    ignoring = from_environment({"FLASHLIN_IGNORE": f"descriptors-allocator, {issue.id}"})
    removed = 0
    for on in filter(issue.here, itertools.chain.from_iterable(targets(triton) for triton in RELEASES)):
        for asked, plain in zip(few()[::3], codes()[on][::3], strict=True):
            assert issue.id not in {reason.code for reason, _ in fresh(asked, on, ignoring).steps}
            removed += issue.id in plain
    assert bool(removed) == (issue.id in met())


def test_policy_off_takes_no_step_for_a_known_issue() -> None:
    issues = {issue.id for issue in KNOWN_ISSUES}
    for number, on in enumerate(on for triton in ENDS for on in targets(triton)):
        assert not any(issues & {reason.code for reason, _ in fresh(asked, on, Policy("off")).steps}
                       for asked in asked_of(number, few()))
