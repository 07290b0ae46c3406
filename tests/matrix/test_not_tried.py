"""A missing resource of the machine is no verdict on a kernel.

Examples are disk space, memory, a linker, and a child that another process has ended.
"""
from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashlin.compat import subprocesses
from flashlin.testing import compile as compiler
from flashlin.testing.compile import NOT_TRIED, Job, Result, compiled_in_forks
from flashlin.testing.record import Recorded


def fails(error: BaseException) -> Callable[..., Any]:
    def failing(*args: Any, **options: Any) -> Any:
        raise error
    return failing


def ends(by: int, said: str = "") -> Callable[[Path], Result]:
    def ending(folder: Path) -> Result:
        os.write(2, said.encode())
        os.kill(os.getpid(), by)
        return Result("ok")
    return ending


def leaves(folder: Path) -> Result:
    os._exit(1)


@pytest.mark.parametrize("work, status, says", [
    (ends(signal.SIGKILL), NOT_TRIED, "SIGKILL"), (ends(signal.SIGTERM), NOT_TRIED, "SIGTERM"),
    (fails(OSError(errno.ENOSPC, "No space left on device")), NOT_TRIED, "No space left on device"),
    (fails(MemoryError()), NOT_TRIED, "MemoryError"),
    (ends(signal.SIGABRT, "LLVM ERROR: out of memory\n"), NOT_TRIED, "out of memory"),
    (ends(signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'"), NOT_TRIED,
     "bad_alloc"),
    (ends(signal.SIGABRT, "Assertion `x' failed.\n"), "abort", "SIGABRT"),
    (ends(signal.SIGSEGV), "abort", "SIGSEGV"), (leaves, "exception", "the child ended with exit code 1")],
    ids=["killed", "terminated", "no room", "no memory", "LLVM's memory", "C++'s memory", "assertion",
         "crash", "exit"])
def test_how_a_child_ends(work: Callable[[Path], Result], status: str, says: str) -> None:
    pytest.importorskip("triton")
    [(_, result)] = compiled_in_forks([work], 1, 60)
    assert result.status == status and says in result.message, result


def spins(folder: Path) -> Result:
    while True:
        pass


def waits(folder: Path) -> Result:
    time.sleep(60)
    return Result("ok")


@pytest.mark.parametrize("work, status", [(spins, "timeout"), (waits, NOT_TRIED)])
def test_who_takes_too_long_is_judged_by_what_was_worked(work: Callable[[Path], Result], status: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit counts CPU time, because a busy machine once took 180 s for 2 s of work at low priority.

    This test may also run on a busy machine. So it waits until a spinning process has used its CPU time.
    """
    pytest.importorskip("triton")
    if work is spins:
        monkeypatch.setattr(subprocesses, "PATIENCE", 1000)
    [(_, result)] = compiled_in_forks([work], 1, 0.5)
    assert result.status == status, result
    if work is waits:
        said = re.fullmatch(r"this machine gave it 0 s of CPU time in (\d+) s", result.message)
        assert said and int(said[1]) == pytest.approx(result.seconds, abs=0.6), result
        assert result.seconds >= 0.5 * subprocesses.PATIENCE, result
    else:
        assert not result.message and 0.5 <= result.seconds, result


def test_a_command_may_contain_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Triton 3.5 the linker for AMD is started by its Path, and this raised TypeError."""
    monkeypatch.setattr(subprocess, "run", subprocess.run)
    log, report = compiler._keep_ptxas_report(), tmp_path / "report"
    with report.open("w") as stderr:
        subprocess.run([Path(sys.executable), "-c", "import sys; print('ptxas', file=sys.stderr)", "ptxas"],
                       stderr=stderr, check=True)
    assert log == ["ptxas\n"]


class CompilationError(Exception):
    """An error that quotes the kernel, as Triton's own does."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


ERRORS = {
    NOT_TRIED: [PermissionError(errno.EACCES, "Permission denied", "/cache"),
                FileNotFoundError(errno.ENOENT, "No such file", "ptxas"), MemoryError(),
                ModuleNotFoundError("No module named 'setuptools'"), RuntimeError("Cannot find ptxas"),
                RuntimeError("`ptxas` failed with error code -9"),
                Exception("ROCm linker /opt/rocm/llvm/bin/ld.lld not found. Set 'TRITON_HIP_LLD_PATH' to its "
                          "path."),
                caused(RuntimeError("compile failed"), OSError(errno.ENOSPC, "No space left on device"))],
    "exception": [RuntimeError("PassManager::run failed"),
                  CompilationError("x = 1  # or it runs out of memory\n^ expected a tensor"),
                  caused(CompilationError("at 3:4"), TypeError("no such operand"))],
    "ptxas": [RuntimeError("`ptxas` failed with error code 255: ptxas fatal: Unexpected instruction")]}


@pytest.mark.parametrize("status, error",
                         [pytest.param(status, error, id=str(error)[:40])
                          for status, errors in ERRORS.items() for error in errors])
def test_what_the_compiler_raises(status: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    kernel = SimpleNamespace(warmup=fails(error))
    monkeypatch.setattr(compiler.importlib, "import_module", lambda name: SimpleNamespace(kernel=kernel))
    launch = Recorded("module", "kernel", (), (), 4, 2, 0, ())
    [(_, result)] = compiled_in_forks([partial(compiler._compile, Job(90, launch))], 1, 60)
    assert result.status == status and result.message, result
