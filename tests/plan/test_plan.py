"""Tests of properties that every plan must have, for all machines and kinds of calls, and of plan snapshots.

The snapshots are in snapshots.json. After a deliberate change, update them from the root of the checkout and
review the diff:

    python -m tests.plan.test_plan --write
"""
from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from flashlin import dispatch
from flashlin.compat import releases
from flashlin.compat.known_issues import KNOWN_ISSUES, issues_here
from flashlin.compat.target import Target, bundled_ptxas, parse
from flashlin.compat.traits import TILE_FACTS
from flashlin.compat.versions import release
from flashlin.guards import checks
from flashlin.guards.checks import AXIS_LIMITS, CHECKS, MAX_HEAD_DIM, OFFSET_LIMIT
from flashlin.guards.family import Sizes, problem_of
from flashlin.guards.plan_types import Launch, Plan, Problem, Reason
from flashlin.kernels.families import FAMILIES, PUBLIC, family_of, typical
from flashlin.kernels.remedies import REMEDIES
from flashlin.policy import CHOICES, Policy
from tests.share import share

SNAPSHOTS = Path(__file__).with_name("snapshots.json")

RELEASES = tuple(one.version for one in releases.RELEASES)
BUILDS = ("", "2.3.1", *RELEASES, "3.4.0.dev20250401", "3.6.0+git1a2b3c", "3.7.0rc1")
CAPABILITIES = (60, 70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
# Tests of every policy use only these releases.
ENDS = ("", "3.0.0", "3.2.0", "3.3.1", "3.6.0", RELEASES[-1])
# Each machine plans one of so many problems. The number is prime, so that all dtypes and sizes take part.
SHARE = 7
POLICIES = tuple(Policy(policy=policy, path=path) for policy in CHOICES["policy"] for path in CHOICES["path"])
AUTO = Policy()

WAYS = tuple(dict.fromkeys(dispatch.OPS.values()))  # all pairs (family, mode); several ops share one
OP_OF = {way: next(op for op, its in dispatch.OPS.items() if its == way) for way in WAYS}
# These ops share (family, mode) with another op, but have other optional tensors and so other kernels.
OTHERS = ("chunk_rwkv7", "rwkv7")
DTYPES = ("bfloat16", "float16", "float32", "float64")
DIMS = (16, 64, 100, 128, 256, 512, 513, 1024)
# (B, T, H): usual, decoding, B * H > 65,535 (fails in fla), empty, more programs than a grid has, offsets
# beyond 32 bits
SIZES = ((2, 2048, 8), (4, 1, 16), (10923, 64, 6), (0, 128, 4), (2**29, 64, 6), (8, 64, 2**22))


def target(triton: str, sm: int, backend: str = "cuda") -> Target:
    """Return the target with this Triton and compute capability; ``triton=""`` means without Triton."""
    found = parse(f"triton={triton or '3.0.0'},sm={sm},torch=2.9.0,backend={backend}")
    return found._replace(triton=triton,
                          ptxas=bundled_ptxas(triton, found.capability) if backend == "cuda" else "")


def targets(triton: str) -> Iterator[Target]:
    yield from (target(triton, sm) for sm in CAPABILITIES)
    yield from (target(triton, 90, "hip"), parse("backend=cpu,sm=0")._replace(triton=triton))
    if triton:
        yield parse(f"triton={triton},backend=interpreter")


def problem(
    op: str, dtype: str, K: int, V: int, size: tuple[int, int, int] = (2, 2048, 8), varlen: bool = False,
    needs_grad: bool = True,
) -> Problem:
    """Return the problem that explain makes for these sizes, with a gate.

    T is at most 2**30 (2**31 for one head), so that a grid can count rows and tokens.
    """
    family, usual, (B, T, H) = family_of(op), typical(op), size
    first = next(iter(usual.values()))
    sizes = Sizes(B, T, H, K, V if first.V >= 16 else first.V)  # small V: taps of a filter, or follows from K
    if varlen and any(known.packed for known in usual.values()):
        sizes = sizes._replace(B=1, T=B * T, N=B, packed=True)
    options = {*PUBLIC[op].options, *(["g"] if family.head_dim else [])}
    gated = PUBLIC[op]._replace(counted=None, options=tuple(sorted(options)))
    asked = problem_of(family, gated, sizes, dtype, needs_grad)
    return asked._replace(T=min(asked.T, 2**31 if asked.H == 1 else 2**30))


def asked_of(number: int, problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Return the share of the problems that machine ``number`` plans.

    Neighbouring releases or GPUs plan nearly alike, so seven consecutive machines plan all problems together.
    """
    return tuple(share(problems, number, SHARE))


def unique(found: Iterator[Problem]) -> tuple[Problem, ...]:
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=1)
def usual() -> tuple[Problem, ...]:
    """Return problems of usual size for every pair of head sizes.

    They have gradients, because such calls include all launches of calls without gradients.
    """
    return unique(problem(op, dtype, K, V)
                  for op, dtype, K, V in itertools.product((*OP_OF.values(), *OTHERS), DTYPES, DIMS, DIMS))


@lru_cache(maxsize=1)
def odd() -> tuple[Problem, ...]:
    """Return problems of every size in SIZES, packed and dense, with and without gradients."""
    return unique(problem(op, dtype, 128, 256, size, varlen, grad) for op, dtype, size, varlen, grad in
                  itertools.product((*OP_OF.values(), *OTHERS), DTYPES, SIZES, (False, True), (False, True)))


@lru_cache(maxsize=1)
def few() -> tuple[Problem, ...]:
    """Return a small set of problems for tests of every policy."""
    return unique(problem(OP_OF[way], dtype, K, K, size, needs_grad=grad) for way, dtype, K, size, grad in
                  itertools.product(WAYS, DTYPES, (64, 512, 1024), (SIZES[0], SIZES[4]), (False, True)))


def too_wide(asked: Problem) -> bool:
    """Return True if the problem exceeds a limit of its family."""
    return any(getattr(asked, axis) > most for axis, most, _ in FAMILIES[asked.family].limits)


# Properties that every plan must have. Each function returns True if the plan has the property.

def it_is_short(plan: Plan, policy: Policy) -> bool:
    return len(plan.steps) <= 64  # 31 halvings of a batch, and other steps


def no_reason_stands(plan: Plan, policy: Policy) -> bool:
    """Return True if no check has a reason against the plan's launches.

    Refusals and plans on the torch path have no launches to check.
    """
    draft = checks.Draft(plan.problem, FAMILIES[plan.problem.family], plan.launches, plan.target, policy)
    return bool(plan.refused) or plan.path == "torch" or not any(list(check(draft)) for check in CHECKS)


def the_launches_are_those_of_the_problem(plan: Plan, policy: Policy) -> bool:
    family = FAMILIES[plan.problem.family]
    return plan.launches == (family.launches(plan.problem, plan.target) if plan.path == "triton" else ())


def a_refusal_had_no_remedy_left(plan: Plan, policy: Policy) -> bool:
    """Return True if each reason of a refusal is complete, and no usable remedy is left for it.

    A complete reason says what it got and what it needs, and names remedies. A remedy is not usable if the
    policy forbids it or if it no longer changes the problem.
    """
    def barred(name: str) -> bool:
        return (policy.policy == "strict" and not REMEDIES[name].exact) or (policy.path == "triton"
                                                                            and name == "torch_path")
    return all(reason.remedies and reason.got and reason.need
               and all(barred(name) or REMEDIES[name].rewrite(plan.problem, plan.target, reason) is None
                       for name in reason.remedies)
               for reason in plan.refused)


def auto_refuses_nothing(plan: Plan, policy: Policy) -> bool:
    return policy.policy == "strict" or policy.path == "triton" or not plan.refused


def strict_stays_exact(plan: Plan, policy: Policy) -> bool:
    return policy.policy != "strict" or all(REMEDIES[name].exact or not reason.forced
                                            for reason, name in plan.steps)


def the_path_is_the_one_asked_for(plan: Plan, policy: Policy) -> bool:
    return plan.path in {"auto": ("triton", "torch", "refused"), "triton": ("triton", "refused"),
                         "torch": ("torch",)}[policy.path]


def launches_fit_the_machine(plan: Plan, policy: Policy) -> bool:
    """Return True if all launches respect the limits of the machine, independently of flashlin's own checks.

    The limits concern the grid, shared memory, offsets and threads. Tile sizes must be positive powers of
    two. But STAGES and REGISTERS need not be powers of two, and SIDE, REGISTERS and BOUNDED may be 0.
    """
    return all(launch.shared <= plan.target.shared and launch.span <= OFFSET_LIMIT
               and 32 * launch.num_warps <= 1024
               and all(0 <= size <= limit for size, limit in zip(launch.grid, AXIS_LIMITS, strict=False))
               and all((size > 0 or name in ("SIDE", "REGISTERS", "BOUNDED"))
                       and (size & (size - 1) == 0 or name in ("STAGES", "REGISTERS"))
                       for name, size in launch.tile)
               for launch in plan.launches)


def nothing_that_matters_was_rewritten(plan: Plan, policy: Policy) -> bool:
    """Return True if the remedies changed only how the call runs, not its result."""
    how = dict(mode="", path="", max_warps=0, dot="", batch_part=0, avoid=frozenset())
    return plan.problem._replace(**how) == plan.asked._replace(**how)


PROMISES: tuple[Callable[[Plan, Policy], bool], ...] = (
    it_is_short, no_reason_stands, the_launches_are_those_of_the_problem, a_refusal_had_no_remedy_left,
    auto_refuses_nothing, strict_stays_exact, the_path_is_the_one_asked_for, launches_fit_the_machine,
    nothing_that_matters_was_rewritten)


def broken(plan: Plan, policy: Policy) -> list[str]:
    return [f"{promise.__name__}, {policy}:\n{plan}" for promise in PROMISES if not promise(plan, policy)]


def shown(failures: list[str]) -> str:
    return f"{len(failures)} failures, the first of which are\n" + "\n\n".join(failures[:3])


fresh: Callable[..., Plan] = dispatch.plan.__wrapped__  # plans without the cache


@pytest.mark.parametrize("triton", BUILDS, ids=lambda triton: triton or "none")
@pytest.mark.alternate
def test_plans_keep_their_promises(triton: str) -> None:
    failures = [failure
                for number, on in enumerate(targets(triton), BUILDS.index(triton))
                for asked in asked_of(number, usual() + odd())
                for failure in broken(fresh(asked, on, AUTO), AUTO)]
    assert not failures, shown(failures)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.policy}-{policy.path}")
@pytest.mark.alternate
def test_plans_keep_their_promises_under_every_policy(policy: Policy) -> None:
    machines = [on for triton in ENDS for on in targets(triton)]
    failures = [failure
                for number, on in enumerate(machines, POLICIES.index(policy))
                for asked in asked_of(number, few())
                for failure in broken(fresh(asked, on, policy), policy)]
    assert not failures, shown(failures)


@pytest.mark.alternate
def test_the_same_question_has_the_same_answer() -> None:
    for triton, policy in itertools.product(("3.2.0", "3.7.1"), POLICIES):
        for on, asked in itertools.product(targets(triton), few()[::19]):
            first = fresh(asked, on, policy)
            assert first == fresh(asked, on, policy) == dispatch.plan(asked, on, policy)
            assert hash(first) == hash(dispatch.plan(asked, on, policy))


def test_plans_are_watched_until_the_block_ends() -> None:
    plan, on, outer, inner = dispatch.plan, target("3.6.0", 90), list[Plan](), list[Plan]()
    asked = problem("chunk_simple_gla", "bfloat16", 64, 64)
    with dispatch.watching(outer.append):
        with dispatch.watching(inner.append):
            made = dispatch.plan(asked, on)
        dispatch.plan.cache_clear()
        assert dispatch.plan(asked, on) == made and dispatch.plan.cache_info().misses == 1
    dispatch.plan(asked, on)
    assert (inner, outer) == ([made], [made, made]) and dispatch.plan is plan

    def refuse(made: Plan) -> None:
        raise LookupError(made.asked.op)
    with pytest.raises(LookupError, match="chunk_simple_gla"), dispatch.watching(refuse):
        dispatch.plan(asked, on)
    assert dispatch.plan is plan


def test_ops_that_share_a_family_and_mode_plan_alike() -> None:
    seen: dict[tuple[object, ...], Plan] = {}
    for op, way in dispatch.OPS.items():
        for triton, sm, dtype in itertools.product(("3.2.0", "3.7.1"), (75, 90), DTYPES):
            mine = fresh(problem(op, dtype, 128, 128), target(triton, sm))
            first = seen.setdefault((way, mine.asked.options, triton, sm, dtype), mine)
            assert mine.launches == first.launches and mine.steps == first.steps, op


@pytest.mark.alternate
def test_every_remedy_makes_the_problem_smaller_or_answers_none() -> None:
    """Planning always ends, because each remedy lowers its own measure and raises no other.

    Every measure has a lower bound. The measure of ``other_tile`` is minus the number of tile facts to avoid,
    and there are only a few such facts. The other measures are never negative.
    """
    def measures(p: Problem) -> dict[str, int]:
        return {name: remedy.measure(p) for name, remedy in REMEDIES.items()}

    on, seen, waiting = target("3.3.1", 75), set[Problem](), list(few())
    waiting += [asked._replace(ranks=2) for asked in waiting]
    reason = Reason("", "", "", avoid=TILE_FACTS)
    while waiting:
        asked = waiting.pop()
        before = measures(asked)
        assert min(before.values()) >= -len(asked.avoid)
        for name, remedy in REMEDIES.items():
            smaller = remedy.rewrite(asked, on, reason)
            if smaller is not None:
                after = measures(smaller)
                risen = [other for other in REMEDIES if after[other] > before[other]]
                assert after[name] < before[name] and not risen, (name, asked, smaller)
                if smaller not in seen:
                    seen.add(smaller)
                    waiting.append(smaller)
    assert seen


def test_every_remedy_that_a_check_or_issue_names_exists() -> None:
    found = {name for triton in RELEASES
             for number, on in enumerate(targets(triton)) for asked in asked_of(number, few())
             for _, name in fresh(asked, on).steps}
    found |= {name for asked in few() for ranks in (2, 3)
              for _, name in fresh(asked._replace(ranks=ranks), target("3.6.0", 90)).steps}
    unused = set(REMEDIES) - found
    assert not unused, f"no plan takes {unused}: no check and no known issue names it, or it never helps"
    assert found == set(REMEDIES)
    assert {name for issue in KNOWN_ISSUES for name in issue.remedies} <= set(REMEDIES)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_no_size_is_refused(way: tuple[str, str]) -> None:
    """A call whose tensors exceed the memory of any GPU still gets a valid plan, not a refusal."""
    for N, T in ((1, 2**40), (2**36, 64)):
        asked = problem(OP_OF[way], "bfloat16", 64, 64, (N, T, 8))
        for one in (asked, asked._replace(B=1, T=N * T, varlen=True)):
            plan = dispatch.plan(one, target("3.6.0", 90))
            assert not broken(plan, AUTO) and not plan.refused, plan


def test_no_step_is_taken_in_vain() -> None:
    """No plan repeats a step: if a reason stays the same after its remedy, the remedy had no effect."""
    for on, asked in itertools.product(targets("3.6.0"), odd()):
        steps = dispatch.plan(asked, on).steps
        assert not [step
                    for step, following in itertools.pairwise(steps)
                    if step == following], dispatch.plan(asked, on)


def test_remedies_combine_on_a_t4() -> None:
    huge = problem("chunk_linear_attn", "bfloat16", 64, 64, (2**29, 64, 6))
    plan = dispatch.plan(huge, target("3.3.1", 75))
    assert plan.path == "triton"
    assert {name for _, name in plan.steps} == {"chunk_batch", "via_fp32"}
    assert plan.problem.dot == "fp32" and 0 < plan.problem.batch_part < huge.N


@pytest.mark.parametrize(("triton", "sm", "dot"),
                         [("3.3.1", 80, "native"), ("3.4.0", 75, "fp32"), ("3.9.0", 70, "fp32"),
                          ("3.9.0", 80, "native"),
                         ("3.2.0", 75, "native"), ("3.1.0", 75, "native")])
def test_without_tensor_cores_16_bit_operands_are_made_32(triton: str, sm: int, dot: str) -> None:
    """Without tensor cores, matrix products run on fp32 copies of 16-bit operands.

    Scalar code on 16-bit operands spills ten times as much. Kernels without matrix products keep 16 bits.
    """
    asked = problem("chunk_simple_gla", "float16", 128, 128)
    plan = dispatch.plan(asked, target(triton, sm))
    assert plan.path == "triton" and plan.problem.dot == dot and len(dispatch.inexact_steps(plan)) == (dot
                                                                                                       == "fp32")
    assert bool(dispatch.plan(asked, target(triton, sm),
                              Policy(policy="strict")).refused) == (dot
                                                                    == "fp32"), "policy strict must refuse fp32 copies"
    assert dispatch.plan(asked, target(triton, sm), Policy(policy="off")).problem.dot == "native"
    assert dispatch.plan(problem("rms_norm", "float16", 128, 128), target(triton, sm)).problem.dot == "native"


@pytest.mark.parametrize(("triton", "op", "K", "V", "codes"), [
    ("3.6.0", "chunk_simple_gla", 256, 256, ["hopper-narrow-state"]),
    ("3.6.0", "chunk_gla", 32, 64, ["hopper-narrow-state"]),
    ("3.9.0", "chunk_kda", 16, 16, ["hopper-narrow-state"]),
    ("3.2.0", "chunk_gla", 32, 64, ["narrow-state-32"]),
    ("3.2.0", "chunk_delta_rule", 256, 256, ["narrow-state-32", "tall-state-32"])])
def test_a_tile_that_fails_is_passed_over_for_the_next(triton: str, op: str, K: int, V: int,
                                                       codes: list[str]) -> None:
    """A tile with a known issue is replaced by the next tile, which policy strict allows.

    The plan's steps give the reason, but no warning announces it.
    """
    asked, on = problem(op, "bfloat16", K, V), target(triton, 90)
    plan = dispatch.plan(asked, on)
    assert [reason.code for reason, _ in plan.steps] == codes and plan.steps[0][1] == "other_tile"
    assert not plan.steps[0][0].forced and not dispatch.inexact_steps(plan)
    assert "so       other_tile" in str(plan) and plan == dispatch.plan(asked, on, Policy("strict"))
    ignored = dispatch.plan(asked, on, Policy(ignore=frozenset(codes[:1])))
    for launch in plan.launches:
        if "rmw_acc" in launch.traits:
            assert launch.block("BT") == 32 and "narrow_state" not in launch.traits
            # For KDA on Triton 3.9.0, another issue also rejects the kernel of the scores with this tile.
            still = 32 if (op, triton) == ("chunk_kda", "3.9.0") else 64
            assert ignored.launch(launch.kernel).block("BT") == still


def test_a_tile_that_fails_is_rejected_for_each_of_its_kernels() -> None:
    """Each of three issues alone makes KDA with 16 channels use short chunks.

    The issues concern different kernels: the scans, the scores and the gradients.
    """
    asked, on = problem("chunk_kda", "bfloat16", 16, 16), target("3.6.0", 90)
    ids = ["hopper-narrow-state", "hopper-narrow-scores", "hopper-narrow-grads"]
    found = [dispatch.plan(asked, on, Policy(ignore=frozenset(ids[:count]))) for count in range(4)]
    assert [[reason.code for reason, _ in plan.steps] for plan in found] == [ids[:1], ids[1:2], ids[2:], []]
    assert [plan.launch("dplr_grads").block("BT") for plan in found] == [32, 32, 32, 64]
    assert len({plan.launches for plan in found}) == 2


def test_where_no_tile_is_without_a_fault_plain_torch_is_left() -> None:
    """A recipe without another tile runs on the torch path, and the reason is then forced and announced."""
    issue = next(issue for issue in KNOWN_ISSUES if issue.id == "hopper-narrow-state")
    on = target("3.6.0", 90)
    asked = problem("chunk_simple_gla", "bfloat16", 256, 256)
    launch = Launch("some_scan", (1,), 4, 1, (("BT", 64),), 0, 0, issue.traits)
    draft = checks.Draft(asked, FAMILIES[asked.family], (launch,), on, AUTO)
    first, then = (next(checks.check_known_issues(draft._replace(problem=one)))
                   for one in (asked, asked._replace(avoid=TILE_FACTS)))
    assert not first.forced and then.forced
    again = asked._replace(avoid=frozenset({"narrow_state"}))
    assert dispatch._remedy(first, draft) == ("other_tile", again)
    assert dispatch._remedy(then, draft._replace(problem=again)) == ("torch_path", again._replace(path="torch"))


def test_volta_before_32_cannot_add_products_of_transposed_operands() -> None:
    for triton, sm, codes in (("3.1.0", 70, ["mma-to-mma-volta"]), ("3.1.0", 75, []),
                              ("3.2.0", 70, ["half-dot-volta-32"])):
        plan = dispatch.plan(problem("chunk_delta_rule", "float16", 128, 128), target(triton, sm))
        assert [reason.code for reason, _ in plan.steps] == codes and plan.path == "triton"


def test_amd_takes_the_torch_path_unless_checks_are_off() -> None:
    asked, amd = problem("chunk_simple_gla", "bfloat16", 64, 64), parse("triton=3.6.0,backend=hip")
    assert dispatch.plan(asked,
                         amd).path == "torch" and "warmup" in str(dispatch.plan(asked, amd).steps[0][0])
    assert dispatch.plan(asked, amd, Policy(policy="off")).path == "triton"
    assert dispatch.plan(asked, amd, Policy(canary="trial")).path == "triton"


def test_a_batch_of_65538_heads_needs_no_remedy() -> None:
    """A call with 65,538 heads needs no remedy, because flashlin's grids have one axis.

    fla's grids have B * H on axis 1, whose limit is 65,535.
    """
    for way in WAYS:
        plan = dispatch.plan(problem(OP_OF[way], "bfloat16", 128, 128, (10923, 64, 6)), target("3.6.0", 90))
        assert plan.path == "triton" and not dispatch.inexact_steps(plan)
        assert all(name.endswith("_mode") for _, name in plan.steps)


@pytest.mark.parametrize("triton", RELEASES)
@pytest.mark.alternate
def test_our_kernels_need_a_remedy_only_where_a_table_says_so(triton: str) -> None:
    """An announced remedy for flashlin's kernels always has a documented limit or a known issue as its cause.

    The limits concern the machine, the dtype, and the sizes.
    """
    for number, on in enumerate(targets(triton), RELEASES.index(triton)):
        here = {issue.id for issue in issues_here(on)}
        for asked in asked_of(number, usual()):
            codes = {reason.code for reason, _ in fresh(asked, on).steps if reason.forced}
            if asked.dtype == "float64" and on.backend in ("cuda", "interpreter"):
                assert "dtype" in codes, (asked, on)
            elif (FAMILIES[asked.family].head_dim and max(asked.K, asked.V) > MAX_HEAD_DIM
                    and on.backend == "cuda"):
                assert codes & {"head-dim", "before-volta"}, (asked, on)
            elif too_wide(asked) and on.backend == "cuda":
                assert codes & {"width", "before-volta"}, (asked, on)
            elif on.backend == "cuda" and max(asked.K,
                                              asked.V) > 128 and (on.shared < 102400
                                                                  or release(triton) < (3, 3)):
                # The widest heads in fp32 do not fit into shared memory of 100 KB or less. Before Triton
                # 3.3, fp32 operands take twice as much.
                assert codes <= here | {"shared-memory"}, (asked, on)
            elif on.backend == "cuda":
                assert codes <= here, (asked, on)


@pytest.mark.parametrize("sm", (80, 86, 89, 90))
@pytest.mark.parametrize("triton", RELEASES)
@pytest.mark.alternate
def test_ampere_to_hopper_run_everything_as_asked(triton: str, sm: int) -> None:
    # Wider heads may need fewer warps or, in fp32, more shared memory than the GPU has.
    widest = MAX_HEAD_DIM if release(triton) >= (3, 3) else 128
    for asked in usual():
        # The inverse of a chunk and a state of 512 rows fit into 100 KB in 16 bits, but not in fp32.
        crowded = asked.family in ("delta",
                                   "dplr") and asked.dtype == "float32" and asked.K > 256 and sm in (86, 89)
        # Up to 3.2, a state with more rows than its chunk has tokens runs with two warps (tall-state-32).
        # Chunks are short if the state has few columns.
        tall = (asked.family in ("simple_gla", "delta", "gla") and asked.dtype != "float32"
                and asked.K >= 64 > asked.V
                and sm == 90 and release(triton) < (3, 3))
        narrow = not FAMILIES[asked.family].head_dim or max(asked.K, asked.V) <= widest
        if asked.dtype != "float64" and narrow and not crowded and not tall and not too_wide(asked):
            plan = fresh(asked, target(triton, sm))
            as_asked = plan.problem._replace(mode=asked.mode, avoid=frozenset()) == asked
            assert plan.path == "triton" and as_asked, plan


@pytest.mark.parametrize(("T", "grad", "sm", "mode"), [
    (1, False, 90, "fused_recurrent"), (checks.FEW_TOKENS, False, 90, "fused_recurrent"),
    (checks.FEW_TOKENS + 1, False, 90, "chunk"), (1, True, 90, "chunk"), (4096, False, 75, "fused_recurrent"),
    (4096, True, 75, "chunk")])
def test_mode_auto_decides_from_tokens_gradients_and_card(T: int, grad: bool, sm: int, mode: str) -> None:
    asked = problem("simple_gla", "float16", 64, 64, (2, T, 4), needs_grad=grad)
    assert dispatch.plan(asked, target("3.6.0", sm)).problem.mode == mode


# Snapshots

def summary(plan: Plan) -> str:
    """Return a plan as text, such as ``triton via fp32: scan 32/64/64 w8 s2, ...``.

    The numbers are the tile sizes of the launch (BT/BK/BV or BT/BD), its warps if they are not 4, and its
    stages if there are several.
    """
    if not plan.launches:
        return plan.path
    tiles: dict[str, list[str]] = {}
    for launch in plan.launches:
        facts = "/".join(str(size) for _, size in launch.tile)
        facts += f" w{launch.num_warps}" if launch.num_warps != 4 else ""
        facts += f" s{launch.num_stages}" if launch.num_stages > 1 else ""
        tiles.setdefault(facts, []).append(launch.kernel.removeprefix(plan.problem.family + "_"))
    via = " via fp32" if plan.problem.dot == "fp32" else ""
    return f"{plan.path}{via}: " + ", ".join(f"{'+'.join(kernels)} {facts}"
                                             for facts, kernels in tiles.items())


Snapshots = dict[str, dict[str, list[str]]]


def snapshots() -> Snapshots:
    """Return by call (family, mode, dtype and head size), then by plan text, the machines with this plan.

    Each machine is a text of a GPU and a range of Triton releases.
    """
    found: Snapshots = {}
    for way, dtype, D, sm in itertools.product([way for way in WAYS if way[1] != "auto"], DTYPES[:3],
                                               (64, 128, 256, 512), CAPABILITIES[1:]):
        asked = problem(OP_OF[way], dtype, D, D)
        plans = [(summary(dispatch.plan(asked, target(triton, sm))), triton) for triton in RELEASES]
        for text, group in itertools.groupby(plans, key=lambda pair: pair[0]):
            stretch = [triton for _, triton in group]
            of = f"{stretch[0]} to {stretch[-1]}" if len(stretch) > 1 else stretch[0]
            sizes = "K=V" if FAMILIES[way[0]].head_dim else "D"
            plans_of = found.setdefault(f"{' '.join(filter(None, way))} {dtype} {sizes}={D}", {})
            plans_of.setdefault(text, []).append(f"sm{sm} {of}")
    return found


def rows(found: Snapshots) -> dict[str, str]:
    return {f"{call} {machine}": text
            for call, plans in found.items() for text, machines in plans.items() for machine in machines}


def read() -> Snapshots:
    """Return the stored snapshots; in the file, the machines of a plan are one string."""
    kept = json.loads(SNAPSHOTS.read_text())
    return {call: {text: machines.split(", ") for text, machines in plans.items()}
            for call, plans in kept.items()}


def write(found: Snapshots) -> None:
    kept = {call: {text: ", ".join(machines) for text, machines in plans.items()}
            for call, plans in found.items()}
    SNAPSHOTS.write_text(json.dumps(kept, indent=0) + "\n")


@pytest.mark.alternate
def test_plans_are_those_of_the_snapshots() -> None:
    kept, now = rows(read()), rows(snapshots())
    lines = [line for row in dict.fromkeys((*kept, *now)) if kept.get(row) != now.get(row)
             for line in (f"- {row}: {kept.get(row)}", f"+ {row}: {now.get(row)}")
             if not line.endswith(": None")]
    assert not lines, ("plans changed; if that was meant, run: python -m tests.plan.test_plan --write\n"
                       + "\n".join(lines[:60]))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    made = snapshots()
    write(made)
    print(f"wrote {len(rows(made))} rows to {SNAPSHOTS}")
