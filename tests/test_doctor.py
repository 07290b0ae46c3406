"""Tests that doctor gives an answer on every machine, however broken, and that its predictions come true."""
from __future__ import annotations

import json
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flashlin
from flashlin import dispatch
from flashlin.__main__ import main
from flashlin.compat.target import Target, parse
from flashlin.diagnostics import checks, environment, machine, report, self_test, typical_plans
from flashlin.diagnostics import doctor as diagnosis
from flashlin.diagnostics import driver as drivers
from flashlin.diagnostics.checks import CHECKS, checkup
from flashlin.diagnostics.driver import Seen
from flashlin.diagnostics.machine import Machine
from flashlin.diagnostics.report import Report
from flashlin.dispatch import OPS
from flashlin.guards import launch_table
from flashlin.guards.family import USES
from flashlin.kernels.families import PUBLIC
from flashlin.policy import Policy
from tests import hostile
from tests.machines import BROKEN, H200, NO_TORCH, check, installed, made, package, read, run
from tools import sections

pytestmark = pytest.mark.usefixtures("default_settings", "gpu_surroundings")


# --- broken machines, each simulated in a child process ---

@pytest.mark.parametrize("broken", ["missing", "raising", "exiting", "old", "empty"])
def test_a_torch_that_cannot_be_used_is_the_verdict(broken: str, tmp_path: Path) -> None:
    text = {"missing": "", "raising": BROKEN, "exiting": "raise SystemExit(3)",
            "old": "__version__ = '2.1.0'", "empty": ""}[broken]
    before, path = (NO_TORCH, ()) if broken == "missing" else ("", (package(tmp_path, "torch", text),))
    done = run("doctor", "--json", before=before, path=path)
    found = read(done)
    assert done.returncode == 1 and not found.ok
    assert check(found, "torch").status == "problem"
    assert found.advice is not None and 'install' in found.advice.command and '"torch==' in found.advice.command
    assert {row.op for row in found.plans} == set(OPS)
    assert {(row.path, row.verdict) for row in found.plans} == {("cannot run", "problem")}
    assert found.verdict.startswith("broken. torch: cannot be used: ")


def test_a_setting_that_is_none_is_told_once_and_taken_away() -> None:
    """An invalid setting is reported once, with the advice to unset it.

    The test uses a child process because modules read settings when they are imported.
    """
    found = read(run("doctor", "--json", "--op", "rms_norm", FLASHLIN_PATH="cuda"))
    assert [one.name for one in found.checks if one.status == "problem"] == ["policy"]
    assert found.advice is not None and found.advice.command.endswith(" FLASHLIN_PATH")


def test_other_machines_are_planned_for_without_torch_and_triton() -> None:
    done = run("doctor", "--json", "--target", "triton=3.6.0,sm=90",
               before=NO_TORCH + "; sys.modules['triton'] = None")
    assert done.returncode == 0 and {row.path for row in read(done).plans} == {"triton"}


def test_help_needs_nothing_but_python() -> None:
    for arguments in (["--help"], ["doctor", "--help"], ["explain", "--help"]):
        done = run(*arguments, before=NO_TORCH
                   + "\nfor name in ('triton', 'pydantic', 'packaging'): sys.modules[name] = None")
        assert done.returncode == 0 and "examples" in done.stdout and not done.stderr


# A script that makes a call of an op when the process exits, after doctor has reported on such calls.
CALL = """
    import atexit, contextlib, sys
    def call():
        with contextlib.redirect_stdout(sys.stderr):
            try:
                import flashlin, torch
                flashlin.chunk_simple_gla(*[torch.ones(1, 4, 1, 16)] * 3)
                print("the call ran")
            except Exception as error:
                print("the call failed:", error)
    atexit.register(call)
    """


def happened(done: subprocess.CompletedProcess[str], found: Report) -> None:
    """Check that doctor predicted plain torch for the call, and that the call then ran."""
    assert "the call ran" in done.stderr, done.stderr
    assert (found.plans[0].path, done.returncode) == ("torch", 0)


@pytest.mark.parametrize(("text", "said"),
                         [("__version__ = '2.3.1'\nfrom . import language", "2.3.1 is older than 3.0"),
                          (BROKEN, "libcudart")])
def test_with_a_triton_that_cannot_be_used_doctor_says_what_happens(text: str, said: str,
                                                                    tmp_path: Path) -> None:
    package(tmp_path, "triton", text)
    (tmp_path / "triton" / "language.py").write_text("class dtype: pass")
    done = run("doctor", "--json", "--op", "chunk_simple_gla", before=CALL, path=(tmp_path,))
    found = read(done)
    assert check(found, "triton").status == "degraded" and said in check(found, "triton").detail
    # The broken package is in a plain folder of the import path, which pip does not manage.
    assert found.advice is not None and not found.advice.command and str(tmp_path) in found.advice.why
    happened(done, found)


