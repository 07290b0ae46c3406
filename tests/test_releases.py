"""Tests of the table of Triton releases.

Its entries are consistent, a release that is added is supported everywhere, and no other code lists releases.
"""
from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import flashlin
from flashlin.compat import releases
from flashlin.compat.releases import RELEASES, Release, in_full, nearest, supported
from flashlin.compat.target import OLDEST_TRITON, bundled_ptxas, parse, ptxas_path
from flashlin.compat.versions import release
from flashlin.diagnostics import checks, machine
from flashlin.guards import launch_table
from flashlin.testing import environments
from matrix import cells, workflow
from tests import test_readme
from tests.machines import ROOT, made

VERSION = re.compile(r"[23]\.\d+(\.\d+)?")
PRETENDED = Release(
    "3.98.0", "13.6.1", "3.11 to 3.17", blackwell="13.7.2", blackwell_from=(9, 0),
    torch=("2.98.0",), numpy="<9")


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> Release:
    """Add a release that does not exist to the table, and return it."""
    monkeypatch.setattr(releases, "RELEASES", (*RELEASES, PRETENDED))
    return PRETENDED


# --- the table ---

def test_releases_stand_in_order_and_each_once() -> None:
    numbers = [release(one.version) for one in RELEASES]
    assert numbers == sorted(set(numbers)) and all(len(parts) == 3 for parts in numbers)
    torches = [release(torch) for one in RELEASES for torch in one.torch]
    assert torches == sorted(set(torches)) and all(len(parts) == 3 for parts in torches)
    assert RELEASES[0].torch, "the first entry must give the oldest supported torch"


@pytest.mark.parametrize("one", RELEASES, ids=lambda one: one.version)
def test_a_release_is_told_in_full(one: Release) -> None:
    assert re.fullmatch(r"1\d\.\d+\.\d+", one.ptxas) and re.fullmatch(r"(1\d\.\d+\.\d+)?", one.blackwell)
    assert re.fullmatch(r"3\.\d+ to 3\.\d+", one.python) and re.fullmatch(r"(<\d+(\.\d+)?)?", one.numpy)


@pytest.mark.parametrize(("asked", "found"), [
    ("3.3.0", "3.3.0"), ("3.3.7", "3.3.1"), ("3.8", "3.8.0"), ("3.9.0.dev1", "3.9.0"),
    ("3.5.9+git12", "3.5.1"), ("99.0.0", RELEASES[-1].version), ("2.3.1", "3.0.0"), ("", "3.0.0"),
    ("somebody's build", "3.0.0")])
def test_the_nearest_release_is_the_newest_one_before(asked: str, found: str) -> None:
    assert nearest(asked).version == found


def test_the_package_asks_for_what_the_table_begins_with() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    asked = dict(re.findall(r'^    "(torch|triton)>=([\d.]+)', text, re.MULTILINE))
    assert release(asked["torch"]) == machine.OLDEST_TORCH and release(asked["triton"]) == OLDEST_TRITON


def test_the_environment_that_make_makes_is_a_pair_of_the_table() -> None:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    assert spec is not None and spec.loader is not None
    setup_env = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup_env)
    assert setup_env.TORCH in next(one.torch for one in RELEASES if one.version == setup_env.TRITON)
    readme = (ROOT / "README.md").read_text()
    assert f"pip install torch=={setup_env.TORCH}+cpu " in readme
    assert f"pip install triton=={setup_env.TRITON} " in readme


@pytest.mark.parametrize(("asked", "found"), [
    ("3.3", "3.3.1"), ("3.3.0", "3.3.0"), ("3.5", "3.5.1"), ("3.7", "3.7.1"), ("3.9", "3.9.0"),
    ("3.99.0", "3.99.0"), ("3.4.0.post1", "3.4.0.post1")])
def test_a_minor_version_is_its_newest_patch(asked: str, found: str) -> None:
    assert in_full(asked) == found


