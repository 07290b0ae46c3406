"""Tests of the wheel and the sdist: they are built, installed in a folder and used without the source tree.

Nothing is downloaded: the tests use setuptools and pip of this environment (installed by the extra ``test``).
"""
from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import flashlin
from flashlin.diagnostics.report import Report
from tests.machines import CLEAN, H200, ROOT

BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # setuptools puts arguments of its own there
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""
HOME = "https://example.org/somebody/flashlin"
CALL = """
import sys
import torch, flashlin
o, state = flashlin.chunk_simple_gla(*torch.ones(3, 1, 8, 2, 4), scale=1.0, output_final_state=True)
assert torch.equal(state, torch.full((1, 2, 4, 4), 8.0)), state
assert o[0, :, 0, 0].tolist() == [4.0 * token for token in range(1, 9)], o
import flashlin.mamba, flashlin.testing.plugin
for name, module in sys.modules.items():
    if name.split(".")[0] == "flashlin":
        assert module.__file__.startswith(sys.argv[1]), f"{name} comes from {module.__file__}"
    assert name.split(".")[0] not in ("matrix", "tests", "benchmarks"), name
print(flashlin.__version__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both archives and return their folder.

    They are built from a copy of the source tree, because setuptools writes into the tree.
    """
    # find_spec("pip") is not used here. setuptools would treat it as an import of pip, and after that
    # setuptools could not be imported.
    present = {found.name.lower() for found in importlib.metadata.distributions() if found.name}
    absent = sorted({"pip", "setuptools"} - present)
    if absent:
        reason = f"building a wheel needs {' and '.join(absent)}: pip install {' '.join(absent)}"
        if os.environ.get("CI"):  # skips go unnoticed in CI
            pytest.fail(reason)
        pytest.skip(reason)
    source, archives = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("archives")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for folder in ("flashlin", "matrix", "benchmarks", "tests", "tools"):
        shutil.copytree(ROOT / folder, source / folder,
                        ignore=shutil.ignore_patterns("__pycache__", "results"))
    do([sys.executable, "-c", BUILD, str(archives)], source, PROJECT_URL=f"{HOME}/")
    return archives


def do(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, check=False,
                          env={**CLEAN, **environment})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def packed(archive: Path) -> set[str]:
    """Return the paths of an archive's files, relative to the source tree or the installation folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return set(opened.namelist())
    with tarfile.open(archive) as opened_tar:
        return {member.name.partition("/")[2] for member in opened_tar.getmembers() if member.isfile()}


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_an_archive_holds_the_package_and_nothing_of_the_repository(kind: str, built: Path) -> None:
    [archive] = built.glob(kind)
    assert flashlin.__version__ in archive.name
    names = packed(archive)
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "flashlin").rglob("*.py")}
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "flashlin").rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert {"flashlin/py.typed", "flashlin/kernels/proven.json"} <= data
    assert {name for name in names if name.startswith("flashlin/")} == sources | data
    metadata = {f"flashlin-{flashlin.__version__}.dist-info", "flashlin.egg-info"}
    project = {"LICENSE", "PKG-INFO", "README.md", "MANIFEST.in", "pyproject.toml", "setup.cfg", "setup.py"}
    beside = {name.split("/")[0] for name in names} - {"flashlin"} - metadata
    assert beside <= (project if kind == "*.tar.gz" else set())


def test_links_of_the_metadata_lead_to_the_project(built: Path) -> None:
    [archive] = built.glob("*.whl")
    with zipfile.ZipFile(archive) as opened:
        text = opened.read(f"flashlin-{flashlin.__version__}.dist-info/METADATA").decode()
    head, readme = text.split("\n\n", 1)
    assert f"Project-URL: Homepage, {HOME}\n" in head and f"Project-URL: Issues, {HOME}/issues\n" in head
    places = re.findall(r"(!?)\[[^\]]*\]\(([^)#\s]+)[^)\s]*\)", readme)
    own = [(kind, place.removeprefix(HOME)) for kind, place in places if place.startswith(HOME)]
    assert own and all(place.startswith("http") for _, place in places)
    for picture, place in own:
        path = place.removeprefix(f"/{'raw' if picture else 'blob'}/v{flashlin.__version__}/")
        assert (ROOT / path).exists(), place


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_an_archive_installs_and_runs_without_the_source_tree(kind: str, built: Path, tmp_path: Path) -> None:
    [archive] = built.glob(kind)
    here, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    do([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
        "--no-deps", "--no-build-isolation", "--target", str(here), str(archive)], elsewhere)
    path = {"PYTHONPATH": str(here)}
    assert do([sys.executable, "-c", CALL, str(here)], elsewhere, **path) == f"{flashlin.__version__}\n"
    said = do([sys.executable, str(here / "bin" / "flashlin"), "--version"], elsewhere, **path)
    assert said.startswith(f"flashlin {flashlin.__version__}, torch ")
    machine = do([sys.executable, "-m", "flashlin", "doctor"], elsewhere, **path)
    assert f"flashlin {flashlin.__version__}: " in machine and "Ops, by the worst of their calls" in machine
    h200 = do([sys.executable, "-m", "flashlin", "doctor", "--json", "--target", H200], elsewhere, **path)
    evidence = {plan.evidence for plan in Report.model_validate_json(h200).plans}
    assert "ran" in evidence, "the launch table is missing in the archive"
