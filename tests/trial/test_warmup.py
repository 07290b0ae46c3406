"""Tests of trials in child processes: the parent survives every end of a child, and blames the right kernel.

Failures outside of kernels count against no kernel. Kernels run in Triton's interpreter here.
"""
from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.__main__ import main
from flashlin.compat.target import parse, probe
from flashlin.guards import launch_table, local_results
from flashlin.guards.local_results import Table, Verdict
from flashlin.kernels.families import family_of
from flashlin.testing.compare import check
from flashlin.trial import child, run

pytestmark = pytest.mark.usefixtures("home")

CPU = torch.device("cpu")
CONFIG = "simple_gla_scan BT=64 BK=64 BV=64 warps=4 stages=2 bf16 dot half_dot rmw_acc"
BEGIN = "import json, os, signal, sys, time\ndef say(**it): print(json.dumps(it), flush=True)\n"
BEFORE = "say(launch='first'); say(landed='first')\n"
INSIDE = f"{BEFORE}say(launch={CONFIG!r})\n"
AFTER = f"{INSIDE}say(landed={CONFIG!r})\n"


def plant(monkeypatch: pytest.MonkeyPatch, *codes: str) -> list[tuple[str, ...]]:
    """Replace the next child processes by these codes, in order; return a list of their arguments."""
    left, asked = list(codes), list[tuple[str, ...]]()

    def command(*arguments: str) -> list[str]:
        asked.append(arguments)
        return [sys.executable, "-c", BEGIN + left.pop(0)]
    monkeypatch.setattr(run, "CHILD", command)
    return asked


def says(word: str, detail: str = "", memory: bool = False) -> str:
    return f"say(verdict={word!r}, detail={detail!r}, memory={memory})"


def dies(how: str, grumbling: str = "") -> str:
    return f"sys.stderr.write({grumbling!r}); sys.stderr.flush(); {how}"


ABORT, SLEEP = "os.abort()", "time.sleep(60)"


@pytest.mark.parametrize("code, word, detail, blamed", [
    (AFTER + says("ran"), "ran", "", {"first": "ran", CONFIG: "ran"}),
    (AFTER + says("wrong numbers", "o off by 1"), "wrong numbers", "o off by 1",
     {"first": "wrong numbers", CONFIG: "wrong numbers"}),
    (INSIDE + says("compiler error", "IndexError: map::at"), "compiler error", "IndexError: map::at",
     {CONFIG: "compiler error"}),
    (INSIDE + dies(ABORT, "x.cpp:3: Assertion failed"), "abort or illegal access",
     f"SIGABRT, at {CONFIG}: x.cpp:3: Assertion failed", {CONFIG: "abort or illegal access"}),
    (INSIDE + dies("sys.exit(70)", "LLVM ERROR: cannot select"), "abort or illegal access",
     f"exit code 70, at {CONFIG}: LLVM ERROR: cannot select", {CONFIG: "abort or illegal access"}),
    # ends that do not count against a kernel
    (AFTER + dies(ABORT), "not tried", f"SIGABRT, after {CONFIG}", {}),
    (dies(ABORT), "not tried", "SIGABRT, before any kernel", {}),
    (INSIDE + dies("os.kill(os.getpid(), signal.SIGTERM)"), "not tried", f"SIGTERM, at {CONFIG}", {}),
    (INSIDE + dies("os.kill(os.getpid(), signal.SIGBUS)"), "not tried", f"SIGBUS, at {CONFIG}", {}),
    (INSIDE + dies(ABORT, "LLVM ERROR: IO failure on output stream: No space left on device"), "not tried",
     f"SIGABRT, at {CONFIG}: LLVM ERROR: IO failure on output stream: No space left on device", {}),
    (INSIDE + "raise OSError(28, 'No space left on device')", "not tried",
     f"exit code 1, at {CONFIG}: OSError: [Errno 28] No space left on device", {}),
    (INSIDE + says("not tried", "RuntimeError: CUDA-capable device(s) is/are busy or unavailable"),
     "not tried", "RuntimeError: CUDA-capable device(s) is/are busy or unavailable", {}),
    ("print('{\"launch\": \"ha', end='')", "not tried", "exit code 0, before any kernel", {}),
])
def test_however_a_child_ends_the_parent_lives_and_blames_kernels_for_what_they_do(
        code: str, word: str, detail: str, blamed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, code)
    [found] = flashlin.warmup(["chunk_simple_gla"], head_dims=[64], device="cpu")
    assert (found.verdict, found.detail) == (word, detail)
    here = local_results.local(probe(CPU))
    assert {config: one.word for config, one in here.kernels.items()} == blamed
    assert here.trials["chunk_simple_gla bfloat16 64"].word == word and here.trials["chunk_simple_gla "
                                                                                    "bfloat16 64"].said == detail


