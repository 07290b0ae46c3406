"""Tests of the examples, such as examples/train_lm.py with few steps, run as a user would run them."""
from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flashlin.policy import ELSEWHERE, Policy
from tests import test_readme

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_lm.py"


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None,
                                                                     [str(ROOT),
                                                                      os.environ.get("PYTHONPATH")]))}
    return subprocess.run([sys.executable, str(ROOT / "examples" / name), *arguments], capture_output=True, text=True,
                          timeout=600, check=False, env=environment)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_example(EXAMPLE.name, *arguments)


@pytest.mark.alternate
def test_it_learns_agrees_with_itself_and_writes() -> None:
    done = run("--device", "cpu", "--steps", "12")
    assert done.returncode == 0, done.stderr
    plan, _, rest = done.stdout.partition("held-out loss  ")
    assert plan.startswith(
        "chunk_gated_delta_rule: torch path") and "because  backend: tensors on the CPU" in plan
    assert "recurrent and chunked logits differ by" in rest and "MORE" not in rest
    assert "class Reader:\n    def __init__(self, " in rest
    assert done.stderr.count("\n") == 10 and "\r" not in done.stderr, "a log gets ten lines, not a bar"


@pytest.mark.alternate
def test_json_is_the_only_line_on_stdout() -> None:
    done = run("--device", "cpu", "--steps", "12", "--seed", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert found["loss_after"] < 0.9 * found["loss_before"] and found["fell"] and found["agree"]
    assert found["plan"] == "chunk_gated_delta_rule: torch path"
    assert (found["device"], found["dtype"], found["steps"], len(found["sample"])) == ("cpu", "float32", 12,
                                                                                       300)


def test_a_loss_that_does_not_fall_is_an_error() -> None:
    done = run("--device", "cpu", "--steps", "0")
    assert done.returncode == 1
    assert "the held-out loss went from" in done.stderr and "Traceback" not in done.stderr


def test_help_tells_what_it_is_about() -> None:
    done = run("--help")
    assert done.returncode == 0 and "chunk by chunk" in done.stdout and "Exit code" in done.stdout
    assert all(flag in done.stdout for flag in ("--device", "--steps", "--seed", "--json"))


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("total", [1, 3, 300])
def test_the_bar_fills_one_line_in_a_terminal(example: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                              total: int) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = example.Bar(total)
    for step in range(total):
        bar.show(step + 1, 1.0)
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert text.count("\r") == total and text.count("\n") == 1 and text.endswith("\n")
    assert "#" * 30 in text.rsplit("\r", 1)[1]


# --- shield_kernel.py, package-ci.yml ---

def test_a_kernel_of_ones_own_is_right_without_a_gpu() -> None:
    done = run_example("shield_kernel.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "every result agrees with float64" and len(lines) >= 3
    assert all(": off by " in line for line in lines[:-1])


def test_the_workflow_for_a_package_types_what_works() -> None:
    text = (ROOT / "examples" / "package-ci.yml").read_text()
    steps = [line.strip().removeprefix("run: ") for line in text.splitlines()
             if re.match(r" +(run: )?(pip install|python|flashlin) ", line)]
    assert len(steps) == 4
    for step in steps:
        here = step.replace("./flashlin[matrix]", ".[matrix]").partition(" >>")[0]
        assert not test_readme.complaint(here), step
    names = set(re.findall(r"FLASHLIN_\w+", text))
    assert names <= {f"FLASHLIN_{name.upper()}" for name in (*Policy._fields, *ELSEWHERE)}
    ours = (ROOT / "matrix" / "github-workflow.yml").read_text()
    actions = set(re.findall(r"uses: (actions/(?:checkout|setup-python)@\S+)", text))
    assert actions and all(action in ours for action in actions)
    setup_env = (ROOT / "tools" / "setup_env.py").read_text()
    [(torch, triton)] = re.findall(r'^TORCH, TRITON = "(.*)", "(.*)"', setup_env, re.MULTILINE)
    assert f"torch=={torch}+cpu" in text and f"triton=={triton} " in text
