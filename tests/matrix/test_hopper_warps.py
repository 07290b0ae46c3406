"""Our own scan on Hopper with Triton up to 3.3: the planned launches compile.

Eight warps abort the compiler, and so do four if the state is tall. test_known_issues.py tests the range of
these failures.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest

import flashlin
from flashlin.compat.known_issues import issues_here
from flashlin.compat.target import parse
from flashlin.testing.compile import Job, Result
from flashlin.testing.record import recording

Compile = Callable[[str, list[Job]], list[Result]]


@pytest.mark.parametrize(("version", "issue", "says"), [
    ("3.0.0", "mma-to-mma-31", "mma -> mma layout conversion is only supported on Ampere"),
    ("3.2.0", "reshape-outs-32", "reshapeOuts"),
    ("3.3.1", "stmatrix-33", "chooseStMatrixLayoutLeadingOffset")])
@pytest.mark.alternate
def test_eight_warps_fail_on_hopper_up_to_33_and_are_not_planned(version: str, issue: str, says: str,
                                                                 compiled: Compile,
                                                                gated: Callable[..., None]) -> None:
    hopper = parse(f"triton={version},sm=90")
    with recording(hopper) as launches:
        gated(K=64, V=64)
    ours = next(launch for launch in launches if launch.kernel == "simple_gla_scan")
    eight, planned = compiled(version, [Job(90, ours._replace(num_warps=8)), Job(90, ours)])
    assert ours.num_warps <= 4 and planned.ok, planned
    assert not eight.ok and says in eight.cause, eight
    assert issue in {known.id for known in issues_here(hopper) if known.hits(frozenset(ours.traits), 8, 2)}


@pytest.mark.parametrize(("K", "V"), [(256, 64), (64, 32)])
@pytest.mark.parametrize(("version", "says"), [
    ("3.0.0", "UNREACHABLE executed"), ("3.2.0", "Failed to emit transfer from register to shared"),
    ("3.3.1", "")])
@pytest.mark.alternate
def test_a_state_taller_than_its_chunks_wants_two_warps_on_hopper_up_to_32(
    version: str, says: str, K: int, V: int, compiled: Compile, gated: Callable[..., None]
) -> None:
    """This is known issue tall-state-32."""
    scans = []
    for ignored in (["tall-state-32"], []):
        with recording(parse(f"triton={version},sm=90")) as launches, flashlin.settings(ignore=ignored):
            gated(K=K, V=V)
        scans.append(next(launch for launch in launches if launch.kernel == "simple_gla_scan"))
    raw, planned = scans
    assert (raw.num_warps, planned.num_warps) == (4, 2 if says else 4)
    as_asked, as_planned = compiled(version, [Job(90, raw), Job(90, planned)])
    assert as_asked.status == ("abort" if says else "ok") and says in as_asked.cause, as_asked
    assert as_planned.ok, as_planned
