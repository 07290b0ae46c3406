"""Below sm_80, launches fail under exactly the releases that a KnownIssue names, and planned launches compile.

The kernels are our own; test_known_issues.py tests the range of each failure. No GPU is needed. ``raw`` are
the launches recorded with the known-issue checks off, ``planned`` those of the normal policy. The real
releases compile both to machine code. Each release compiles half of the launches.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashlin
from flashlin.compat.known_issues import KNOWN_ISSUES, issues_here
from flashlin.compat.releases import supported
from flashlin.compat.target import parse
from flashlin.compat.versions import release
from flashlin.testing.compile import Job, Result
from flashlin.testing.record import Recorded, recording
from tests.share import share

Compile = Callable[[str, list[Job]], list[Result]]
Launches = Callable[..., list[Recorded]]

RELEASES = ("3.0.0", "3.2.0", "3.3.1", "3.4.0", supported()[-1])
CARDS = (70, 75)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPS = ("chunk_simple_gla", "fused_recurrent_simple_gla")
# Kernels whose products are not followed by another product. They may compile where this issue stops the other
# kernels of their family, with which they are planned.
ALONE = {"simple_gla_states": ["half-dot-volta-32"]}
# The messages of the compiler for an issue. A release may fail in several places for the same reason.
SAYS = {
    "bf16-pre-ampere-32": ("Feature '.bf16' requires .target sm_80 or higher", "IndexError: map::at",
                           "Failed to compute parent layout for slice layout"),
    "half-dot-volta-32": ("Failed to compute parent layout for slice layout",),
    "half-dot-33-pre-ampere": ("Unsupported rounding mode for conversion", "Unsupported conversion from"),
}
SPILLING = "half-dot-34-pre-ampere"  # compiles, but the spills show that it is slow
TENS_OF_KILOBYTES = 10_000


def cells(version: str) -> list[tuple[int, torch.dtype]]:
    """Return the GPUs and dtypes to compile.

    With Triton 3.4 and newer a 16-bit dot takes ten times as long to compile. There, each dtype is compiled
    for one GPU, and each GPU with one dtype.
    """
    every = [(sm, dtype) for sm in CARDS for dtype in DTYPES]
    left_out = ((70, torch.float16), (75, torch.bfloat16)) if release(version) >= (3, 4) else ()
    return [cell for cell in every if cell not in left_out]


@pytest.fixture(scope="module")
def launches(gated: Callable[..., None]) -> Launches:
    def recorded(version: str, sm: int, dtype: torch.dtype, policy: str,
                 others: torch.dtype = torch.float32) -> list[Recorded]:
        with recording(parse(f"triton={version},sm={sm}")) as found, flashlin.settings(policy=policy):
            for op in OPS:
                gated(op, dtype, others=others)
        return found
    return recorded


def striking(version: str, sm: int, launch: Recorded) -> list[str]:
    """Return the known issues that apply to a launch."""
    here = issues_here(parse(f"triton={version},sm={sm}"))
    return [issue.id for issue in here
            if issue.hits(frozenset(launch.traits), launch.num_warps, launch.num_stages)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [version for version in RELEASES if version != "3.4.0"])
@pytest.mark.alternate
def test_raw_launches_fail_exactly_where_a_known_issue_says(version: str, compiled: Compile,
                                                            launches: Launches) -> None:
    jobs = list(dict.fromkeys(Job(sm, launch)
                              for sm, dtype in cells(version)
                              for launch in launches(version, sm, dtype, "off")))
    if release(version) >= (3, 4):  # no raw launch fails there, so raw and planned launches are the same
        jobs = [job for job in jobs if job.launch.kernel == "simple_gla_scan"]
    else:
        jobs = list(share(jobs, RELEASES.index(version), 2))
    assert any(striking(version, job.sm, job.launch) for job in jobs)
    wrong = []
    for job, result in zip(jobs, compiled(version, jobs), strict=True):
        issues = striking(version, job.sm, job.launch)
        failing = [issue for issue in issues if issue in SAYS]
        said = f"{result.message} {result.cause}"
        if result.ok and ALONE.get(job.launch.kernel) == failing:
            continue
        if result.ok == bool(failing) or (failing
                                          and not any(text in said for issue in failing
                                                      for text in SAYS[issue])):
            wrong.append(f"sm_{job.sm} {job.launch}: known {issues}, got {result}")
        if SPILLING in issues and result.spills < TENS_OF_KILOBYTES:
            wrong.append(f"sm_{job.sm} {job.launch}: known {issues}, spills {result.spills}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.alternate
def test_planned_launches_compile(version: str, compiled: Compile, launches: Launches) -> None:
    jobs: list[Job] = []
    for sm, dtype in cells(version):
        planned = [launch for others in {torch.float32, dtype}
                   for launch in launches(version, sm, dtype, "auto", others)]
        assert planned, f"sm_{sm} {dtype}: the torch path, where fp32 operands would do"
        # Before 3.3 a kernel cannot even load or store bf16. So torch casts before and after the launch.
        if release(version) < (3, 3):
            assert not any("bf16" in str(kind) for launch in planned
                           for _, kind in launch.arguments), f"sm_{sm} {dtype}"
        jobs += [Job(sm, launch) for launch in planned]
    jobs = list(share(list(dict.fromkeys(jobs)), RELEASES.index(version), 2))
    failed = [f"sm_{job.sm} {job.launch}: {result}"
              for job, result in zip(jobs, compiled(version, jobs), strict=True) if not result.ok]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(("triton", "sm", "dtype", "remedies"), [
    ("3.0.0", 75, "bfloat16", ["via_fp32"]), ("3.2.0", 75, "bfloat16", ["via_fp32"]),
    ("3.2.0", 75, "float16", []), ("3.2.0", 70, "float16", ["via_fp32"]), ("3.1.0", 70, "float16", []),
    ("3.3.1", 75, "bfloat16", ["via_fp32"]), ("3.3.1", 70, "float16", ["via_fp32"]),
    ("3.3.1", 75, "float32", []), ("3.2.0", 75, "float32", []), ("3.9.0", 75, "float32", []),
    ("3.3.1", 80, "bfloat16", [])])
def test_the_remedy_is_fp32_operands_and_only_where_needed(triton: str, sm: int, dtype: str,
                                                           remedies: list[str]) -> None:
    problem = flashlin.Problem("chunk_simple_gla", "simple_gla", "chunk", 2, 128, 4, 64, 64, 2, dtype,
                               needs_grad=True)
    the_plan = flashlin.plan(problem, parse(f"triton={triton},sm={sm}"))
    assert [remedy for _, remedy in the_plan.steps] == remedies and the_plan.path == "triton"


def test_every_issue_proven_here_is_one() -> None:
    assert {*SAYS, SPILLING} <= {issue.id for issue in KNOWN_ISSUES}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.alternate
def test_volta_cannot_multiply_a_state_stored_v_first_and_is_not_asked_to(v_first: bool,
                                                                          compiled: Compile) -> None:
    """Known issue v-first-volta is tested from the public op to machine code, forward and backward."""
    found = {}
    for policy in ("off", "auto"):
        q, k, v = (torch.zeros(1, 64, 2, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
        with recording(parse("triton=3.1.0,sm=70")) as launches, flashlin.settings(policy=policy):
            # without a gate, because its backward fails there in any layout (mma-to-mma-volta)
            o, ht = flashlin.chunk_simple_gla(q, k, v,
                                              initial_state=torch.zeros(1, 2, 64, 64),
                                              output_final_state=True, state_v_first=v_first)
            (o.sum() + ht.sum()).backward()
        found[policy] = [launch for launch in launches
                         if launch.kernel in ("simple_gla_scan", "simple_gla_dq")]
    raw, planned = (compiled("3.1.0", [Job(70, launch) for launch in found[policy]])
                    for policy in ("off", "auto"))
    assert {launch.kernel for launch in found["auto"]} == {"simple_gla_scan", "simple_gla_dq"}
    assert all(result.ok != v_first and (result.ok or "DotOperand[MMAv1]" in result.cause)
               for result in raw), raw
    assert all(result.ok for result in planned), planned
    for launch in found["auto"]:
        assert any("fp16" in str(kind) for _, kind in launch.arguments) != v_first, launch
