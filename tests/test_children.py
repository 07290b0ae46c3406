"""Tests that child processes import the same modules as the parent, and none from the current directory."""
from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flashlin.compat import subprocesses
from flashlin.compat.subprocesses import Ended, Process, python, run_to_end

ROOT = Path(__file__).resolve().parents[1]
OURS = [path for folder in ("flashlin", "matrix", "benchmarks", "tools", "examples")
        for path in (ROOT / folder).rglob("*.py")]
TRAP = "import os; open(os.environ['TRAP'], 'w').write(__name__); raise SystemExit(3)"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a current directory with modules that record their import; return the file of the record."""
    (tmp_path / "here").mkdir()
    for name in ("json", "argparse", "inspect", "runpy", "torch", "flashlin", "tempfile", "signal"):
        (tmp_path / "here" / f"{name}.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    return tmp_path / "sprung"


@pytest.mark.parametrize("module, arguments", [
    ("flashlin.trial.child", ["--help"]), ("flashlin.testing.compile", ["--help"]),
    ("flashlin.diagnostics.self_test", ["--help"]), ("matrix.gpu", ["--help"])])
def test_what_lies_in_the_current_directory_is_left_alone(module: str, arguments: list[str],
                                                          trap: Path) -> None:
    ran = subprocess.run(python(module, *arguments), capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, trap.exists()) == (0, False), ran.stderr
    assert "usage: " in ran.stdout


def test_the_parent_s_path_is_the_child_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "told.py").write_text("import sys; print(__name__, sys.argv, sys.path[:2])")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), *sys.path])
    said = subprocess.run(python("told", "a b", "c", first="/first"), capture_output=True, text=True,
                          check=True).stdout
    assert said.strip() == f"__main__ ['{tmp_path / 'one' / 'told.py'}', 'a b', 'c'] ['/first', '{tmp_path / 'one'}']"


def test_every_child_of_ours_is_started_so() -> None:
    """No child is started by [sys.executable, "-m", ...], which puts the current directory on its path."""
    found = []
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                found.append(f"{path.name}: {' '.join(ast.unparse(part) for part in node.elts[1:3])}")
    # The child of first_aid.py removes the current directory from its path. Two tools start their own file,
    # and Python then puts the folder of that file on the path.
    assert sorted(found) == ["first_aid.py: '-u' '-c'", "house.py: __file__ '--watch'",
                             "kernel_facts.py: __file__ '--answer'",
                             "subprocesses.py: '-c' _BEGIN"]


def test_one_module_starts_programs() -> None:
    """Only compat/subprocesses.py and five tools start programs.

    The tools run before flashlin is installed, when it is broken, or for an older checkout without that
    module.
    """
    found = set()
    for path in OURS:
        called = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text()))
                  if isinstance(node, ast.Call)}
        if called & {"os.fork", "os.kill", "os.killpg"} or any(one.startswith("subprocess.") for one in called):
            found.add(path.name)
    assert found == {"subprocesses.py", "first_aid.py", "setup_env.py", "house.py",
                     "kernel_facts.py", "build_site.py"}


# ---- run_to_end, which runs a program and ends what it leaves running ----

LEAVES = ("import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print(1, flush=True); "
          "time.sleep({seconds})")


def ran(code: str, **options: Any) -> Ended:
    return run_to_end([sys.executable, "-c", f"import os, sys, time; {code}"], **options)


@pytest.mark.parametrize(("code", "how", "failure", "kind"), [
    ("print(1)", "exit code 0", "", "kernel"),
    ("sys.exit('x.cpp: Assertion failed\\nand more')", "exit code 1",
     "ended with exit code 1: x.cpp: Assertion failed", "kernel"),
    ("sys.exit('one\\ntwo')", "exit code 1", "ended with exit code 1: two", "kernel"),
    ("os.abort()", "SIGABRT", "ended by SIGABRT", "kernel"), ("os.kill(os.getpid(), 9)", "SIGKILL",
                                                              "ended by SIGKILL", "memory"),
    ("os.kill(os.getpid(), 40)", "signal 40", "ended by signal 40", "kernel"),
    ("sys.exit('OSError: [Errno 28] No space left on device')", "exit code 1",
     "ended with exit code 1: OSError: [Errno 28] No space left on device", "surroundings")])
def test_each_end_has_a_sentence(code: str, how: str, failure: str, kind: str) -> None:
    ended = ran(code)
    assert (ended.how, ended.failure, ended.kind) == (how, failure, kind)
    assert ended.seconds > 0 and not ended.timed_out


def test_a_command_that_cannot_be_started_raises_nothing(tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run_to_end([str(tmp_path / "missing")])
    assert ended.code is None and ended.failure.startswith("cannot be started: [Errno 2]")
    assert ended.kind == "surroundings"
    with Process([str(tmp_path / "missing")], interactive=True) as process:
        process.send("text")
        assert list(process.lines()) == [] and process.finished() and process.wait().code is None

    def refuse(*given: Any, **options: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert ran("").kind == "memory"


def test_no_thread_for_its_output_ends_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    began = time.monotonic()
    ended = ran("time.sleep(60)")
    assert ended.failure == "cannot be started: can't start new thread" and time.monotonic() - began < 30


def test_no_thread_for_its_input_ends_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    with Process([sys.executable, "-c", "input()"], limit=60, interactive=True) as process:
        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")
        monkeypatch.setattr(threading.Thread, "start", refuse)
        process.send("text")
        assert process.wait().failure == "got no input: can't start new thread"


def test_a_child_whose_time_is_up_is_ended_with_what_it_has_started() -> None:
    began = time.monotonic()
    ended = run_to_end([sys.executable, "-c", LEAVES.format(seconds=60)], limit=3.0)
    assert ended.failure == "gave no answer in 3 s and was ended" and ended.stdout == "1\n"
    assert ended.timed_out and time.monotonic() - began < 20, "the pipe is closed, or this would wait longer"


def test_what_a_child_leaves_behind_is_ended_and_takes_no_verdict_away() -> None:
    """A grandchild that keeps the output open is ended, and the result of the child is still reported."""
    ended = run_to_end([sys.executable, "-c", LEAVES.format(seconds=0)], limit=60.0)
    assert (ended.code, ended.stdout, ended.timed_out) == (0, "1\n", False) and ended.seconds < 30


def test_a_child_that_ignores_being_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses, "GENTLE", 0.2)
    ended = ran("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", limit=2.0)
    assert ended.timed_out and ended.seconds < 15


def test_the_end_of_a_block_ends_the_child() -> None:
    command = [sys.executable, "-c", LEAVES.format(seconds=60)]
    with pytest.raises(KeyboardInterrupt), Process(command) as process:
        assert next(process.lines()) == "1\n"
        raise KeyboardInterrupt
    assert process.wait().how == "was ended" and process._process.returncode == -signal.SIGTERM


def test_output_without_end_is_read_and_its_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses, "MOST", 1000)
    ended = ran("sys.stdout.write('a' * 10**6 + 'b'); sys.stderr.write('c' * 10**6 + 'd')", limit=60)
    for output, end in ((ended.stdout, "ab"), (ended.stderr, "cd")):
        assert len(output) == 1000 and output.endswith(end)
    assert not ended.failure


def test_a_child_that_does_not_read_what_it_is_given_ends_in_time() -> None:
    assert ran("time.sleep(60)", given="x" * 10**6, limit=1.0).timed_out
    assert ran("print(len(sys.stdin.read()))", given="x" * 10**6).stdout == "1000000\n"
    assert ran("print(sys.stdin.read())").stdout == "\n", "the child must find an empty stdin"


def test_lines_come_one_by_one_and_silence_is_a_timeout() -> None:
    code = "for one in range(3): print(one, flush=True)\nimport time; time.sleep(60)"
    with Process([sys.executable, "-c", code]) as process:
        assert list(process.lines(5.0)) == ["0\n", "1\n", "2\n"]
        assert process.wait().failure == "gave no answer in 5 s and was ended"
    with Process([sys.executable, "-c", "print('{\"a\": 1}'); print('{\"b\": ', end='')"]) as process:
        assert list(process.lines(60.0)) == ['{"a": 1}\n', '{"b": '] and not process.wait().failure


def test_no_child_is_left_as_a_zombie() -> None:
    for limit in (60.0, 0.2):
        process = Process([sys.executable, "-c", "import time; time.sleep(1)"], limit=limit)
        assert process.wait().timed_out == (limit < 1)
        with pytest.raises(ChildProcessError):
            os.waitpid(process._process.pid, os.WNOHANG)


def test_an_environment_is_added_to_this_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "1")
    assert ran("print(os.environ['ONE'], os.environ['TWO'])", environment={"TWO": "2"}).stdout == "1 2\n"
