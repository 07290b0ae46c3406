"""Tests of ``make test`` and ``make quick``: all steps run, even after a failure; a summary lists them."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BEFORE = {"ruff": "-m ruff check .", "mypy": "-m mypy"}
STEPS = {"test": {**BEFORE, "site": "-m tools.build_site",
                  "reports": "-m tests.report_scores corpus held_out", "tests": "-m pytest tests --ignore=tests/interpret",
                  "interpreter": "-m pytest tests/interpret"},
         "quick": {**BEFORE, "tests": "-m pytest tests/plan/", "interpreter": "-m pytest tests/interpret/"}}
# Without make's own variables, because the suite itself may run under make.
CLEAN = {name: value for name, value in os.environ.items()
         if name != "TRITON_INTERPRET" and not name.startswith("MAKE")}
# A fake Python that logs its arguments, and fails if they begin with one of the patterns.
STUB = """#!/bin/sh
echo "interpret=${{TRITON_INTERPRET}} threads=$OMP_NUM_THREADS $*" >> "{log}"
case "$*" in {failing}) exit 7;; esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


FAILING = [(), ("ruff",), ("mypy",), ("site",), ("tests",), ("interpreter",), ("ruff", "tests", "interpreter")]


@pytest.mark.parametrize("failing", FAILING, ids="-".join)
def test_every_step_runs_and_is_reported(failing: tuple[str, ...], tmp_path: Path) -> None:
    steps_run("test", failing, tmp_path)


def test_quick_takes_a_few_files_of_each_step(tmp_path: Path) -> None:
    for failing in ((), ("mypy", "tests")):
        steps_run("quick", failing, tmp_path)
    files = re.findall(r"tests/\S+\.py", (ROOT / "Makefile").read_text())
    assert len(files) == len(set(files)) > 10 and all((ROOT / file).is_file() for file in files)


def steps_run(target: str, failing: tuple[str, ...], tmp_path: Path) -> None:
    """Check that make runs every step of a target in order, and that its summary names the failed steps."""
    log, stub, steps = tmp_path / "log", tmp_path / "python", STEPS[target]
    patterns = "|".join(f'"{steps[step]}"*' for step in failing) or "nothing"
    stub.write_text(STUB.format(log=log, failing=patterns))
    stub.chmod(0o755)
    log.unlink(missing_ok=True)
    ran = subprocess.run(["make", target, "PYTHON=true", f"RUN={stub}"], cwd=ROOT, capture_output=True,
                         text=True, check=False, timeout=60, env=CLEAN)
    assert (ran.returncode != 0) == bool(failing), ran.stdout + ran.stderr
    asked = log.read_text().splitlines()
    assert len(asked) == len(steps)
    for line, (step, words) in zip(asked, steps.items(), strict=True):
        interpret = "1" if step == "interpreter" else ""
        assert line.startswith(f"interpret={interpret} threads=1 {words}"), line
    assert f"make {target}" in ran.stdout
    told = dict(re.findall(r"^  (\w+) +(passed|FAILED, exit status 7)$", ran.stdout, re.M))
    assert told == {step: "FAILED, exit status 7" if step in failing else "passed"
                    for step in steps}, ran.stdout


@pytest.mark.parametrize("code", [0, 1])
def test_docs_builds_the_site_and_fails_with_it(code: int, tmp_path: Path) -> None:
    log, stub = tmp_path / "log", tmp_path / "python"
    stub.write_text(f'#!/bin/sh\necho "$*" >> "{log}"\nexit {code}\n')
    stub.chmod(0o755)
    ran = subprocess.run(["make", "docs", "PYTHON=true", f"RUN={stub}"], cwd=ROOT, capture_output=True, text=True,
                         check=False, timeout=60, env=CLEAN)
    assert (ran.returncode != 0) == bool(code) and log.read_text() == "-m tools.build_site\n"


def test_help_lists_every_target() -> None:
    ran = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60, env=CLEAN)
    [targets] = re.findall(r"^.PHONY: help (.*) clean$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^make (\w+) ", ran.stdout, re.MULTILINE) == targets.split()


def test_nothing_runs_without_an_environment(tmp_path: Path) -> None:
    ran = subprocess.run(["make", "test", "PYTHON=false", f"RUN=touch {tmp_path / 'ran'}"], cwd=ROOT,
                         capture_output=True, text=True, check=False, timeout=60, env=CLEAN)
    assert ran.returncode != 0 and not (tmp_path / "ran").exists()