@pytest.mark.parametrize("first, detail", [
    (INSIDE + says("not tried", "OutOfMemoryError: CUDA out of memory", memory=True), "CUDA out of memory"),
    (INSIDE + dies("os.kill(os.getpid(), signal.SIGKILL)"), "SIGKILL"),
    (INSIDE + dies(ABORT, "terminate called after throwing an instance of 'std::bad_alloc'"), "bad_alloc")])
def test_what_lacks_memory_is_asked_again_smaller(first: str, detail: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plant(monkeypatch, first, AFTER + says("ran"))
    told: list[Any] = []
    [found] = flashlin.warmup(["chunk_simple_gla"], head_dims=[64], device="cpu", progress=told.append)
    assert found.verdict == "ran" and told == [found]
    assert ["--small" in one for one in asked] == [False, True]
    asked = plant(monkeypatch, first, first)
    [found] = flashlin.warmup(["chunk_simple_gla"], head_dims=[64], device="cpu")
    assert found.verdict == "not tried" and detail in found.detail
    assert {one.word
            for one in local_results.local(probe(CPU)).kernels.values()} == {
                "ran"}, "the table has not changed"


def test_a_parent_gives_back_the_memory_it_does_not_use_unless_it_captures_a_graph(
        monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        run._give_back_memory(torch.device("cuda:0"))
        run._give_back_memory(CPU)
        assert len(freed) == (not capturing)


def test_what_seems_to_hang_is_asked_again_alone_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, INSIDE + SLEEP, INSIDE + "time.sleep(2)\n" + says("ran"))
    [found] = flashlin.warmup(["chunk_simple_gla"], head_dims=[64], device="cpu", limit=1.5)
    assert found.verdict == "ran", "it was slow, on a busy machine"
    plant(monkeypatch, INSIDE + SLEEP, INSIDE + SLEEP)
    [found] = flashlin.warmup(["chunk_simple_gla"], head_dims=[64], device="cpu", limit=0.5)
    assert (found.verdict, found.detail) == ("hang", f"no answer in 1 s, at {CONFIG}")
    assert local_results.local(probe(CPU)).kernels[CONFIG].word == "hang"


@pytest.mark.parametrize("where, at", [("", "before any kernel"), (AFTER, f"after {CONFIG}")])
def test_who_waits_for_something_else_hangs_in_no_kernel(where: str, at: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, where + SLEEP)
    [found] = flashlin.warmup(["chunk_simple_gla"], head_dims=[64], device="cpu", limit=0.5)
    assert (found.verdict, found.detail) == ("not tried", f"no answer in 0.5 s, {at}")
    assert not local_results.local(probe(CPU)).kernels


def test_a_child_plans_with_what_its_parent_could_write_nowhere(monkeypatch: pytest.MonkeyPatch,
                                                                tmp_path: Path) -> None:
    """A child plans with results that its parent could not write to disk, however many they are.

    They are passed through stdin, because one argument of a command is limited to 128 KiB.
    """
    monkeypatch.setenv("FLASHLIN_HOME", "/dev/null")
    reads = f"open({str(tmp_path / 'known')!r}, 'w').write(sys.stdin.read())\n"
    asked = plant(monkeypatch, INSIDE + says("hang"), INSIDE + says("hang"), reads + AFTER + says("ran"))
    many = Table({f"{at} {CONFIG}": Verdict("ran", 1.0, "op") for at in range(3001)}, {})
    for known in (Table({}, {}), many):
        if known.size:
            local_results.know(json.dumps(known.updated(local_results._unwritten[probe(CPU)])._asdict()),
                               probe(CPU))
        with pytest.warns(UserWarning, match="apply in this process only"):
            flashlin.warmup(["chunk_simple_gla"], head_dims=[64], device="cpu")
    assert "--known" not in asked[0] and asked[-1][-1] == "--known"
    here = probe(CPU)
    local_results._unwritten.clear()
    local_results.know((tmp_path / "known").read_text(), here)
    assert len(local_results.local(here).kernels) == 3002
    assert local_results.local(here).kernels[CONFIG].word == "hang"


def test_where_no_process_can_be_started_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    [found] = flashlin.warmup(["rms_norm"], device="cpu")
    assert found.verdict == "not tried" and found.detail.startswith("cannot be started: [Errno 11]")


def test_wrong_numbers_are_not_the_fault_of_what_is_right_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_table, "trust",
                        lambda config, target: "ran" if config == "shipped" else "unknown")
    started = [f"say(launch='{name}'); " for name in ("first", "shipped", "other")]
    plant(monkeypatch, "".join(started) + says("wrong numbers"), started[0] + says("ran"))
    flashlin.warmup(["chunk_simple_gla", "chunk_gla"], head_dims=[64], device="cpu", jobs=1)
    assert {config: one.word
            for config, one in local_results.local(probe(CPU)).kernels.items()} == {"first": "ran",
                                                                               "other": "wrong numbers"}


