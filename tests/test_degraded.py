"""Tests of doctor's verdicts: degraded machines and their cost, failing imports, settings and folders."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import flashlin
from flashlin.compat import target as targets
from flashlin.diagnostics import checks
from flashlin.diagnostics import doctor as diagnosis
from flashlin.diagnostics.driver import Driver, Seen
from flashlin.diagnostics.report import Check, Report
from flashlin.guards import local_results
from flashlin.testing import environments
from tests.machines import H200, check, made, package, read, run

COPIES, PLAIN = "a cast there and one back, twice the memory", "each step reads and writes GPU memory"


pytestmark = pytest.mark.usefixtures("default_settings", "gpu_surroundings", "proven")


# --- degraded ---

@pytest.mark.parametrize(("target", "cost"), [
    ("triton=3.2.0,sm=75", COPIES), ("triton=3.9.0,sm=70", COPIES), ("triton=3.5.0,sm=103", PLAIN),
    ("triton=3.6.0,backend=hip", PLAIN)])
def test_a_gpu_that_is_not_used_or_used_with_copies_is_degraded_and_names_its_cost(target: str,
                                                                                   cost: str) -> None:
    found = flashlin.doctor(target=target, op="chunk_gla")
    [plan] = found.plans
    assert plan.verdict == "degraded" and cost in plan.cost
    assert f"cost: {plan.cost}" in found.text(verbose=True) and "cost" in found.markdown()
    assert found.status == "degraded" and found.ok and re.match(
        r"degraded. For an? [\w ]+ with Triton [\d.]+: every op runs, but "
        r"(no kernels run on this|some calls of 1 op run on fp32 copies)", found.verdict)
    assert f"Its cost: {plan.cost}." in flashlin.explain("chunk_gla", target=target)


@pytest.mark.parametrize("target",
                         ["triton=3.6.0,sm=90", "triton=3.7.1,sm=100", "triton=3.6.0,backend=cpu",
                          "cpu,triton=2.3.1", "triton=3.6.0,backend=interpreter"])
def test_nothing_else_is(target: str) -> None:
    found = flashlin.doctor(target=target)
    assert found.status != "degraded" and not {plan.verdict for plan in found.plans} & {"degraded", "problem"}
    assert {plan.cost for plan in found.plans} == {""}


def test_a_gpu_that_a_setting_leaves_unused_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    with flashlin.settings(path="torch"):
        [plan] = flashlin.doctor(target=H200, op="chunk_gla").plans
    assert plan.verdict == "degraded" and PLAIN in plan.cost and plan.because == "setting: path=torch"


def test_a_worse_verdict_goes_before_degraded() -> None:
    both = Report(version="1", devices=(), plans=(), issues=(),
                  checks=(Check(name="a", status="degraded", detail="slow"),
                         Check(name="b", status="problem", detail="broken")))
    assert both.status == "problem" and both.fails() and both.fails(
        "degraded") and both.verdict == "broken. b: broken."
    assert Report.model_validate_json(both.model_dump_json()) == both
    slow = both.model_copy(update={"checks": both.checks[:1]})
    assert not slow.fails() and slow.fails("degraded") and slow.verdict == (
        "degraded. Every op runs, but slow.")


SEEN = Driver("570.86", (Seen("NVIDIA H200", (9, 0)),))


@pytest.mark.parametrize(("cuda", "visible", "command"), [
    (None, None, "pip install --force-reinstall "), ("12.8", "", "unset CUDA_VISIBLE_DEVICES"),
    ("12.8", "-1", "unset CUDA_VISIBLE_DEVICES"), ("12.8", None, None)])
def test_a_card_that_torch_cannot_use_is_degraded_with_the_repair(cuda: str | None, visible: str | None,
                                                                  command: str | None,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(diagnosis, "examine",
                        lambda: made(cuda=cuda, targets={"cpu": targets.parse("cpu,triton=3.6.0")}, driver=SEEN))
    found = flashlin.doctor(op="chunk_gla")
    assert check(found, "driver").status == found.status == found.grade == "degraded"
    assert found.verdict.startswith("degraded. Every op runs, but your NVIDIA H200 (driver 570.86) is not used: torch")
    assert (found.advice is None) if command is None else found.advice is not None and (
        found.advice.command.startswith(command))
    assert found.plans[0].verdict == "ok"


# --- modules that cannot be imported ---

@pytest.mark.parametrize(("text", "said"), [
    ("raise RuntimeError('0 active drivers')", "RuntimeError: 0 active drivers"),
    ("raise SystemExit(3)", "SystemExit: 3"), ("import nothing_like_it", "No module named 'nothing_like_it'"),
    ("", "No module named 'triton.language'"),
    ("from . import language", "AttributeError: module 'triton' has no attribute '__version__'")],
    ids=["raises", "exits", "misses a module", "is empty", "has no version"])
def test_a_triton_whose_import_fails_is_not_ok(text: str, said: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.language")
    package(tmp_path, "triton", text)
    if "language" in text:
        (tmp_path / "triton" / "language.py").write_text("")
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    version, error = targets.triton_state.__wrapped__()
    assert (version, error) == ("", f"import fails: {said}")
    (one,) = checks.check_triton(made(torch="2.10.0", triton="", triton_error=error))
    assert one.status == "degraded" and said in one.detail


def test_a_triton_that_ends_the_process_does_not_end_a_call(tmp_path: Path) -> None:
    done = run("doctor", "--json", "--op", "chunk_gla",
               path=(package(tmp_path, "triton", "raise SystemExit(3)"),))
    assert done.returncode == 0 and read(done).plans[0].path == "torch" and read(done).grade == "degraded"


@pytest.mark.parametrize(("error", "said"), [
    ("not installed", "Triton is not installed"),
    ("import fails: OSError: libcuda", "Triton does not import: OSError: libcuda")])
def test_a_gpu_whose_triton_cannot_be_used_is_degraded(error: str, said: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "examine", lambda: made("sm=90,triton=none", triton="", triton_error=error))
    found = flashlin.doctor(op="chunk_gla")
    assert found.verdict == f"degraded. Every op runs, but no kernels run on your H100: {said}."
    assert found.plans[0].verdict == "degraded" and found.status == "degraded"


def test_a_machine_of_which_no_device_answers_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "examine",
                        lambda: made(lost={"cuda:0": "RuntimeError: CUDA error: out of memory"}))
    found = flashlin.doctor(op="chunk_gla")
    assert {(plan.verdict, plan.path, plan.because) for plan in found.plans} == {
        ("problem", "cannot run", "cuda:0: RuntimeError: CUDA error: out of memory")}


@pytest.mark.parametrize(("module", "ops"), [
    ("flashlin.kernels.rotary.forward", {"rotary_embedding"}),
    ("flashlin.kernels.hgrn.backward", {"chunk_hgrn", "fused_recurrent_hgrn"})])
def test_kernels_that_cannot_be_imported_are_a_problem_of_their_ops_on_a_gpu(module: str, ops: set[str],
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "examine", lambda: made(H200))
    monkeypatch.setitem(sys.modules, module, None)
    stopped = [plan for plan in flashlin.doctor().plans if plan.verdict == "problem"]
    assert {plan.op for plan in stopped} == ops and all(module in plan.because and plan.path == "cannot run"
                                                        for plan in stopped)


def test_a_public_module_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(checks.check_modules(made(H200)))
    monkeypatch.setitem(sys.modules, "flashlin.modules.rotary", None)
    monkeypatch.delitem(vars(flashlin), "RotaryEmbedding")
    (one,) = checks.check_modules(made(H200))
    assert one.status == "problem" and one.detail.startswith(
        "RotaryEmbedding cannot be imported: ModuleNotFoundError")
    assert one.fix == "pip install --force-reinstall --no-deps flashlin" and one in checks.checkup(
        made(H200), checks.CHECKS)


def test_without_torch_the_modules_are_not_blamed() -> None:
    assert not list(checks.check_modules(made(torch_error="ImportError: libcudart")._replace(torch=None)))


# --- settings and folders ---

def test_the_folders_are_settings_like_any_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "CACHE"):
        monkeypatch.setenv(f"FLASHLIN_{name}", str(tmp_path / name))
    assert [one.status for one in checks.check_policy(made(H200))] == ["ok"]
    home, cache = checks.check_folders(made(H200))
    assert (home.name, cache.name, home.status, cache.status) == ("FLASHLIN_HOME", "FLASHLIN_CACHE", "ok",
                                                                  "ok")
    assert home.detail.startswith(f"{tmp_path / 'HOME'} can be written") and cache.detail.startswith(
        f"{tmp_path / 'CACHE'} can be written")
    assert not list(tmp_path.iterdir()) and (local_results.place()[0],
                                             environments.cache_folder()) == (tmp_path / "HOME",
                                                                              tmp_path / "CACHE")


def test_folders_that_cannot_be_written_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "CACHE"):
        monkeypatch.setenv(f"FLASHLIN_{name}", f"/dev/null/{name}")
    for one, name in zip(checks.check_folders(made(H200)), ("HOME", "CACHE"), strict=True):
        assert one.status == "worked around" and f"/dev/null/{name} cannot be written" in one.detail
        assert one.fix == f"set FLASHLIN_{name} to a folder that you can write to"
    monkeypatch.setattr(local_results, "place", lambda warn: (
        None, "FLASHLIN_HOME=/x belongs to another user"))
    assert next(checks.check_folders(made(H200))).detail.startswith(
        "FLASHLIN_HOME=/x belongs to another user: the results of flashlin warmup")


@pytest.mark.parametrize(("name", "meant"),
                         [("FLASHLIN_POLICI", "FLASHLIN_POLICY is"),
                          ("FLASHLIN_CHACHE", "FLASHLIN_CACHE is"),
                          ("FLASHLIN_XYZZY_PLUGH", "need one of FLASHLIN_AUTOTUNE, FLASHLIN_CACHE, ")])
def test_a_variable_that_means_nothing_is_told_with_the_one_that_was_meant(name: str, meant: str,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    _, one = checks.check_policy(made(H200))
    assert (one.status, one.fix) == ("worked around",
                                     f"unset {name}") and one.detail.startswith(
                                         f"{name} is not a setting; {meant}")


def test_what_was_found_on_this_machine_is_listed_with_dates(home: Path) -> None:
    where, here = "cuda:0", made(H200)
    assert [one.detail for one
            in checks.check_tried(here)] == [
                f"{where}: 0 configurations of kernels ran in trials on this machine"]
    noon = 1_700_000_000.0
    local_results.keep(local_results.Table(
        {"a 4": local_results.Verdict("ran", noon, "chunk_gla bfloat16 64"),
         "b 8": local_results.Verdict("hang", noon, "chunk_kda bfloat16 64", "no answer")},
        {"chunk_gla float32 64": local_results.Verdict("not tried", noon, "chunk_gla float32 64",
                                                  "CUDA out of memory")}), here.targets[where])
    ran, bad, untried = checks.check_tried(here)
    assert (ran.status, ran.detail) == ("ok",
                                        f"{where}: 1 configurations of kernels ran, 2023-11-14 to 2023-11-14")
    assert (bad.status, bad.fix) == ("worked around", "flashlin warmup --forget --op chunk_kda")
    assert bad.detail == f"{where}: b 8: hang on 2023-11-14 (no answer); another configuration is planned"
    assert untried.status == "could not check" and "chunk_gla float32 64 could not be tried on 2023-11-14: CUDA out of memory" in untried.detail