def test_two_tritons_a_home_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    installed(package(tmp_path, "triton", "__version__ = '3.1.0'\nfrom . import language"), "triton", "3.1.0")
    (tmp_path / "triton" / "language.py").write_text("class dtype: pass")
    done = run("doctor", "--json", "--op", "chunk_simple_gla", before=CALL, path=(tmp_path,), cwd="/proc",
               HOME="/dev/null/home")
    found = read(done)
    both = check(found, "two Tritons")
    assert both.status == "worked around" and "triton 3.1.0" in both.detail
    assert "first on the path wins, which is 3.1.0" in both.detail
    # pip cannot repair an import path
    assert found.advice is None and check(found, "pair").status == "worked around"
    assert check(found, "cache").status == "worked around" and "cannot be written" in check(found,
                                                                                            "cache").detail
    happened(done, found)


@pytest.mark.alternate
def test_this_machine_in_text_and_markdown_and_nothing_written(tmp_path: Path) -> None:
    before = "import os; os.umask(0)"
    text = run("doctor", before=before, cwd=tmp_path, HOME=str(tmp_path),
               TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONDONTWRITEBYTECODE="1")
    assert text.returncode == 0 and not text.stderr
    first, _, device, *rest = text.stdout.splitlines()
    assert first.startswith(f"flashlin {flashlin.__version__}: ") and ". Every op runs" in first + device
    assert len(rest) < 40 and all(len(line) <= 80 for line in text.stdout.splitlines())
    assert not list(tmp_path.iterdir()), "doctor is read-only"
    assert str(tmp_path) not in text.stdout, "home folders stay out"


def test_the_long_text_has_a_line_for_each_op() -> None:
    lines = flashlin.doctor(target="T4,triton=3.2.0").text(verbose=True).splitlines()
    assert all(sum(f"  {op} " in line for line in lines) == 1 for op in OPS)


# --- checks, on machines made by hand ---

def test_every_check_may_fail_and_the_others_still_answer() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")
    found = checkup(Hostile(), CHECKS)  # type: ignore[arg-type]
    assert {one.status for one in found} == {"ok", "could not check"}
    assert {"torch", "triton", "driver", "policy", "cache"} <= {one.name for one in found}
    assert "could not check: RuntimeError: no torch" in [one.detail for one in found]


def test_two_tritons_in_one_folder_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(installed(tmp_path, "triton", "3.6.0"), "pytorch-triton", "3.2.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (both,) = checks.check_copies(made(H200, dists=machine.distributions()))
    assert both.status == "problem" and "overwrite each other" in both.detail


def test_a_loaded_triton_that_is_not_the_installed_one_is_told(tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(installed(tmp_path, "triton", "3.7.1"))])
    dists = machine.distributions()
    (one,) = checks.check_copies(made(H200, dists=dists))
    assert one.status == "worked around" and "3.6.0 is loaded from " in one.detail
    assert "3.7.1 is installed in " in one.detail
    assert not list(checks.check_copies(made("triton=3.7.1,sm=90", dists=dists)))


@pytest.mark.parametrize(("torch", "triton", "status"), [
    ("2.10.0+cu128", "3.6.0", "ok"), ("2.8.0", "3.6.0", "worked around"), ("2.14.1", "3.8.3", "ok"),
    ("2.15.0", "3.8.0", "worked around"), ("2.99.0", "3.6.0", None)])
def test_the_pair_of_torch_and_triton(torch: str, triton: str, status: str | None) -> None:
    pairs = [one.status for one in checks.check_triton(made(f"triton={triton},sm=90", torch=torch))
             if one.name == "pair"]
    assert pairs == ([] if status is None else [status])


@pytest.mark.parametrize(("triton", "direct"), [
    ("3.6.0", True), ("3.7.1", True), ("3.5.1", False), ("3.8.0", False)])
def test_it_says_how_kernels_start(triton: str, direct: bool) -> None:
    [said] = [one for one in checks.check_triton(made(f"triton={triton},sm=90")) if one.name == "starts"]
    assert said.status == "ok" and ("started directly" in said.detail) == direct
    assert direct or f"not been compared on triton {triton}" in said.detail
    assert not [one for one in checks.check_triton(made()) if one.name == "starts"]


@pytest.mark.parametrize(("on", "status"), [(H200, "problem"), ("sm=90,backend=cpu", "worked around")])
def test_a_cache_or_ptxas_that_cannot_be_used(on: str, status: str, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ptxas").write_text("not executable")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/cache")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    (cache,) = environment.check_cache(made(on))
    ptxas, *_ = checks.check_ptxas(made(on))
    assert (cache.status, ptxas.status, ptxas.fix) == (status, status, "unset TRITON_PTXAS_PATH")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "to" / "be" / "made"))
    assert [one.status for one in environment.check_cache(made(on))] == ["ok"] and not (tmp_path / "to").exists()


