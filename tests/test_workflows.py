"""Tests of .github/workflows and .pre-commit-config.yaml: YAML, permissions, and commands that work."""
from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import test_readme
from tests.machines import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
yaml = pytest.importorskip("yaml")
BESIDE = {"timeout-minutes", "runs-on", "steps"}


def loaded(text: str) -> dict[str, Any]:
    """Return a workflow; the key ``on``, which YAML 1.1 reads as true, keeps its name."""
    found = yaml.safe_load(re.sub(r"^on:", '"on":', text, flags=re.MULTILINE))
    assert isinstance(found, dict)
    return found


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def commands(workflow: dict[str, Any]) -> list[str]:
    """Return the lines of all ``run:`` steps, as ``plain`` writes them and without the workers of pytest."""
    lines = [line for step in steps(workflow) for line in step.get("run", "").splitlines()]
    return [plain(re.sub(r" -n \d+ --dist worksteal$", "", line)) for line in lines]


def plain(line: str) -> str:
    """Return a command without ``.venv/bin/`` and ``python -m``, as the judges of test_readme expect it."""
    return re.sub(r"(\.venv/bin/)?(python -m )?(?=(python|ruff|mypy|pytest)\b)", "", line, count=1)


def complaints(text: str) -> list[str]:
    """Return what is wrong with a workflow: rights, secrets, actions without a major version, commands."""
    workflow = loaded(text)
    wrong = [] if workflow.get("permissions") == {"contents": "read"} else ["permissions"]
    wrong += ["secrets"] * ("secrets." in text or "${{ github.token" in text)
    wrong += [f"{name}: no {key}" for name, job in workflow["jobs"].items() for key in BESIDE - set(job)]
    wrong += [f"{name}: permissions" for name, job in workflow["jobs"].items() if "permissions" in job]
    wrong += [step["uses"] for step in steps(workflow)
              if "uses" in step and not re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])]
    for line in commands(workflow):
        if why := test_readme.complaint(line):
            wrong.append(f"{line}: {why}")
    return wrong


def of_make(target: str) -> list[str]:
    """Return the commands of the steps of a Makefile target."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.split(rf"^{target}:\n", text, flags=re.MULTILINE)[1].partition("\n\n")[0]
    shared = text.partition("STEP = ")[2].partition("END = ")[0]
    found = re.findall(r"step (?:[a-z]+) (?:env )?(.*?)(?:; \\)?$", shared + recipe, re.MULTILINE)
    return [plain(line.replace("$(WORKERS)", "").replace("$(RUN)", "python").strip()) for line in found]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_is_harmless_and_its_commands_work(file: Path) -> None:
    assert not complaints(file.read_text(encoding="utf-8"))


def test_the_workflow_runs_the_steps_of_make_test_and_builds_the_documentation() -> None:
    workflow = loaded((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    checked = of_make("test")
    checked.remove("python -m tools.build_site")  # a job of its own: make docs
    assert len(checked) == 5
    assert set(commands(workflow)) == {"python tools/setup_env.py .venv test,dev", "make docs", *checked}
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == ["3.10", "3.12"]


def test_a_wrong_workflow_is_noticed() -> None:
    good = WORKFLOWS[0].read_text(encoding="utf-8")
    for old, new, why in (("contents: read", "contents: write", "permissions"),
                          ("checkout@v4", "checkout@main", "actions/checkout@main"),
                          ("pytest tests ", "pytest test ", "not there"),
                          ("run: make docs", "run: make dcos", "make has"),
                          ("test,dev", "test,dev ${{ secrets.KEY }}", "secrets")):
        assert why in " ".join(complaints(good.replace(old, new))), why


def test_hooks_are_local_and_run_the_ruff_of_the_environment() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [one["repo"] for one in config["repos"]] == ["local"]
    hooks = {one["id"]: one for one in config["repos"][0]["hooks"]}
    assert shlex.split(hooks["ruff"]["entry"])[:4] == ["python", "-m", "ruff", "check"]
    for hook in hooks.values():
        assert hook["language"] in ("system", "pygrep") and "types" in " ".join(hook)
        if hook["language"] == "pygrep":
            re.compile(hook["entry"].encode())
