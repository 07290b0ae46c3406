"""``make test``: every step runs, whatever the others find, and the end says how each went."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = {"ruff": "-m ruff check .", "mypy": "-m mypy", "tests": "-m pytest tests --ignore=tests/interpret",
         "interpreter": "-m pytest tests/interpret"}
# The suite itself runs under make.
CLEAN = {name: value for name, value in os.environ.items()
         if name != "TRITON_INTERPRET" and not name.startswith("MAKE")}
# Replaces the environment's Python: logs its arguments, and fails if $1 $2 ... begins so.
STUB = """#!/bin/sh
echo "interpret=${{TRITON_INTERPRET}} threads=$OMP_NUM_THREADS $*" >> "{log}"
case "$*" in {failing}) exit 7;; esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.mark.parametrize("failing", [(), ("ruff",), ("mypy",), ("tests",), ("interpreter",),
                                     ("ruff", "tests", "interpreter")], ids="-".join)
def test_every_step_runs_and_is_reported(failing: tuple[str, ...], tmp_path: Path) -> None:
    log, stub = tmp_path / "log", tmp_path / "python"
    patterns = "|".join(f'"{STEPS[step]}"*' for step in failing) or "nothing"
    stub.write_text(STUB.format(log=log, failing=patterns))
    stub.chmod(0o755)
    ran = subprocess.run(["make", "test", "PYTHON=true", f"RUN={stub}"], cwd=ROOT, capture_output=True,
                         text=True, check=False, timeout=60, env=CLEAN)
    assert (ran.returncode != 0) == bool(failing), ran.stdout + ran.stderr
    asked = log.read_text().splitlines()
    assert len(asked) == len(STEPS)
    for line, (step, words) in zip(asked, STEPS.items(), strict=True):
        interpret = "1" if step == "interpreter" else ""
        assert line.startswith(f"interpret={interpret} threads=1 {words}"), line
    told = dict(re.findall(r"^  (\w+) +(passed|FAILED, exit status 7)$", ran.stdout, re.M))
    assert told == {step: "FAILED, exit status 7" if step in failing else "passed"
                    for step in STEPS}, ran.stdout


def test_nothing_runs_without_an_environment(tmp_path: Path) -> None:
    ran = subprocess.run(["make", "test", "PYTHON=false", f"RUN=touch {tmp_path / 'ran'}"], cwd=ROOT,
                         capture_output=True, text=True, check=False, timeout=60, env=CLEAN)
    assert ran.returncode != 0 and not (tmp_path / "ran").exists()
