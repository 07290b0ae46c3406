"""The first call of an op that nobody has run on such a card: a child process goes first, and what fails there is planned otherwise."""
from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.compat import launch as door
from flashlin.compat import target as machine
from flashlin.compat.target import parse, pretend
from flashlin.guards import proven
from flashlin.ops import canary, chunked, simple_gla
from tests import foreign

NIGHTLY, NEWER = "triton=3.10.0+git0123abcd,sm=90", "triton=3.10.0,sm=90"
RAN, COMPILED = "triton=3.6.0,sm=90", "triton=3.6.0,sm=86"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FLASHLIN_HOME", str(tmp_path))
    canary._done.clear()
    canary._settled.clear()
    for cached in (proven.local, proven._trust, dispatch.plan):
        cached.cache_clear()
    yield
    machine._probed.pop(CPU, None)
    door.replace_starter(None)
    for cached in (proven.local, dispatch.plan):
        cached.cache_clear()


class Warmup:
    """Instead of the child: what it was asked, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *codes: int) -> None:
        self.codes, self.asked = list(codes), list[list[str]]()
        monkeypatch.setattr(canary.subprocess, "run", self.run)

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.asked.append(command[4:])
        assert options["env"]["FLASHLIN_CANARY"] == "off", "or it would ask itself"
        return subprocess.CompletedProcess(command, self.codes.pop(0), "", "no device")


def call(target: str, op: str = "chunk_simple_gla") -> set[str]:
    """The kernels that one call starts, by name and warps; none on the torch path."""
    started: set[str] = set()
    machine._probed[CPU] = parse(target)
    door.replace_starter(lambda launch, *rest: started.add(f"{launch.kernel} {launch.num_warps}"))
    x = torch.zeros(1, 64, 2, 64)
    getattr(flashlin, op)(x, x, x, torch.zeros(1, 64, 2))
    return started


@pytest.mark.parametrize("target", [NIGHTLY, NEWER])
def test_an_op_is_tried_once_and_then_runs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch, 0)
    with pytest.warns(UserWarning, match="chunk_simple_gla is new to Triton 3.10.0.*, which is not known to flashlin: it is tried once") as told:
        assert call(target) == {"gate_cumsum 4", "simple_gla_scan 4"}
    assert {Path(one.filename) for one in told} == {Path(__file__)}
    assert child.asked == [["--op", "chunk_simple_gla", "--dtype", "float32", "--device", "cpu", "--head-dim", "64"]]
    assert call(target) == {"gate_cumsum 4", "simple_gla_scan 4"} and len(child.asked) == 1


@pytest.mark.parametrize("target", [NEWER, RAN])
def test_a_users_own_kernel_is_started_untried(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No child could call it. On the machine itself: what is only pretended is never tried."""
    child, started = Warmup(monkeypatch), []
    machine._probed[CPU] = parse(target)
    shielded = flashlin.shield(foreign.scaled)
    monkeypatch.setattr(shielded, "_start", lambda *args, **kwargs: started.append(kwargs["grid"]))
    shielded[(1, 6)](torch.zeros(2, 3, 1), torch.zeros(2, 3, 1), 1, 2, H=3, BT=16)
    assert started == [(1, 6)] and not child.asked


def test_what_fails_gets_fewer_warps_and_then_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch, 1, 1, 1)
    with pytest.warns(UserWarning):
        assert call(NEWER) == set()
    assert 2 <= len(child.asked) <= canary.ROUNDS
    canary._done.clear()
    child = Warmup(monkeypatch, 1, 0)
    for cached in (proven.local, dispatch.plan):
        cached.cache_clear()
    with pytest.warns(UserWarning):
        assert call(NEWER) == {"gate_cumsum 2", "simple_gla_scan 2"}


def test_an_op_with_a_choice_is_tried_as_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch, 0)
    with pytest.warns(UserWarning):
        call(NEWER, "simple_gla")
    assert child.asked[0][:2] == ["--op", "chunk_simple_gla"]


def test_a_child_that_cannot_work_leaves_things_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch, 2)
    with pytest.warns(UserWarning, match="could not be tried, and is used as it is: no device"):
        assert call(NEWER)
    assert len(child.asked) == 1