@pytest.mark.parametrize(("mounted", "kind"), [
    ("server:/home {} nfs4 rw 0 0", "nfs4"), ("x {} fuse.sshfs rw 0 0", "fuse.sshfs"), ("x {} ext4 rw 0 0", ""),
    ("server:/other /elsewhere nfs rw 0 0", "")])
def test_a_cache_on_a_network_file_system_is_named(mounted: str, kind: str, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text(f"disk / ext4 rw 0 0\n{mounted.format(tmp_path)}\n")
    monkeypatch.setattr(environment, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for on, status in ((H200, "degraded"), ("sm=90,backend=cpu", "worked around")):
        (found,) = environment.check_cache(made(on))
        assert found.status == (status if kind else "ok")
        assert f"is on a network file system ({kind})" in found.detail or not kind
        assert found.fix == ('export TRITON_CACHE_DIR="$(mktemp -d)"' if kind else "")


GLIBCXX = ("import fails: ImportError: /opt/conda/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found "
           "(required by libtriton.so)")


@pytest.mark.parametrize(("conda", "system", "fix"), [
    ("/opt/conda", True, 'conda install -y -c conda-forge "libstdcxx-ng>=13"'),
    ("", True, "export LD_PRELOAD={}"), ("", False, "")])
def test_an_old_libstdcxx_is_repaired_and_no_package_is_installed_for_it(
        conda: str, system: bool, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libstdc++.so.6"
    if system:
        library.touch()
    monkeypatch.setattr(environment, "LIBSTDCXX", (str(library),))
    monkeypatch.setenv("CONDA_PREFIX", conda)
    broken = made(H200)._replace(triton="", triton_error=GLIBCXX)
    (found,) = environment.check_libstdcxx(broken)
    assert found.status == "problem" and "has no GLIBCXX_3.4.30" in found.detail
    assert found.fix == fix.format(library)
    monkeypatch.setattr(diagnosis, "examine", lambda: broken)
    advised = flashlin.doctor(op="chunk_gla").advice
    assert (advised.command if advised else "") == found.fix
    assert not list(environment.check_libstdcxx(made(H200)))


def test_which_ptxas_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.86\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(program))
    (one,) = checks.check_ptxas(made(H200))
    assert one.status == "ok" and "by TRITON_PTXAS_PATH" in one.detail


CARD = "NVIDIA H200, 570.86, 9.0, 140000, 143771, Default"
SMI = f"#!/bin/sh\necho '{CARD}'\necho '{CARD}'\n"
SMI_OLD = """#!/bin/sh
case "$1" in *compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2;; esac
echo 'Tesla T4, 450.80'
"""
SMI_FAILS = "#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n"


@pytest.mark.parametrize(("found", "script", "status", "said"), [
    (made(H200), SMI, "ok", "2 x NVIDIA H200, driver 570.86"),
    (made(cuda=None), SMI, "degraded",
     "your NVIDIA H200 (driver 570.86) is not used: torch 2.10.0 is a CPU build"),
    (made(cuda=None, hip="6.4"), SMI, "degraded", "torch 2.10.0 is a ROCm 6.4 build"),
    (made(), SMI, "degraded", "the driver gives this user or container no access"),
    (made(cuda="13.0"), SMI, "degraded", "torch 2.10.0 (CUDA 13.0) needs driver 580 or newer"),
    (made(), SMI_OLD, "degraded", "needs driver 525 or newer"),
    (made(H200), SMI_FAILS, "could not check", "nvidia-smi: NVIDIA-SMI has failed"),
    (made(H200), None, "could not check", "nvidia-smi is missing"), (made(cuda=None), None, "ok", "nvidia-smi is missing")])
def test_the_driver(found: Machine, script: str | None, status: str, said: str, tmp_path: Path,
                    monkeypatch: pytest.MonkeyPatch) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + (":/bin:/usr/bin" if script else ""))
    monkeypatch.setattr(drivers, "PROC", tmp_path / "nothing")
    (one,) = checks.check_driver(found._replace(driver=drivers.ask()))
    assert one.status == status and said in one.detail


def test_what_the_driver_tells_of_its_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for script, seen in ((SMI, Seen("NVIDIA H200", (9, 0), 140000, 143771, "Default")),
                         (SMI_OLD, Seen("Tesla T4", (7, 5)))):
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        assert set(drivers.ask().cards) == {seen}


def test_a_card_is_found_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat\n")
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t NVIDIA H100 80GB HBM3\nIRQ: 18\n")
    monkeypatch.setattr(drivers, "PROC", tmp_path)
    monkeypatch.setattr(drivers.shutil, "which", lambda name: None)
    assert drivers.ask() == drivers.Driver("535.104.05", (Seen("NVIDIA H100 80GB HBM3", (9, 0)),),
                                           "nvidia-smi is missing")


@pytest.mark.parametrize(("mode", "said"), [
    (0o700, "gave no answer in 1 s and was ended"),
    (0o600, "cannot be started: [Errno 13] Permission denied")])
def test_a_driver_that_hangs_or_is_not_ours_to_ask_could_not_be_checked(
        mode: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(mode)
    monkeypatch.setattr(drivers, "PROC", tmp_path)
    monkeypatch.setattr(drivers, "LIMIT", 1.0)
    monkeypatch.setattr(drivers.shutil, "which", lambda name: str(program))
    (one,) = checks.check_driver(made(H200, driver=drivers.ask()))
    assert one.status == "could not check" and said in one.detail


def test_a_misspelt_setting_is_told_and_a_wrong_value_stops_everything(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLIN_POLCY", "off")
    assert [one.status for one in checks.check_policy(made(H200))] == ["ok", "worked around"]
    monkeypatch.setenv("FLASHLIN_PATH", "cuda")
    found = flashlin.doctor(target=H200)
    assert found.exit_code == 1 and {row.path
                                     for row in found.plans} == {
                                         "cannot run"} and "need one of auto, triton, torch" in found.verdict


# --- plans ---

def row(target: str, op: str = "chunk_simple_gla") -> report.OpPlan:
    (found,) = flashlin.doctor(target=target, op=op).plans
    return found


@pytest.mark.parametrize(("target", "path", "verdict"), [
    ("triton=3.2.0,sm=75", "bfloat16: triton via fp32; float16, float32: triton", "degraded"),
    ("triton=3.3.1,sm=75", "bfloat16, float16: triton via fp32; float32: triton", "degraded"),
    ("triton=3.6.0,sm=90", "triton", "ok"), ("triton=3.5.0,sm=103", "torch", "degraded"),
    ("triton=3.6.0,backend=hip", "torch", "degraded"), ("A100,torch=2.13.0+cpu", "torch", "degraded"),
    ("triton=3.7.1,sm=100", "triton with 2 warps", "degraded"), ("cpu,triton=3.6.0", "torch", "ok")])
def test_another_machine_is_planned_for(target: str, path: str, verdict: str) -> None:
    assert (row(target).path, row(target).verdict) == (path, verdict)


SPILLS = launch_table.Slow(30364, 32)


@pytest.mark.parametrize(("trust", "slow", "verdict", "way", "because"), [
    ("ran", True, "ok", "kernels", ""), ("compiled", False, "ok", "kernels", ""),
    ("compiled", True, "degraded", "slow kernels", f"delta_scan {SPILLS}"),
    ("unknown", True, "degraded", "untested kernels", "never tested on this kind of GPU under this Triton")])
def test_ok_means_that_kernels_ran_or_compile_without_spills(
        trust: str, slow: bool, verdict: str, way: str, because: str,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_table, "trust", lambda config, target: trust)
    every = {config: SPILLS for config in launch_table.table() if config.startswith("delta_scan ")}
    monkeypatch.setattr(launch_table, "slow_on", lambda card, triton, given_up=False: {
        } if given_up or not slow else every)
    found = row("A100,triton=3.6.0", "chunk_delta_rule")
    assert (found.verdict, found.way, found.because) == (verdict, way, because)
    assert bool(found.cost) == (verdict == "degraded")
    report_ = flashlin.doctor(target="A100,triton=3.6.0", op="chunk_delta_rule")
    assert report_.grade == verdict and report_.fails("degraded") == (verdict == "degraded")


def test_the_verdict_of_an_a100_says_what_the_evidence_says() -> None:
    """This machine was reported as ok although a kernel spills 30,364 bytes a thread."""
    found = flashlin.doctor(target="A100,triton=3.6.0", op="chunk_delta_rule")
    assert found.grade == "degraded" and "spills 30,364 bytes a thread" in found.plans[0].because
    assert "never tested on such a GPU" in found.verdict


@pytest.mark.parametrize(("target", "command"), [
    ("A100,torch=2.13.0+cpu", "torch==2.13.0 cu130"), ("A100,torch=2.13.0+rocm6.4", "torch==2.13.0 cu130"),
    ("V100,torch=2.13.0+cpu", "torch==2.10.0 cu128"), ("MI300X,torch=2.13.0+cpu", ""),
    ("cpu,torch=2.13.0+cpu", "")])
def test_a_torch_of_another_build_is_replaced_by_one_for_the_card(target: str, command: str) -> None:
    found = flashlin.doctor(target=target, op="chunk_gla")
    assert found.status == ("ok" if target.startswith("cpu") else "degraded")
    assert bool(found.plans[0].cost) == (found.status == "degraded")
    wheel, _, index = command.partition(" ")
    advised = f'pip install --force-reinstall "{wheel}" --index-url https://download.pytorch.org/whl/{index}'
    assert (found.advice.command if found.advice else "") == (advised if command else "")


@pytest.mark.parametrize("target", ["T4,triton=3.2.0", "H100,triton=3.2.0", "B200,triton=3.7.1",
                                    "V100,triton=3.3.1"])
def test_doctor_and_the_table_of_plans_agree_where_they_count_the_same_calls(target: str) -> None:
    # The table of tools/sections.py covers only these calls. Doctor also covers heads of 256, packed rows and
    # decoding, and its line shows the worst plan of all these calls.
    planned = typical_plans.typical("chunk_simple_gla", parse(target), Policy())
    for dtype in sections.DTYPES:
        told = sections.outcome(flashlin.plan(sections.TRAINING._replace(dtype=dtype), target))
        assert sections.outcome(planned[typical_plans.Kind(dtype, "training", True)]) == told
    assert ", ".join(USES) in flashlin.doctor(target=target).text()


def test_calls_of_a_dtype_that_go_different_ways_are_told_apart() -> None:
    assert row("triton=3.7.1,sm=100",
               "fused_recurrent_simple_gla").path == "triton with 2 warps (with gradients), else triton"
    assert row("triton=3.7.1,sm=100", "simple_gla").path == "triton (decoding), else triton with 2 warps"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target",
                         ["triton=3.2.0,sm=75", "triton=3.3.1,sm=75", "triton=3.7.1,sm=100",
                          "triton=3.0.0,sm=90"])
@pytest.mark.alternate
def test_what_doctor_says_is_what_dispatch_plans(op: str, target: str) -> None:
    planned = typical_plans.typical(op, parse(target), Policy())
    said = row(target, op)
    grads = {False} if PUBLIC[op].in_place else {True, False}
    assert {kind.dtype for kind in planned} == {"bfloat16", "float16",
                                                "float32"} and {kind.grad for kind in planned} == grads
    for plan in planned.values():
        assert plan == dispatch.plan(plan.asked, parse(target), Policy())
        assert plan.path in said.path and ("via fp32" in said.path or plan.problem.dot == "native"
                                           or plan.path == "torch")
        assert all(reason.code in said.because for reason, _ in plan.steps if reason.forced)


def test_the_table_of_ops_is_what_the_ops_ask_for() -> None:
    asked = []
    for op in OPS:
        before = len(asked)
        with dispatch.watching(lambda plan: asked.append(plan.asked)):
            getattr(flashlin, op)(**hostile.arguments(op))
        # An op may plan several problems. Ops that mode auto has chosen, and convolutions inside a layer,
        # plan under their own names; elementwise parts of a scan plan under the scan's name.
        asked[before:] = [next(problem
                               for problem in asked[before:] if problem.op == op
                               and problem.family == OPS[op][0])]
    assert [(problem.op, problem.family, problem.mode) for problem in asked] == [(op, *of)
                                                                                 for op, of in OPS.items()]


@pytest.mark.usefixtures("proven")
def test_a_machine_of_different_cards_has_a_line_for_each_only_where_they_differ(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "examine",
                        lambda: made("triton=3.3.1,sm=90", "triton=3.3.1,sm=75", "triton=3.3.1,sm=75"))
    found = flashlin.doctor()
    where = [(row.where, row.verdict) for row in found.plans if row.op == "chunk_simple_gla"]
    assert where == [("cuda:0", "ok"), ("cuda:1, cuda:2", "degraded")]
    assert [row.where for row in found.plans if row.op == "rms_norm"] == ["cuda:0, cuda:1, cuda:2"]
    assert [device.where for device in found.devices] == ["cuda:0", "cuda:1, cuda:2"]
    assert all("cuda:1, cuda:2" in text for text in (found.text(), found.text(verbose=True)))
    assert "| cuda:1, cuda:2 |" in found.markdown()


def test_each_gpu_is_asked_and_one_that_fails_is_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(device: str) -> Target:
        if device == "cuda:1":
            raise RuntimeError("CUDA error: device is busy")
        return parse(H200)
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 3)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.10.0", cuda=cuda, device=str))
    monkeypatch.setattr(machine, "probe", probe)
    found = machine.examine()
    assert list(found.targets) == ["cuda:0",
                                   "cuda:2"] and found.lost == {
                                       "cuda:1": "RuntimeError: CUDA error: device is busy"}


def test_an_op_that_cannot_be_imported_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "examine", lambda: made(H200))
    monkeypatch.setitem(sys.modules, "flashlin.ops.norm", None)
    monkeypatch.delitem(vars(flashlin), "rms_norm", raising=False)
    found = {row.op: row for row in flashlin.doctor().plans}
    assert (found["rms_norm"].path, found["rms_norm"].verdict) == ("cannot run",
                                                                   "problem") and "flashlin.ops.norm" in found["rms_norm"].because
    assert found["chunk_simple_gla"].verdict == "ok"


