"""Tests of the first call of an op on a GPU without records, which starts a trial in a child process.

Kernels that fail in the trial are re-planned. A trial that could not run changes nothing.
"""
from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.compat import launch as door
from flashlin.compat import target as machine
from flashlin.compat.target import Target, parse, pretend
from flashlin.guards import local_results
from flashlin.guards.local_results import Table, Verdict
from flashlin.guards.plan_types import Plan
from flashlin.ops import simple_gla
from flashlin.ops._common import chunked
from flashlin.trial import canary, run
from flashlin.trial.run import Trial, Tried
from tests import foreign

pytestmark = pytest.mark.usefixtures("home")

NIGHTLY, NEWER = "triton=3.99.0+git0123abcd,sm=90", "triton=3.99.0,sm=90"
RAN, COMPILED = "triton=3.6.0,sm=90", "triton=3.6.0,sm=86"
CPU = torch.device("cpu")
BOTH = {"gate_cumsum 4", "simple_gla_scan 4"}


class Child:
    """A replacement of the trials' child process, which records the trials and returns given results.

    words: the result of each trial, in order. A bad result names the scan kernel that is planned at the time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
        self.words, self.asked = list(words), list[Trial]()
        monkeypatch.setattr(run, "run", self.run)

    def run(self, trials: Sequence[Trial], device: torch.device, target: Target) -> list[Tried]:
        [trial] = trials
        self.asked.append(trial)
        word = self.words.pop(0)
        scan = the_plan(target).launches[-1:] if word in local_results.BAD else ()
        said = "CUDA out of memory" if word == "not tried" else ""
        found = Tried(trial, word, said, tuple(launch.config for launch in scan),
                      scan[0].config if scan else "")  # type: ignore[arg-type]
        run._keep([found], target)
        return [found]


ASKED = chunked.Asked("chunk_simple_gla", needs_grad=False)


def the_plan(target: Target) -> Plan:
    x = torch.zeros(1, 64, 2, 64)
    return dispatch.plan(simple_gla.FAMILY.problem((x, x, x, x, None, None, None), ASKED), target)


def next_process() -> None:
    canary._done.clear()
    canary.settled.clear()
    local_results.read_again()
    dispatch.plan.cache_clear()


def call(target: str, op: str = "chunk_simple_gla") -> set[str]:
    """Call an op and return "name warps" of each kernel that it starts; empty on the torch path."""
    started: set[str] = set()
    machine._probed[CPU] = parse(target)
    door.replace_starter(lambda launch, *rest: started.add(f"{launch.kernel} {launch.num_warps}"))
    x = torch.zeros(1, 64, 2, 64)
    getattr(flashlin, op)(x, x, x, torch.zeros(1, 64, 2))
    return started


def silently(target: str) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(target)


@pytest.mark.parametrize("target, why", [
    (NIGHTLY, "is new to Triton 3.99.0+git0123abcd, which is not known to flashlin"),
    (NEWER, "is new to Triton 3.99.0, which is not known"),
    (COMPILED, "with these sizes has not been run on sm86 under Triton 3.6.0 yet")])
def test_an_op_is_tried_once_on_a_machine_and_then_runs(target: str, why: str,
                                                        monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    child = Child(monkeypatch, "ran")
    with caplog.at_level(logging.WARNING, "flashlin"):
        assert silently(target) == BOTH, "a successful trial gives no warning"
    assert child.asked == [Trial("chunk_simple_gla", "float32", 64)]
    assert [line for line in caplog.messages if f"chunk_simple_gla {why}" in line
            and "it is tried once" in line]
    assert silently(target) == BOTH
    next_process()
    assert silently(target) == BOTH and len(child.asked) == 1


def test_what_could_not_be_tried_is_used_as_planned_with_one_warning_and_asked_again_after_a_day(
        monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, "not tried", "ran")
    with pytest.warns(UserWarning) as told:
        assert call(NEWER) == BOTH
    [one] = told
    assert "and could not be tried: CUDA out of memory. It is used as planned, and tried again after a day or by flashlin warmup" in str(one.message)
    assert Path(one.filename) == Path(__file__)
    assert silently(NEWER) == BOTH
    next_process()
    assert silently(NEWER) == BOTH and len(child.asked) == 1, "ranks and processes do not each repeat it"
    assert not local_results.local(parse(NEWER)).kernels
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + local_results.A_DAY + 1)
    next_process()
    assert silently(NEWER) == BOTH and len(child.asked) == 2


def test_a_trial_of_the_future_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial with a date in the future is repeated at once.

    A wrong clock may have caused the date; waiting for it could take years.
    """
    child = Child(monkeypatch, "ran")
    local_results.keep(Table({}, {"chunk_simple_gla float32 64": Verdict(
        "not tried", time.time() + 400 * local_results.A_DAY, "chunk_simple_gla float32 64")}), parse(NEWER))
    assert silently(NEWER) == BOTH and len(child.asked) == 1
    next_process()
    assert silently(NEWER) == BOTH and len(child.asked) == 1