def test_what_was_only_compiled_is_tried_once_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch, 0)
    with pytest.warns(UserWarning, match="chunk_simple_gla with these sizes has not been run on sm86 under Triton 3.6.0 yet: it is tried once"):
        assert call(COMPILED) == {"gate_cumsum 4", "simple_gla_scan 4"}
    canary._done.clear()  # the next process
    canary._settled.clear()
    proven.local.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(COMPILED) == {"gate_cumsum 4", "simple_gla_scan 4"}
    assert len(child.asked) == 1
    assert set(proven.local(parse(COMPILED)).values()) == {"compiled"}, "the child that answered here has launched nothing"


def test_nothing_is_tried_for_a_machine_that_is_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch)
    pretend(parse(NEWER))
    try:
        call(NEWER)
    finally:
        pretend(None)
    assert not child.asked


def test_as_many_plans_are_kept_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "PLANS", 2)
    for T in (8, 16, 32):
        x = torch.zeros(1, T, 2, 64)
        plan = dispatch.plan(chunked.problem_of(simple_gla.FAMILY, "chunk_simple_gla", (x, x, x, x, None), None, False), parse(RAN))
        assert not canary.settled(plan) and canary.tried(plan, CPU, 1) is plan and canary.settled(plan)
    assert len(canary._settled) == 1


@pytest.mark.parametrize("target, setting", [(RAN, "auto"), (COMPILED, "off"), (NEWER, "off"), ("backend=cpu", "auto")])
def test_nothing_is_tried_where_it_has_run_or_nobody_wants_it(target: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch)
    with flashlin.settings(canary=setting), warnings.catch_warnings():
        warnings.simplefilter("error")
        call(target)
    assert not child.asked


def test_another_rank_s_answer_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch)
    machine._probed[CPU] = parse(NEWER)
    configs: list[str] = []
    door.replace_starter(lambda launch, *rest: configs.append(launch.config))
    x = torch.zeros(1, 64, 2, 64)
    with flashlin.settings(canary="off"):
        flashlin.chunk_simple_gla(x, x, x, torch.zeros(1, 64, 2))
    proven.keep(dict.fromkeys(configs, "ran"), parse(NEWER))
    assert configs and call(NEWER) and not child.asked


def test_what_another_rank_saw_fail_is_planned_otherwise_here(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch, 0)
    x = torch.zeros(1, 64, 2, 64)
    plan = dispatch.plan(chunked.problem_of(simple_gla.FAMILY, "chunk_simple_gla", (x, x, x, x, None), None, False), parse(NEWER))
    proven.local(parse(NEWER))  # this process has looked before the other one knew
    read_again = canary._read_again

    def later(*args: Any) -> None:
        proven.keep({launch.config: "failed" for launch in plan.launches}, parse(NEWER))
        read_again(*args)
    monkeypatch.setattr(canary, "_read_again", later)
    with pytest.warns(UserWarning):
        assert call(NEWER) == {"gate_cumsum 2", "simple_gla_scan 2"}
    assert len(child.asked) == 1, "for what is planned instead"


def test_rows_and_channels_are_not_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch, 0)
    machine._probed[CPU] = parse(NEWER)
    door.replace_starter(lambda *launch: None)
    with pytest.warns(UserWarning, match="rms_norm is new to Triton 3.10.0"):
        flashlin.rms_norm(torch.zeros(4, 4096), torch.zeros(4096), None)
    assert child.asked == [["--op", "rms_norm", "--dtype", "float32", "--device", "cpu"]], "a head of 4,096 would be refused"


def test_what_the_child_has_blamed_is_all_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Warmup(monkeypatch, 1, 0)
    answer = child.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if len(child.codes) == 2:
            machine._probed[CPU] = parse(NEWER)
            x = torch.zeros(1, 64, 2, 64)
            plan = dispatch.plan(chunked.problem_of(simple_gla.FAMILY, "chunk_simple_gla", (x, x, x, x, None), None, False), parse(NEWER))
            proven.keep({plan.launch("simple_gla_scan").config: "failed"}, parse(NEWER))
        return answer(command, **options)
    monkeypatch.setattr(canary.subprocess, "run", run)
    with pytest.warns(UserWarning):
        assert "simple_gla_scan 2" in call(NEWER)
    assert list(proven.local(parse(NEWER)).values()).count("failed") == 1