def test_a_gpu_that_cannot_be_asked_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "examine",
                        lambda: made(H200, lost={"cuda:1": "RuntimeError: CUDA error: out of memory"}))
    found = flashlin.doctor(op="chunk_simple_gla")
    assert not found.ok and check(found, "cuda:1").status == "problem"


def test_a_triton_that_is_newer_than_this_flashlin_is_said_to_be() -> None:
    one = check(flashlin.doctor(target="H100,triton=9.9", op="rms_norm"), "newer")
    assert one.status == "could not check" and "triton 9.9 is newer than 3.9.0" in one.detail
    assert "newer" not in {one.name for one in flashlin.doctor(target="H100,triton=3.9", op="rms_norm").checks}


def test_a_triton_that_never_was_is_told_with_the_nearest() -> None:
    found = flashlin.doctor(target="H100,triton=3.6.7", op="rms_norm")
    said = check(found, "unknown").detail
    assert said == "triton 3.6.7 is not known: planned as 3.6.0, the nearest older release"
    assert "planned as 3.6.0" in flashlin.explain("rms_norm", target="H100,triton=3.6.7")


def test_a_cause_is_told_in_words_beside_its_id() -> None:
    assert flashlin.doctor(target="P100,triton=3.6.0").verdict.endswith(
        "no kernels run on this P100: before-volta (Triton has no code generator for this GPU).")


