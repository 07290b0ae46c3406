"""flashlin warmup: what a child does is told and remembered, however it ends, and the parent lives. Kernels run in Triton's interpreter here."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashlin
from flashlin import dispatch, warming
from flashlin.__main__ import main
from flashlin.compat.target import parse, probe
from flashlin.guards import proven
from flashlin.guards.problem import Problem

CPU = torch.device("cpu")
HOPPER = parse("triton=3.6.0,sm=90", torch_version="2.11.0")
CONFIG = "simple_gla_scan BT=64 BK=64 BV=64 warps=4 stages=2 bf16 dot half_dot rmw_acc"
PLANTED = {
    "ok": "print(json.dumps({'status': 'ok', 'detail': ''}))",
    "wrong": "print(json.dumps({'status': 'wrong', 'detail': 'o off by 1'}))",
    "abort": "sys.stderr.write('Assertion failed'); sys.stderr.flush(); os.abort()",
    "hang": "time.sleep(600)",
    "failed": "raise OSError(28, 'No space left on device')"}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("FLASHLIN_HOME", str(tmp_path / "home"))
    for cached in (proven.local, proven._trust, dispatch.plan):
        cached.cache_clear()
    yield tmp_path / "home"
    for cached in (proven.local, proven._trust, dispatch.plan):
        cached.cache_clear()


def plant(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    code = f"import json, os, sys, time; print(json.dumps({{'launch': 'first'}})); print(json.dumps({{'launch': {CONFIG!r}}}), flush=True); {ending}"
    monkeypatch.setattr(warming, "CHILD", (sys.executable, "-c", code))


@pytest.mark.parametrize("status", PLANTED)
def test_however_a_child_ends_the_parent_lives_and_says_so(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, PLANTED[status])
    [found] = flashlin.warmup(["chunk_simple_gla"], head_dims=[64], device="cpu", limit=3 if status == "hang" else 60)
    assert found.status == status and found.configs == ("first", CONFIG)
    said = {"ok": "", "wrong": "o off by 1", "abort": f"SIGABRT, at {CONFIG}: Assertion failed", "hang": f"no answer in 3 s, at {CONFIG}",
            "failed": f"exit code 1, at {CONFIG}: OSError: [Errno 28] No space left on device"}[status]
    assert found.detail == said
    kept = proven.local(probe(CPU))
    assert kept == {"ok": {"first": "ran", CONFIG: "ran"}, "wrong": {"first": "failed", CONFIG: "failed"}}.get(status, {CONFIG: "failed"})


def test_a_child_that_dies_before_any_kernel_blames_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "CHILD", (sys.executable, "-c", "import os; os.abort()"))
    [found] = flashlin.warmup(["rms_norm"], device="cpu")
    assert (found.status, found.detail, proven.local(probe(CPU))) == ("abort", "SIGABRT, before any kernel", {})


def planned() -> set[str]:
    dispatch.plan.cache_clear()
    problem = Problem("chunk_simple_gla", "simple_gla", "chunk", 2, 128, 4, 64, 64, 2, "bfloat16", options=("g",))
    return {launch.config for launch in dispatch.plan(problem, HOPPER).launches}


def test_what_failed_on_this_machine_is_planned_otherwise_there() -> None:
    assert CONFIG in planned()
    proven.keep({CONFIG: "failed"}, HOPPER)
    assert planned() and CONFIG not in planned()
    proven.keep({CONFIG: "ran"}, HOPPER)
    assert CONFIG in planned()
    proven.keep({CONFIG: "failed"}, HOPPER._replace(triton="3.6.1"))
    assert CONFIG in planned(), "what another release did says nothing of this one"


def test_other_kernels_make_verdicts_void(monkeypatch: pytest.MonkeyPatch) -> None:
    proven.keep({CONFIG: "failed"}, HOPPER)
    proven.local.cache_clear()
    monkeypatch.setattr(proven, "_kernels", lambda: "other sources")
    assert proven.local(HOPPER) == {}


@pytest.mark.parametrize("text", ['{"a": "ra', "[]", "", "\x00\x01"])
def test_a_broken_file_counts_as_none_and_is_replaced(text: str) -> None:
    proven.keep({CONFIG: "failed"}, HOPPER)
    proven._file(HOPPER).write_text(text)
    proven.local.cache_clear()
    assert proven.local(HOPPER) == {}
    proven.keep({CONFIG: "ran"}, HOPPER)
    assert proven.local(HOPPER) == {CONFIG: "ran"}


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHLIN_HOME", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="hold in this process only.*cannot be written"):
        proven.keep({CONFIG: "failed"}, HOPPER)
    assert proven.local(HOPPER) == {CONFIG: "failed"}


def test_eight_processes_at_once_lose_nothing(home: Path) -> None:
    code = ("import sys; from flashlin.guards import proven; from flashlin.compat.target import parse\n"
            "for n in range(5): proven.keep({f'{sys.argv[1]}-{n}': 'ran'}, parse('triton=3.6.0,sm=90'))")
    running = [subprocess.Popen([sys.executable, "-c", code, str(rank)], env={**os.environ, "FLASHLIN_HOME": str(home)}) for rank in range(8)]
    assert [child.wait(60) for child in running] == [0] * 8
    assert set(proven.local(parse("triton=3.6.0,sm=90"))) == {f"{rank}-{n}" for rank in range(8) for n in range(5)}
    assert not [path for path in home.iterdir() if path.suffix not in (".json", ".lock")], "nothing half written stays behind"


def test_the_real_child_compiles_runs_and_remembers(monkeypatch: pytest.MonkeyPatch, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["warmup", "--op", "chunk_simple_gla", "--dtype", "float32", "--head-dim", "16", "--device", "cpu", "--json"]) == 0
    shown = capsys.readouterr()
    [found] = json.loads(shown.out)
    assert found["status"] == "ok" and any(config.startswith("simple_gla_dk BT=") for config in found["configs"])
    assert "flashlin: ok         chunk_simple_gla float32 D=16" in shown.err
    [kept] = home.glob("launches-*.json")
    assert set(json.loads(kept.read_text()).values()) == {"ran"}


def test_where_there_is_nothing_to_compile_nothing_is_kept() -> None:
    [found] = flashlin.warmup(["rms_norm"], ["float32"], device="cpu")
    assert found.status == "torch path" and found.fine and proven.local(probe(CPU)) == {}


@pytest.mark.parametrize("arguments, says", [
    (["--op", "chunk_nothing"], "op: got 'chunk_nothing', need one of chunk_simple_gla, "),
    (["--dtype", "float8"], "dtype: got 'float8', need one of bfloat16, float16, float32"),
    (["--head-dim", "1000"], "head_dim: got 1000, need 1 to 512")])
def test_mistakes_are_told(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--device", "cpu", *arguments]) == 2
    assert says in capsys.readouterr().err
