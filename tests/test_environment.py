"""Tests of doctor's checks of Triton's requirements, such as a C compiler, libcuda and a writable cache.

Each check passes on a machine that meets the requirement and fails on one that does not. If it cannot find
out, it says so.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashlin.diagnostics import environment
from flashlin.diagnostics.checks import checkup
from flashlin.diagnostics.driver import Driver, Seen
from flashlin.diagnostics.machine import Machine
from flashlin.diagnostics.report import Check
from tests.machines import H200, ROOT, made

pytestmark = pytest.mark.usefixtures("default_settings")
LAPTOP = made("cpu,triton=3.6.0", cuda=None)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(environment.SHOWN)] + ["CC"]:
        monkeypatch.delenv(name, raising=False)


def program(folder: Path, name: str, text: str = "") -> Path:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return folder / name


def only(check: Callable[[Machine], Any], machine: Machine) -> Check:
    [one] = check(machine)
    assert isinstance(one, Check)
    return one


# --- the C compiler and its headers ---


@pytest.mark.parametrize(
    ("there", "cc", "status", "said", "fix"),
    [
        (("gcc",), None, "ok", "/gcc", ""),
        (("clang",), None, "ok", "/clang", ""),
        ((), None, "problem", "neither gcc nor clang is on PATH", ""),
        (("apt-get",), None, "problem", "neither gcc nor clang is on PATH", "apt-get install -y gcc"),
        (("gcc",), "icx -O2", "problem", "CC=icx -O2 does not exist", "unset CC"),
        (("icx",), "icx -O2", "ok", "by CC", ""),
    ],
)
def test_the_c_compiler(
    there: tuple[str, ...],
    cc: str | None,
    status: str,
    said: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in there:
        program(tmp_path, name)
    monkeypatch.setenv("PATH", str(tmp_path))
    if cc:
        monkeypatch.setenv("CC", cc)
    one = only(environment.check_compiler, made(H200))
    assert one.status == status and said in one.detail and fix in one.fix and bool(one.fix) == bool(fix)
    assert only(environment.check_compiler, LAPTOP).status == "ok", "a machine without a GPU compiles nothing"


def test_the_headers_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    one = only(environment.check_headers, made(H200))
    assert one.status == "problem" and f"{tmp_path}/Python.h does not exist" in one.detail
    (tmp_path / "Python.h").touch()
    assert only(environment.check_headers, made(H200)).status == "ok"


# --- libcuda ---


@pytest.mark.parametrize(
    ("listed", "files", "status", "said", "fix"),
    [
        ("lib", ("lib",), "ok", "libcuda.so.1 in ", ""),
        ("", (), "problem", "neither ldconfig nor LD_LIBRARY_PATH has libcuda.so.1: a container", ""),
        ("", ("usual",), "problem", "the library is in ", "usual"),
        ("lib", (), "problem", "names a file that does not exist", ""),
        ("stubs", ("stubs",), "problem", "a stub, which is for linking only", ""),
        ("stubs", ("stubs", "usual"), "problem", "a stub", "usual"),
    ],
)
def test_libcuda(
    listed: str,
    files: tuple[str, ...],
    status: str,
    said: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in files:
        (tmp_path / name).mkdir()
        (tmp_path / name / "libcuda.so.1").touch()
    line = f"echo '\tlibcuda.so.1 (libc6,x86-64) => {tmp_path / listed}/libcuda.so.1'" if listed else ""
    monkeypatch.setattr(environment, "LDCONFIG", str(program(tmp_path, "ldconfig", line)))
    monkeypatch.setattr(environment, "LIBCUDA", (str(tmp_path / "usual"),))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    one = only(environment.check_libcuda, made(H200))
    assert one.status == status and said in one.detail
    assert one.fix == (f"export TRITON_LIBCUDA_PATH={tmp_path / fix}" if fix else "")
    assert not list(environment.check_libcuda(LAPTOP))


def test_libcuda_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    one = only(environment.check_libcuda, made(H200))
    assert (one.status, one.fix) == ("problem", "unset TRITON_LIBCUDA_PATH")
    (tmp_path / "libcuda.so.1").touch()
    assert only(environment.check_libcuda, made(H200)).status == "ok"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o700, "ldconfig gave no answer in 1 s and was ended"),
        (0o600, "ldconfig cannot be started: [Errno 13] Permission denied"),
        (0, "ldconfig cannot be started: [Errno 2] No such file"),
    ],
)
def test_a_tool_that_fails_is_no_verdict(
    mode: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "ldconfig"
    if mode:
        tool.write_text("#!/bin/sh\nexec sleep 60\n")
        tool.chmod(mode)
    monkeypatch.setattr(environment, "LDCONFIG", str(tool))
    monkeypatch.setattr(environment, "LIMIT", 1.0)
    [one] = checkup(made(H200), (environment.check_libcuda,))
    assert (one.name, one.status) == ("libcuda", "could not check") and said in one.detail


# --- the cache ---


@pytest.mark.parametrize(
    ("free", "flags", "said"),
    [(50_000, 0, ""), (3, 0, "has 3 MiB left"), (50_000, os.ST_NOEXEC, "mounted noexec")],
)
def test_a_cache_that_is_full_or_runs_nothing(
    free: int, flags: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: SimpleNamespace(free=free << 20))
    monkeypatch.setattr(environment.os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    one = only(environment.check_cache, made(H200))
    assert one.status == ("problem" if said else "ok") and said in one.detail
    assert one.fix == (environment.elsewhere() if said else "")


@pytest.mark.parametrize("shell", [one for one in ("sh", "bash", "zsh", "fish") if shutil.which(one)])
@pytest.mark.parametrize("given", [True, False], ids=["TMPDIR", "none"])
def test_the_cache_that_is_advised_can_be_written(
    given: bool, shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path) if given else "")
    advised = environment.elsewhere()
    assert "${" not in advised, "fish does not support ${...}"
    said = subprocess.check_output([shell, "-c", f'{advised} && sh -c "env"'], text=True).splitlines()
    [made] = [Path(line.partition("=")[2]) for line in said if line.startswith("TRITON_CACHE_DIR=")]
    assert made.parent == (tmp_path if given else Path("/tmp")) and made.stat().st_mode & 0o777 == 0o700
    made.rmdir()


# --- variables ---


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "worked around"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("TRITON_ALWAYS_COMPILE", "1", "worked around"),
        ("TRITON_KERNEL_OVERRIDE", "1", "could not check"),
        ("DISABLE_PTXAS_OPT", "1", "degraded"), ("TORCHDYNAMO_DISABLE", "1", "worked around"),
        ("TRITON_DEFAULT_FP_FUSION", "0", "worked around"),
        ("TRITON_DEFAULT_FP_FUSION", "1", None),
        ("CUDA_VISIBLE_DEVICES", "0,1", "ok"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "worked around"),
        ("PYTORCH_CUDA_ALLOC_CONF", "x", None),
    ],
)
def test_variables_that_are_set_are_listed_and_told(
    name: str, value: str, status: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        only(environment.check_variables, made(H200)).detail == "no variable of Triton, torch or CUDA is set"
    )
    monkeypatch.setenv(name, value)
    first, *told = environment.check_variables(made(H200))
    assert first.detail == f"set: {name}" and first.status == "ok"
    assert [(one.status, one.detail.partition(":")[0]) for one in told] == (
        [(status, f"{name}={value}")] if status else []
    )


SHELL = environment.shell  # the fixture in_sh replaces it in the tests


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("/usr/bin/fish", "set -e CC"),
        ("/bin/tcsh", "unsetenv CC"),
        ("/bin/zsh", "unset CC"),
        ("/usr/bin/pwsh", "Remove-Item Env:CC"),
        ("/opt/xonsh", "unset CC"),
        ("", "unset CC"),
    ],
)
def test_a_variable_is_taken_away_as_the_shell_does(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "shell", SHELL)
    monkeypatch.setenv("SHELL", name)
    monkeypatch.setattr(environment.os, "getppid", lambda: -1)
    assert environment.unset("CC") == command


def test_the_shell_that_runs_is_asked_before_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    code = "from flashlin.diagnostics import environment; print(environment.unset('CC'))"
    # Without a second command, sh would replace itself by Python, which then would have no sh as its parent.
    command = f'{shlex.quote(sys.executable)} -c "{code}" && true'
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, cwd=ROOT)
    assert said.stdout == "unset CC\n"


# --- the GPU ---


@pytest.mark.parametrize(
    ("card", "name", "status"),
    [
        (Seen("H200", (9, 0), 140_000, 143_771, "Default"), "", ""),
        (Seen("H200"), "", ""),
        (Seen("H200", (9, 0), 800, 143_771, "Default"), "memory", "could not check"),
        (Seen("H200", (9, 0), 140_000, 143_771, "Prohibited"), "compute mode", "problem"),
        (Seen("H200", (9, 0), 140_000, 143_771, "Exclusive_Process"), "compute mode", "could not check"),
    ],
)
def test_room_on_the_card(card: Seen, name: str, status: str) -> None:
    found = [
        (one.name, one.status) for one in environment.check_card(made(H200, driver=Driver("580", (card,))))
    ]
    assert found == ([(name, status)] if name else [])


def test_this_machine_can_be_asked() -> None:
    assert {one.status for one in checkup(LAPTOP, environment.ENVIRONMENT)} == {"ok"}
    assert shutil.which("sh")
