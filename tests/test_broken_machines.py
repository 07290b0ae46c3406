"""Doctor on broken machines, each with the finding and the one command that repairs it."""
from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from machines import H200, installed, made, package

import flashlin
from flashlin.__main__ import main
from flashlin.compat.versions import release
from flashlin.diagnostics import checks, driver, environment, packages, requirements
from flashlin.diagnostics import doctor as diagnosis
from flashlin.diagnostics.importing import Tried
from flashlin.diagnostics.machine import Dist, Machine
from flashlin.diagnostics.packages import PACKAGES, _package
from flashlin.diagnostics.report import Check
from matrix.stacks import versions as stacks


@pytest.fixture(autouse=True)
def bash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "shell", lambda: "bash")


def told(machine: Machine, name: str) -> Check:
    found = [one for check in checks.CHECKS for one in check(machine) if one.name == name]
    return next((one for one in found if one.status != "ok"), found[0])


def advised(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(diagnosis, "examine", lambda: machine)
    advice = flashlin.doctor(op="chunk_gla").advice
    return advice.command if advice is not None else ""


SMI = "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch NVML library version: 570.86"


def test_a_driver_that_was_updated_needs_a_reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    card = driver.Seen("NVIDIA H100", (9, 0))
    updated = made()._replace(driver=driver.Driver("570.86", (card,), SMI))
    found = told(updated, "driver")
    assert (found.status, found.fix) == ("degraded", "sudo reboot") and "different versions" in found.detail
    other = told(made()._replace(driver=driver.Driver("570.86", (card,), "nvidia-smi: odd")), "driver")
    assert not other.fix and other.detail.endswith("finds no GPU: nvidia-smi: odd")
    hidden = told(made()._replace(driver=driver.Driver("570.86", (card,), "nvidia-smi is missing")), "driver")
    assert hidden.detail.endswith("the driver gives this user or container no access")
    unseen = told(made()._replace(driver=driver.Driver("", (), SMI)), "driver")  # without /proc/driver/nvidia
    assert (unseen.status, unseen.fix, unseen.detail) == ("degraded", "sudo reboot", SMI)


def test_a_triton_for_windows_is_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    dists = (Dist("torch", "2.10.0", "/lib", "pip"), Dist("triton-windows", "3.6.0", "/lib", "pip"))
    broken = made(H200)._replace(triton="", triton_error="import fails: ImportError: libtriton", dists=dists)
    command = advised(broken, monkeypatch)
    assert command.startswith("pip uninstall -y triton-windows && pip install")


@pytest.mark.parametrize("shadow", ["triton/__init__.py", "triton.py"])
def test_a_file_that_shadows_a_package_is_named(shadow: str, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not list(checks.check_here(made(H200)))
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).touch()
    [found] = checks.check_here(made(H200))
    name = shadow.partition("/")[0]
    assert f"./{name} in place of the installed triton" in found.detail and found.fix == f"mv {name} my_{name}"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # the package itself is installed in this folder
    assert not list(checks.check_here(made(H200)))


@pytest.mark.parametrize(("name", "error", "known"), [
    ("mamba_ssm", "ImportError: selective_scan_cuda.so: undefined symbol: _ZN3c10", True),
    ("causal_conv1d", "ImportError: causal_conv1d_cuda.so: invalid ELF header", True),
    ("causal_conv1d", "ModuleNotFoundError: No module named 'causal_conv1d_cuda'", True),
    ("causal_conv1d", "ZeroDivisionError: division by zero", False),
    ("fla", "ImportError: libcuda.so: cannot open shared object file", False)])
def test_a_broken_extension_is_built_again(name: str, error: str, known: bool,
                                           monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(package(tmp_path, name, ""))])
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = _package(name, "1.0", {name: Tried(error, 0.1)}, {}, True)
    assert found.status == "degraded" and error in found.imports
    assert (f'flashlin.patch("{name}")' in found.imports) == bool(found.fix) == known
    assert not known or found.fix.endswith(f"--no-build-isolation {name.replace('_', '-')}")


def test_a_release_that_is_newer_than_the_tests_is_named(monkeypatch: pytest.MonkeyPatch,
                                                         tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(package(tmp_path, "fla", ""))])
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    newer, known = (_package("fla", version, {}, {}, True) for version in ("0.9.0", "0.6.0"))
    assert newer.status == "could not check" and "newer than 0.6.0" in newer.imports
    assert known.status == "ok" and "newer" not in known.imports
    for name in ("fla", "transformers"):
        tested = [one.versions[name] for one in stacks.STACKS if name in one.versions]
        assert PACKAGES[name].newest == max(tested, key=release)


@pytest.mark.parametrize(("need", "has", "says", "fix"), [
    ("einops", "", "needs einops, but it is not installed", 'pip install "einops"'),
    ("fla-core==0.6.0", "0.5.0", "needs fla-core==0.6.0, but 0.5.0 is installed",
     'pip install "fla-core==0.6.0"'),
    ("fla-core==0.6.0", "0.6.0", "", ""), ("torch>=99", "2.0", "", ""), ("x; extra == 'y'", "", "", ""),
    ("not valid at all", "", "", "")])