def test_not_tried_takes_nothing_from_what_has_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, "not tried")
    plan = the_plan(parse(NEWER))
    with pytest.warns(UserWarning, match="could not be tried"):
        call(NEWER)
    local_results.keep(Table({launch.config: Verdict("ran", 1.0, "flashlin warmup")
                              for launch in plan.launches},
                        {}), parse(NEWER))
    next_process()
    assert silently(NEWER) == BOTH and len(child.asked) == 1


@pytest.mark.parametrize("target", [NEWER, RAN])
def test_a_users_own_kernel_is_started_untried(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own kernel starts without a trial, because a child process cannot call it.

    The target is set as the probed machine, because a simulated machine never starts trials.
    """
    child, started = Child(monkeypatch), []
    machine._probed[CPU] = parse(target)
    shielded = flashlin.shield(foreign.scaled)
    monkeypatch.setattr(shielded, "_start", lambda *args, **kwargs: started.append(kwargs["grid"]))
    shielded[(1, 6)](torch.zeros(2, 3, 1), torch.zeros(2, 3, 1), 1, 2, H=3, BT=16)
    assert started == [(1, 6)] and not child.asked


@pytest.mark.parametrize("word", local_results.BAD)
def test_what_fails_gets_fewer_warps_and_then_the_torch_path(word: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, word, "ran")
    with pytest.warns(UserWarning,
                      match=f"and was tried: {word}, .*planned otherwise on this machine until flashlin "
                            "warmup --forget"):
        assert "simple_gla_scan 2" in call(NEWER)
    assert len(child.asked) == 2
    assert [one.word
            for one in local_results.local(parse(NEWER)).kernels.values()] == [
                word], "only the kernel that the child has blamed counts as failed"
    local_results.forget()
    next_process()
    child = Child(monkeypatch, word, word, word)
    with pytest.warns(UserWarning):
        assert call(NEWER) == set()
    assert 2 <= len(child.asked) <= canary.ROUNDS


def test_an_op_with_a_choice_is_tried_as_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, "ran")
    call(NEWER, "simple_gla")
    assert child.asked[0].op == "chunk_simple_gla"


def test_nothing_is_tried_for_a_machine_that_is_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch)
    pretend(parse(NEWER))
    call(NEWER)
    assert not child.asked


def test_as_many_plans_are_kept_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "PLANS", 2)
    for T in (8, 16, 32):
        x = torch.zeros(1, T, 2, 64)
        plan = dispatch.plan(simple_gla.FAMILY.problem((x, x, x, x, None, None, None), ASKED), parse(RAN))
        assert id(plan) not in canary.settled and canary.tried(plan, CPU, 1) is plan
        assert canary.settled[id(plan)] is plan
    assert len(canary.settled) == 1


@pytest.mark.parametrize("target, setting",
                         [(RAN, "auto"), (COMPILED, "off"), (NEWER, "off"), ("backend=cpu", "auto")])
def test_nothing_is_tried_where_it_has_run_or_nobody_wants_it(target: str, setting: str,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch)
    with flashlin.settings(canary=setting):
        silently(target)
    assert not child.asked


def another_rank(word: str) -> None:
    """Store a result for all planned launches, as another rank does while this process waits for it."""
    one = Verdict(word, time.time(), "chunk_simple_gla float32 64")  # type: ignore[arg-type]
    local_results.keep(Table({launch.config: one for launch in the_plan(parse(NEWER)).launches},
                             {one.trial: one}),
                  parse(NEWER))


@pytest.mark.parametrize("word, started, asked",
                         [("ran", BOTH, 0), ("abort or illegal access",
                                             {"gate_cumsum 2", "simple_gla_scan 2"}, 1)])
def test_another_rank_s_answer_is_taken(word: str, started: set[str], asked: int,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, "ran")
    local_results.local(parse(NEWER))  # this process reads the table before the other rank writes
    alone = local_results.alone

    def waiting(trial: str) -> Any:
        monkeypatch.setattr(local_results, "alone", alone)
        another_rank(word)
        return alone(trial)
    monkeypatch.setattr(local_results, "alone", waiting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert call(NEWER) == started
    assert len(child.asked) == asked, "only a bad result leads to a trial of the new plan"


def test_rows_and_channels_are_not_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch, "ran")
    machine._probed[CPU] = parse(NEWER)
    door.replace_starter(lambda *launch: None)
    flashlin.rms_norm(torch.zeros(4, 4096), torch.zeros(4096), None)
    assert child.asked == [Trial("rms_norm", "float32", 0)], "a head of 4,096 would be refused"


def test_with_no_place_for_verdicts_each_process_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLIN_HOME", "/dev/null")
    child = Child(monkeypatch, "ran", "ran")
    with pytest.warns(UserWarning, match="apply in this process only: FLASHLIN_HOME=/dev/null is not a folder"):
        assert call(NEWER) == BOTH
    assert silently(NEWER) == BOTH and len(child.asked) == 1