@pytest.mark.parametrize("asked", ["3", "3.10", "2.3.1", "latest", "", "3.2.x"])
def test_what_is_no_release_is_refused_with_what_there_is(asked: str) -> None:
    with pytest.raises(ValueError, match=rf"^got '{asked}', need one out of 3\.0, 3\.1, .*, 3\.9, or all three"):
        in_full(asked)


# --- one more release ---

def test_a_new_release_is_known_to_plans(one_more: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in checks.PTXAS_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert [bundled_ptxas("3.98.0", card) for card in ((8, 9), (9, 0))] == ["13.6.1", "13.7.2"]
    assert parse("triton=3.98.1,sm=100").ptxas == "13.7.2"
    assert launch_table.knows("3.98.0") and not launch_table.knows("3.99.0")


def test_from_which_card_on_a_new_release_takes_its_second_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "/opt/ptxas-blackwell")
    monkeypatch.setattr(releases, "RELEASES", (*RELEASES, PRETENDED._replace(blackwell_from=(8, 0))))
    assert ptxas_path("3.98.0", (8, 0)) == "/opt/ptxas-blackwell"
    assert ptxas_path(RELEASES[-1].version, (8, 0)) == "/opt/ptxas"


def test_doctor_advises_a_new_release_and_knows_its_torch(one_more: Release) -> None:
    report = flashlin.doctor(op="chunk_simple_gla", target="triton=3.3.0,sm=120,torch=2.98.0")
    assert report.advice is not None and report.advice.command == 'pip install "triton~=3.98.0"'
    found = checks.check_triton(made("triton=3.9.0,sm=90", torch="2.98.0+cu130"))
    assert [one.status for one in found if one.name == "pair"] == ["worked around"]


def test_the_matrix_has_a_cell_of_a_new_release(one_more: Release) -> None:
    last = cells.whole().cell[-1]
    assert (last.name, last.kind, last.python) == ("triton-3.98.0", "gate", "3.11 to 3.17")
    assert supported()[-1] == "3.98.0"


def test_a_new_release_comes_with_its_numpy(one_more: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def installed(wanted: list[str], *rest: object, tell: object) -> Path:
        asked.extend(wanted)
        return Path("there")
    monkeypatch.setattr(environments, "installed", installed)
    environments.triton_environment("3.98.0", interpreter=True)
    assert asked == ["triton==3.98.0", "numpy<9"]


def test_the_installed_release_is_not_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(wanted: list[str], *rest: object, **how: object) -> Path:
        raise AssertionError(f"asked for {wanted}")
    monkeypatch.setattr(environments, "installed", installed)
    own = version("triton")
    folder = Path(environments.triton_environment(own)["PYTHONPATH"].split(os.pathsep)[0])
    assert folder == environments.triton_home(own) and (folder / "triton" / "__init__.py").exists()
    with pytest.raises(AssertionError, match=r"triton==3\.98\.0"):
        environments.triton_environment("3.98.0")


def test_a_release_that_is_no_gate_has_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "RELEASES", (*RELEASES, PRETENDED._replace(gate=False)))
    assert "3.98.0" not in {cell.triton for cell in cells.whole().cell} and "3.98.0" not in supported()
    assert bundled_ptxas("3.98.0", (8, 9)) == "13.6.1"


def test_the_readme_has_a_column_for_a_new_release(one_more: Release) -> None:
    assert list(test_readme.ranges())[-1].endswith(" to 3.98")


# --- the workflow ---

def releases_of(text: str) -> list[str]:
    [line] = re.findall(r"^ *triton: (\[.*\])", text, re.MULTILINE)
    return list(json.loads(line))


def pythons_of(text: str) -> list[str]:
    return re.findall(r'python-version: "(.*)" #', text)


def test_the_workflow_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert workflow.write(cells.whole(), check=True) == 0, "run: python -m matrix workflow"
    text = workflow.WORKFLOW.read_text(encoding="utf-8")
    assert releases_of(text) == list(supported())
    assert len(pythons_of(text)) == text.count("actions/setup-python@") == 2


