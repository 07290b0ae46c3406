"""Tests of plans on AMD GPUs, where flashlin's kernels have not been run.

Ops run in plain torch until ``flashlin warmup`` has found the kernels right on the machine. No trial starts
unless the user requests it, and none starts after a hang.
"""
from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.compat import launch as door
from flashlin.compat import target as machine
from flashlin.compat.target import SHARED_ON_AMD, STAGES_ON_AMD, USUAL_AMD, Target, parse
from flashlin.guards import local_results
from flashlin.guards.plan_types import Plan
from flashlin.kernels.families import PUBLIC
from flashlin.policy import Policy
from flashlin.trial import run, warmup
from flashlin.trial.run import Trial, Tried
from tests.plan.test_plan import RELEASES, few

pytestmark = pytest.mark.usefixtures("home")

CPU, OP = torch.device("cpu"), "chunk_simple_gla"
MI300X = parse("MI300X,triton=3.6.0", torch_version="2.10.0+rocm7.0")
TRYING = Policy(canary="trial")


def planned(dtype: str = "bfloat16", op: str = OP, K: int = 64, policy: Policy = Policy(),
            target: Target = MI300X) -> Plan:
    asked = next(one for one in few() if one.op == OP and one.needs_grad)
    asked = asked._replace(op=op, mode=dispatch.OPS[op][1], dtype=dtype, K=K, V=K, options=("g",))
    return dispatch.plan(asked, target, policy)


class Children:
    """A replacement of the trials' child processes.

    Each trial reports the planned configurations as started, and ends with the word given for its op.
    words: results by op, such as "hang"; the default is "ran".
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **words: str) -> None:
        self.words, self.asked = words, list[Trial]()
        monkeypatch.setattr(run, "_child", self.child)
        machine._probed[CPU] = MI300X

    def child(self, trial: Trial, device: torch.device, target: Target, limit: float,
              small: bool = False) -> Tried:
        self.asked.append(trial)
        word: Any = self.words.get(trial.op, "ran")
        launches = planned(trial.dtype, K=trial.head_dim or 64, policy=TRYING).launches
        configs = tuple(one.config for one in launches)
        return Tried(trial, word, "", configs, configs[-1] if word == "hang" else "")


def warm(*ops: str, **given: Any) -> list[str]:
    return [one.verdict for one in warmup.warmup(ops, head_dims=(64,), device="cpu", **given)]


def call(dtype: torch.dtype) -> set[str]:
    """Call chunk_simple_gla and return the names of the kernels that it starts."""
    started: set[str] = set()
    door.replace_starter(lambda launch, *rest: started.add(launch.kernel))
    x = torch.zeros(1, 64, 2, 64, dtype=dtype)
    flashlin.chunk_simple_gla(x, x, x, torch.zeros(1, 64, 2))
    return started


def test_a_call_starts_no_kernel_and_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(monkeypatch)
    with pytest.warns(UserWarning, match="flashlin warmup tries them"):
        assert call(torch.bfloat16) == set() and not children.asked


def test_what_warmup_has_found_right_is_started_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(monkeypatch)
    assert warm(OP) == ["ran"] and children.asked == [Trial(OP, "bfloat16", 64)]
    assert planned().path == "triton" and planned("bfloat16", "simple_gla").path == "triton"
    assert call(torch.bfloat16) == {"gate_cumsum", "simple_gla_scan"}
    warmup.forget()
    dispatch.plan.cache_clear()
    assert planned().path == "torch"


def test_what_was_not_tried_stays_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls outside of the successful trial stay in plain torch.

    They differ in dtype (another kernel, even with the same tile), head size, op (even with the same
    kernels), GPU, or the release of Triton or torch.
    """
    Children(monkeypatch)
    warm(OP)
    assert planned("float16").path == planned(K=256).path == planned(op="chunk_retention").path == "torch"
    others = MI300X._replace(arch="gfx950"), MI300X._replace(triton="3.7.1"), MI300X._replace(torch="2.9.0")
    assert {planned(target=one).path for one in others} == {"torch"}


@pytest.mark.parametrize("word", ["wrong numbers", "compiler error", "abort or illegal access", "not tried"])
def test_what_is_not_right_is_not_started(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    Children(monkeypatch, chunk_simple_gla=word)
    assert warm(OP) == [word] and planned().path == "torch"


def test_after_a_hang_nothing_is_tried_and_what_was_found_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(monkeypatch, chunk_retention="hang")
    assert warm(OP, "chunk_retention", "chunk_linear_attn", jobs=8) == ["ran", "hang"]
    assert [one.op for one in children.asked] == [OP, "chunk_retention"], "once each: it is not asked again"
    local_results.read_again()
    kept = local_results.local(MI300X).trials
    assert {name.split()[0]: one.word for name, one in kept.items()} == {OP: "ran", "chunk_retention": "hang"}


def test_a_record_that_is_shipped_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlin.guards import launch_table
    configs = [one.config for one in planned(policy=TRYING).launches]
    shipped = {config: {"3.6.0": {"ran": "gfx942"}} for config in configs}
    monkeypatch.setattr(launch_table, "table", lambda: shipped)
    launch_table._shipped.cache_clear()
    dispatch.plan.cache_clear()
    assert planned().path == "triton"
    others = [parse(f"{arch},triton=3.6.0") for arch in USUAL_AMD if arch != "gfx942"]
    assert {planned(target=one).path for one in others} == {"torch"}


@pytest.mark.parametrize("arch", USUAL_AMD)
def test_no_launch_has_more_stages_or_shared_memory_than_a_card_of_amd(arch: str) -> None:
    seen = 0
    for triton, asked in itertools.product((RELEASES[0], "3.5.1", RELEASES[-1]), few()):
        plan = dispatch.plan(asked, parse(f"{arch},triton={triton}"), TRYING)
        seen += len(plan.launches)
        assert all(one.num_stages <= STAGES_ON_AMD and one.shared <= SHARED_ON_AMD and not one.part
                   for one in plan.launches), plan
        assert plan.path == "triton" or plan.steps[-1][0].code != "backend"
    assert seen > len(PUBLIC)
