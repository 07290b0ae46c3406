"""Child processes import what their parent would, and nothing that happens to lie in the current directory;
all of them are started so."""
from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from flashlin.compat.child import end, python

ROOT = Path(__file__).resolve().parents[1]
OURS = [path for folder in ("flashlin", "matrix", "benchmarks", "tools", "examples")
        for path in (ROOT / folder).rglob("*.py")]
TRAP = "import os; open(os.environ['TRAP'], 'w').write(__name__); raise SystemExit(3)"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory full of modules that tell when somebody imports them."""
    (tmp_path / "here").mkdir()
    for name in ("json", "argparse", "inspect", "runpy", "torch", "flashlin", "tempfile", "signal"):
        (tmp_path / "here" / f"{name}.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    return tmp_path / "sprung"


@pytest.mark.parametrize("module, arguments", [
    ("flashlin.trial.child", ["--help"]), ("flashlin.testing.compile", ["--help"]),
    ("flashlin.diagnostics.quick", ["--help"]), ("matrix.gpu", ["--help"])])
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
    """A command of [sys.executable, "-m", ...] would have the current directory on its path."""
    found = []
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                found.append(f"{path.name}: {' '.join(ast.unparse(part) for part in node.elts[1:3])}")
    # the second cleans its path itself
    assert sorted(found) == ["child.py: '-c' _BEGIN", "first_aid.py: '-u' '-c'"]


def test_a_child_is_ended_with_what_it_has_started() -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline()
    end(process)
    assert process.wait(10) == -9 and process.stdout.read() == b"", "the pipe closes once nobody holds it"
    end(process)  # a second time is no error