def test_a_workflow_without_a_release_is_noticed_and_mended(one_more: Release, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "matrix.yml"
    before = workflow.WORKFLOW.read_text(encoding="utf-8")
    path.write_text(before, encoding="utf-8")
    assert workflow.write(cells.whole(), path, check=True) == 1
    assert "run python -m matrix workflow" in capsys.readouterr().out
    assert workflow.write(cells.whole(), path) == 0
    after = path.read_text(encoding="utf-8")
    assert releases_of(after)[-1] == "3.98.0" and workflow.write(cells.whole(), path, check=True) == 0
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    assert len(changed) == 1 and changed[0].endswith("# python -m matrix workflow"), "nothing else is touched"


def test_a_workflow_that_has_no_place_for_releases_is_an_error() -> None:
    with pytest.raises(ValueError, match="found no line triton:"):
        workflow.current("jobs:\n", cells.whole())


def test_all_jobs_have_the_oldest_python_that_serves_every_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def text() -> str:
        return workflow.current(workflow.WORKFLOW.read_text(encoding="utf-8"), cells.whole())

    oldest = RELEASES[0]._replace(python="3.8 to 3.12")
    monkeypatch.setattr(releases, "RELEASES", (oldest,))
    assert pythons_of(text()) == ["3.10", "3.10"], "flashlin's own oldest Python is 3.10"
    monkeypatch.setattr(releases, "RELEASES", (oldest, PRETENDED._replace(python="3.12 to 3.17")))
    assert pythons_of(text()) == ["3.12", "3.12"]
    monkeypatch.setattr(releases, "RELEASES", (oldest, PRETENDED._replace(python="3.13 to 3.17")))
    with pytest.raises(ValueError, match="no Python has wheels of every release"):
        text()


# --- no lists of releases outside the table ---

def listed(node: ast.AST) -> set[str]:
    """Return the releases in a list, tuple, set or dict literal, written as text or as ``(3, 9)``.

    Arguments of calls inside the literal do not count.
    """
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) and VERSION.fullmatch(node.value) else set()
    if isinstance(node, ast.Dict):
        return set[str]().union(*map(listed, filter(None, (*node.keys, *node.values))))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        text = ast.unparse(node)
        return {text} if re.fullmatch(r"\(3, \d+\)", text) else set[str]().union(*map(listed, node.elts))
    return set()


def lists_of_releases(source: str) -> Iterator[int]:
    """Yield the line numbers of literals that contain three or more releases."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) and len(listed(node)) >= 3:
            yield node.lineno


@pytest.mark.parametrize("source", [
    'x = ("3.0.0", "3.1.0", "3.9.0")', 'x = {"2.4.0": "3.0.0", "2.5.0": "3.1.0"}',
    'x = {(3, 0): 1, (3, 1): 2, (3, 2): 3}', 'f(x, ["3.0", "3.1", "3.9"])',
    'x = [("3.0.0", 1), ("3.1.0", 2), ("3.9.0", 3)]'])
def test_a_list_of_releases_is_seen(source: str) -> None:
    assert set(lists_of_releases(source)) == {1}


@pytest.mark.parametrize("source", [
    'x = ("3.0.0", "3.9.0")', 'x = (f("3.0.0"), f("3.1.0"), f("3.9.0"))', 'x = (3, 1, 2)'])
def test_what_is_no_list_of_releases_is_not(source: str) -> None:
    assert not list(lists_of_releases(source))


def test_only_the_table_lists_releases() -> None:
    table = ROOT / "flashlin" / "compat" / "releases.py"
    folders = [ROOT / name for name in ("flashlin", "matrix", "tools")]
    files = sorted({path for folder in folders for path in folder.rglob("*.py")} - {table})
    assert len(files) > 100
    found = [f"{path}:{line}" for path in files for line in lists_of_releases(path.read_text())]
    assert not found, "derive it from flashlin.compat.releases"