def test_requirements_that_are_not_met(need: str, has: str, says: str, fix: str, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "flash-linear-attention", "0.6.0")
    with (tmp_path / "flash_linear_attention-0.6.0.dist-info" / "METADATA").open("a") as file:
        file.write(f"Requires-Dist: {need}\n")
    if has:
        installed(tmp_path, need.partition("=")[0].partition(">")[0], has)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = list(requirements.check_requirements(made(H200)))
    assert [(one.name, one.status, one.fix) for one in found] == (
        [("flash-linear-attention", "degraded", fix)] if says else [])
    assert not says or says in found[0].detail


def test_metadata_that_was_left_behind_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    dists = (Dist("triton", "3.4.0", "/lib", "pip"), Dist("triton", "3.6.0", "/lib", "pip"))
    machine = made(H200)._replace(dists=dists)
    [found] = checks.check_copies(machine)
    assert (found.name, found.fix) == ("leftover", "rm -r /lib/triton-3.4.0.dist-info")
    assert "rm -r /lib/triton-3.4.0.dist-info" in advised(machine, monkeypatch)


@pytest.mark.parametrize(("folder", "command"), [
    ("/usr/include/python9.9", "apt-get install -y python{0}.{1}-dev"),
    ("/home/user/.pyenv/versions/9.9/include", "pyenv install --force {0}.{1}.{2}"),
    ("/home/user/.local/share/uv/python/9.9/include", "uv python install --reinstall {0}.{1}.{2}"),
    ("/opt/conda/include/python9.9", "conda install -y --force-reinstall python={0}.{1}.{2}"),
    ("/opt/python/include", "")])
def test_headers_come_from_where_python_came_from(folder: str, command: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONDA_PREFIX", "/opt/conda")
    monkeypatch.setattr(environment.sysconfig, "get_paths", lambda scheme: {"include": folder})
    monkeypatch.setattr(environment.shutil, "which",
                        lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    [found] = environment.check_headers(made(H200))
    assert found.fix.removeprefix("sudo ") == command.format(*sys.version_info)
    assert ("also has its headers" in found.detail) == (not command)


def test_the_command_line_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(installed(package(tmp_path, "kernels", ""), "kernels", "0.17.2")))
    monkeypatch.setattr(packages, "to_import", lambda: {"kernels": "kernels"})
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        main(["doctor"])
        assert ("flashlin doctor: imports kernels, for 3.5 s at most" in capsys.readouterr().err) == terminal
    assert main(["doctor", "--imports", "-1"]) == 2
    assert "--imports: got -1, need 0 or more seconds" in capsys.readouterr().err


def test_a_ptxas_that_does_not_know_the_gpu_is_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(program))
    card = made(H200).targets["cuda:0"]
    for version, status in (("11.4.48", "problem"), ("11.8.89", "ok"), ("12.8.93", "ok")):
        [found] = checks.check_ptxas(made(H200)._replace(targets={"cuda:0": card._replace(ptxas=version)}))
        assert (found.status, found.fix) == (status, "unset TRITON_PTXAS_PATH" if status == "problem" else "")


def test_a_ptxas_of_triton_that_cannot_be_executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ptxas").touch(mode=0o644)
    monkeypatch.setattr(checks, "ptxas_path", lambda triton, capability: str(tmp_path / "ptxas"))
    [found] = checks.check_ptxas(made(H200))
    assert (found.status, found.fix) == ("problem", f"chmod +x {tmp_path}/ptxas")


def test_the_interpreter_is_left_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "interpreting", lambda: True)
    for machine, status in ((made(H200), "degraded"), (made(), "worked around")):
        [found] = checks.check_interpreter(machine)
        assert (found.status, found.fix) == (status, "unset TRITON_INTERPRET")


def test_a_command_that_is_not_in_the_advice_is_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(diagnosis, "examine", lambda: made(H200))
    assert "fix: unset TORCHDYNAMO_DISABLE" in flashlin.doctor(op="chunk_gla").text()


def test_a_numpy_of_another_python_is_taken_off_the_path(monkeypatch: pytest.MonkeyPatch,
                                                         tmp_path: Path) -> None:
    error = "ImportError: Error importing numpy: you should not try to import numpy from its source directory"
    broken = made(H200, torch_error=error)._replace(torch=None)
    assert not told(broken, "torch").fix
    package(tmp_path, "numpy", "")
    monkeypatch.setenv("PYTHONPATH", f"/other{os.pathsep}{tmp_path}")
    found = told(broken, "torch")
    assert found.fix == "unset PYTHONPATH" and f"numpy comes from {tmp_path}" in found.detail
    assert advised(broken, monkeypatch) == "unset PYTHONPATH"