class OutOfMemoryError(RuntimeError):
    pass


class CompilationError(Exception):
    pass


@pytest.mark.parametrize("error, inside, word, memory", [
    (CompilationError("at 3:4: type mismatch"), True, "compiler error", False),
    (IndexError("map::at"), True, "compiler error", False),
    (RuntimeError("PassManager::run failed"), True, "compiler error", False),
    (RuntimeError("OutOfResources: out of resource: shared memory, Required: 300000"), True, "compiler error",
     False),
    (RuntimeError("`ptxas` failed with error code 139"), True, "compiler error", False),
    (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True,
     "abort or illegal access", False),
    (RuntimeError("CUDA error: unspecified launch failure"), True, "abort or illegal access", False),
    (RuntimeError("CUDA error: the launch timed out and was terminated"), True, "hang", False),
    (RuntimeError("Triton Error [CUDA]: out of memory"), True, "not tried", True),
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True, "not tried", True),
    (MemoryError(), True, "not tried", True),
    (RuntimeError("`ptxas` failed with error code -9"), True, "not tried", True),
    (OSError(28, "No space left on device"), True, "not tried", False),
    (PermissionError(13, "Permission denied", "/cache"), True, "not tried", False),
    (subprocess.CalledProcessError(1, ["gcc", "main.c"]), True, "not tried", False),
    (ImportError("libcuda.so.1: cannot open shared object file"), True, "not tried", False),
    (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), True, "not tried", False),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True, "not tried", False),
    (IndexError("map::at"), False, "not tried", False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, "not tried", False)])
def test_what_a_child_makes_of_an_error(error: Exception, inside: bool, word: str, memory: bool,
                                        monkeypatch: pytest.MonkeyPatch,
                                        capfd: pytest.CaptureFixture[str]) -> None:
    def attempt(given: Any, say: Any, struck: list[BaseException]) -> tuple[str, str]:
        say(launch="kernel")
        struck += [error] if inside else []
        raise error
    monkeypatch.setattr(child, "attempt", attempt)
    monkeypatch.setattr(os, "dup2", lambda *handles: None)
    child.main(["--device", "cpu", "--op", "chunk_simple_gla", "--dtype", "float32"])
    said = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert said[-1] == {"verdict": word, "detail": said[-1]["detail"],
                        "memory": memory} and type(error).__name__ in said[-1]["detail"]