def test_a_triton_that_is_too_old_is_said_to_be() -> None:
    assert flashlin.doctor(target="H100,triton=2.1").verdict.endswith(
        "every op runs, but no kernels run on this H100: triton: Triton 2.1 is too old.")
    told = flashlin.explain("chunk_gla", target="H100,triton=2.1")
    assert "because  triton: Triton 2.1 is too old, need Triton 3.0 or newer\n  so       torch_path" in told


def test_an_unreleased_build_is_treated_as_its_predecessor() -> None:
    one = check(flashlin.doctor(target="triton=3.4.0+git1234,sm=75"), "unreleased")
    assert one.status == "worked around" and "treated as affected by half-dot-33-pre-ampere" in one.detail
    assert not [one for one in flashlin.doctor(target="triton=3.4.0,sm=75").checks
                if one.name == "unreleased"]


def test_known_issues_of_the_machine_are_listed_with_what_comes_of_them() -> None:
    found = {issue.id: issue.status for issue in flashlin.doctor(target="triton=3.2.0,sm=90").issues}
    assert found["reshape-outs-32"] == "worked around" and found["wgmma-register-hazard"] == "could not check"
    assert {issue.id: issue.status
            for issue
            in flashlin.doctor(target="triton=3.2.0,sm=75").issues}["bf16-pre-ampere-32"] == "worked around"