def test_an_error_of_the_real_child_outside_a_launch_blames_no_kernel(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """An error outside of a launch, here a missing device, counts against no kernel.

    A GPU in exclusive mode that another job uses gives the same error.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    here = parse("triton=3.6.0,sm=90")
    [found] = run.run([run.Trial("chunk_simple_gla", "float32", 16)], torch.device("cuda:0"), here)
    assert found.verdict == "not tried" and found.detail and not found.configs
    assert not local_results.local(here).kernels


@pytest.mark.alternate
def test_the_real_child_compiles_runs_and_remembers(monkeypatch: pytest.MonkeyPatch, home: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    arguments = ["warmup", "--op", "chunk_simple_gla", "--device", "cpu"]
    assert main([*arguments, "--dtype", "float32", "--head-dim", "16", "--json"]) == 0
    shown = capsys.readouterr()
    [found] = json.loads(shown.out)
    assert found["verdict"] == "ran" and any(config.startswith("simple_gla_dv BT=")
                                             for config in found["configs"])
    assert "flashlin: ran            chunk_simple_gla float32 D=16" in shown.err
    [kept] = home.glob("launches-*.json")
    assert {one[0] for one in json.loads(kept.read_text())["kernels"].values()} == {"ran"}
    assert main([*arguments, "--forget"]) == 0 and not kept.exists()
    assert f"{len(found['configs']) + 1} results deleted in {home}" in capsys.readouterr().out


def test_the_smaller_case_is_right_and_smaller() -> None:
    for op, (_, mode) in dispatch.OPS.items():
        if mode != "auto":  # ops with a fixed mode have a case for trials
            size = 64 if family_of(op).head_dim else 0
            whole, small = (child.small_case(op, size, small) for small in (False, True))
            inputs = (case.make(torch.float32, torch.Generator().manual_seed(0)) for case in (whole, small))
            sizes = [sum(x.numel() for x in made.values()) for made in inputs]
            assert sizes[1] <= sizes[0], op


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.alternate
def test_what_is_tried_of_each_op_fits_its_reference(size: int) -> None:
    for op in (op for op, (_, mode) in dispatch.OPS.items() if mode != "auto"):
        case = child.small_case(op, size if family_of(op).head_dim else 0, True)
        assert all(one.ok for one in check(case, CPU, torch.float32)), op


def test_where_there_is_nothing_to_compile_no_kernel_is_kept() -> None:
    [found] = flashlin.warmup(["rms_norm"], ["float32"], device="cpu")
    assert found.verdict == "torch path" and found.fine and not local_results.local(probe(CPU)).kernels


@pytest.mark.parametrize("arguments, says", [
    (["--op", "chunk_nothing"], "op: got 'chunk_nothing', need one of "),
    (["--forget", "--op", "chunk_nothing"], "op: got 'chunk_nothing', need one of "),
    (["--dtype", "float8"], "dtype: got 'float8', need one of bfloat16, float16, float32"),
    (["--head-dim", "1000"], "head_dim: got 1000, need 1 to 512")])
def test_mistakes_are_told(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_nowhere_to_forget_is_told(monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FLASHLIN_HOME", "/dev/null")
    assert main(["warmup", "--forget"]) == 2
    assert "FLASHLIN_HOME=/dev/null is not a folder" in capsys.readouterr().err


def test_a_verdict_of_each_word_can_be_kept() -> None:
    for word in local_results.WORDS:
        local_results.keep(Table({}, {word: Verdict(word, 1.0, word)}), parse("triton=3.6.0,sm=90"))
    local_results.read_again()
    assert len(local_results.local(parse("triton=3.6.0,sm=90")).trials) == 7