def test_evidence_is_what_the_shipped_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typical_plans.launch_table, "trust",
                        lambda launch, target: "ran" if target.triton.startswith("3.6") else "unknown")
    said = [row(target).evidence.partition(",")[0]  # without the note on slow kernels
            for target in (H200, "triton=3.5.1,sm=90", "triton=3.5.0,sm=103")]
    assert said == ["ran", "no record", "plain torch"]


# --- the command line ---

@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["doctor", "--op", "chunk_nothing"], 2, "known names; did you mean "),
    (["doctor", "--target", "cuda"], 2, "got the card 'cuda', need one of V100, T4"),
    (["doctor", "--target", "H1000"], 2, "did you mean H100?"), (["explain", "chunk_glaa"], 2, "mean chunk_gla?"),
    (["doctor", "--run", "--target", H200], 2, "only this machine"),
    (["explain", "chunk_nothing"], 2, "known names; did you mean "),
    (["explain", "chunk_simple_gla", "--mode", "auto"], 2, "need 'chunk'"),
    (["explain", "chunk_simple_gla", "-K", "0"], 2, "need 1 or more"), (["doctor", "--target", H200], 0, "")])
def test_exit_codes_and_errors(arguments: list[str], code: int, said: str,
                               capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert said in shown.err and bool(shown.out) == (code == 0)


@pytest.mark.parametrize(("name", "value", "target", "path"), [
    ("FLASHLIN_PATH", "triton", "triton=3.5.0,sm=103", "cannot run"),
    ("FLASHLIN_IGNORE", "half-dot-33-pre-ampere", "triton=3.3.1,sm=75", "triton"),
    ("FLASHLIN_POLICY", "off", "triton=3.3.1,sm=75", "triton"),
    ("FLASHLIN_POLICY", "strict", "triton=3.5.0,sm=103", "cannot run")])
def test_an_op_that_is_refused_or_may_be_wrong_exits_1(name: str, value: str, target: str, path: str,
                                                       monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(name, value)
    assert main(["doctor", "--target", target, "--op", "chunk_simple_gla", "--json"]) == 1
    found = Report.model_validate_json(capsys.readouterr().out)
    assert (found.plans[0].path, found.plans[0].verdict) == (path,
                                                             "problem") and found.verdict.startswith(
                                                                 "broken. For ")


def test_the_report_survives_json_and_reads_as_text_and_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    found = flashlin.doctor(target="triton=3.2.0,sm=75")
    assert Report.model_validate_json(found.model_dump_json()) == found
    assert json.loads(found.model_dump_json())["ok"] is True and json.loads(
        found.model_dump_json())["verdict"] == found.verdict
    assert str(found) == found.text() and " ".join(found.text().split()).startswith(
        f"flashlin {flashlin.__version__}: {found.verdict}")
    assert repr(found) == ("<flashlin.Report degraded: 73 ops on T4 sm75, triton 3.2.0, ptxas 12.4.99, torch "
                           "unknown>") and found._repr_markdown_() == found.markdown()
    assert found.markdown().count("<details>") == found.markdown().count("</details>") == 3
    tables: list[list[str]] = [table.splitlines()
                               for table in found.markdown().split("\n\n") if table.startswith("|")]
    assert len(tables) == 3 and all(len({line.replace("\\|", "").count("|") for line in table}) == 1
                                    for table in tables)
    assert main(["doctor", "--target", "triton=3.2.0,sm=75", "--markdown"]) == 0
    assert capsys.readouterr().out == found.markdown() + "\n"


def test_markdown_shows_names_as_they_are() -> None:
    found = Report(version="1", devices=(), plans=(), issues=(),
                   checks=(report.Check(name="a_b|c", status="ok", detail="<x> *y*\nz"),))
    assert r"| ok | a\_b\|c | \<x\> \*y\* z |" in found.markdown()


def test_what_identifies_a_machine_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/mnt/disk7/ada")
    one = report.Check(name="x", status="ok", detail="/mnt/disk7/ada/lib, /home/grace/env/bin and /root/x of "
                       "GPU-5f3c8a10-aaaa-bbbb-cccc-0123456789ab, https://ada:pw@host/simple, "
                       "HF_TOKEN=hf_abc and FLASHLIN_TOKENS: got")
    assert one.detail == "~/lib, ~/env/bin and ~/x of (uuid), https://host/simple, HF_TOKEN=... and FLASHLIN_TOKENS: got"


# --- running kernels: doctor's self-test ---

PLANTED = """
    import os, sys, torch
    from flashlin.testing import cases
    from flashlin.diagnostics import self_test
    from flashlin.testing.compare import Case

    def make(dtype, generator):
        return {"x": torch.randn(4, 8, generator=generator).to(dtype)}

    def right(x):
        return {"y": 2 * x}

    def wrong(x):
        return {"y": 2.5 * x}

    def raising(x):
        raise IndexError("list index out of range")

    def aborting(x):
        print("Assertion `isPowerOf2(tile)' failed", file=sys.stderr, flush=True)
        os.abort()

    def noisy(x):
        print("noise on stdout")
        os.write(1, b"more of it, without an end of line")
        return right(x)

    cases.CASES = [Case("op", call.__name__, make, call, right, {"*": 0.01, "d*": 0.01}, quick=True)
                   for call in (wrong, raising, aborting, noisy)] + [Case("op", "slow", make, right, right, {"*": 0.01, "d*": 0.01})]
    self_test.main()
    """


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return plant(script), which makes the children of the self-test run this script instead."""
    def plant(script: str) -> None:
        (tmp_path / "child.py").write_text(textwrap.dedent(script))
        monkeypatch.setattr(self_test, "CHILD",
                            lambda *arguments, first: [sys.executable, str(tmp_path / "child.py"),
                                                       *arguments])
    yield plant


@pytest.mark.alternate
def test_wrong_raising_and_aborting_kernels_are_rows_and_the_rest_goes_on(planted: Any,
                                                                          capsys: pytest.CaptureFixture[
                                                                                  str]) -> None:
    planted(PLANTED)
    found = [(outcome.case, outcome.dtype, outcome.status)
             for outcome in self_test.watch("cpu", None, Policy())]
    assert found == [(f"op-{case}", dtype, "ok" if case == "noisy" else "problem")
                     for case in ("wrong", "raising", "aborting", "noisy")
                     for dtype in ("float32", "bfloat16")]
    shown = capsys.readouterr()
    assert "[8/8] op-noisy bfloat16 on cpu" in shown.err and not shown.out


TALKING = """
    import json, os, sys, time
    first = int(sys.argv[sys.argv.index("--first") + 1])
    print(json.dumps({"jobs": [["op-one", "float32"], ["op-two", "float32"], ["op-three", "float32"],
                               ["op-four", "float32"]]}), flush=True)
    for index in range(first, 4):
        print(json.dumps({"start": index}), flush=True)
        if index in {BAD}:
            {HOW}
        print(json.dumps({"done": index, "ok": True, "detail": "worst is o", "seconds": 0.1}), flush=True)
    """
HANG, ABORT = ("time.sleep(600)",
               "print('a line'); print('LLVM ERROR: out of registers', file=sys.stderr, flush=True); "
               "os.abort()")


def test_a_hang_is_a_row_and_the_rest_goes_on(planted: Any, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    planted(TALKING.replace("{BAD}", "{1}").replace("{HOW}", HANG))
    found = list(self_test.watch("cpu", None, Policy(), limit=4.0))
    assert [outcome.status for outcome in found] == ["ok", "problem", "ok", "ok"]
    assert found[1].detail == "gave no answer in 4 s and was ended" and found[1].seconds < 15


def test_doctor_reports_an_abort_and_exits_1(planted: Any, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    planted(TALKING.replace("{BAD}", "{2}").replace("{HOW}", ABORT.replace("print('a line'); ", "")))
    monkeypatch.setattr(diagnosis, "examine", lambda: made("triton=3.6.0,backend=cpu"))
    assert main(["doctor", "--run", "--json", "--op", "chunk_gla"]) == 1
    found = Report.model_validate_json(capsys.readouterr().out)
    assert [ran.status for ran in found.ran] == ["ok", "ok", "problem", "ok"] and "op-three" in found.verdict
    assert found.ran[2].detail == "ended by SIGABRT: LLVM ERROR: out of registers"
    assert all(plan.verdict == "ok" for plan in found.plans)


def test_a_machine_on_which_every_child_ends_early_is_left_alone(planted: Any) -> None:
    planted(TALKING.replace("{BAD}", "{0, 1, 2, 3}").replace("{HOW}", "sys.exit('no such luck')"))
    found = list(self_test.watch("cpu", None, Policy()))
    assert [outcome.status for outcome in found] == ["problem"] * 3 + ["could not check"]
    assert "exit code 1: no such luck" in found[0].detail and "not run" in found[3].detail


@pytest.mark.parametrize("how", [
    "print('OutOfMemoryError: CUDA out of memory', file=sys.stderr, flush=True); sys.exit(1)",
    "os.kill(os.getpid(), 9)",
    "print(json.dumps({'done': index, 'ok': False, 'detail': 'OSError: [Errno 28] No space left on device', "
    "'seconds': 0.1}), flush=True); continue"])
def test_a_full_card_or_disk_is_no_op_s_problem(how: str, planted: Any) -> None:
    planted(TALKING.replace("{BAD}", "{1}").replace("{HOW}", how))
    assert [outcome.status for outcome in self_test.watch("cpu", None, Policy())] == ["ok", "could not check",
                                                                                  "ok", "ok"]


def test_a_child_that_cannot_start_is_a_row(planted: Any) -> None:
    planted("raise ImportError('libcuda.so.1')")
    (one,) = self_test.watch("cpu", None, Policy())
    assert one.status == "problem" and "libcuda.so.1" in one.detail


def test_the_children_obey_the_policy_in_force(planted: Any) -> None:
    planted("""
        import json, os
        print(json.dumps({"jobs": [["op", "float32"]]}))
        detail = " ".join(os.environ[f"FLASHLIN_{name}"] for name in ("POLICY", "PATH", "IGNORE"))
        print(json.dumps({"done": 0, "ok": True, "detail": detail, "seconds": 0.0}))
        """)
    (one,) = self_test.watch("cpu", None, Policy("strict", "torch", frozenset({"stmatrix-33"})))
    assert one.detail == "strict torch stmatrix-33"


def test_a_case_of_one_op_really_runs_here() -> None:
    found = list(self_test.watch("cpu", "l2norm", Policy()))
    assert found and {outcome.status for outcome in found} == {"ok"} and {outcome.case.split("-")[0]
                                                                          for outcome in found} == {"l2norm"}
    assert {outcome.dtype for outcome in found} >= {"float32", "bfloat16"}
