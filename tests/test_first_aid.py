"""Tests of tools/first_aid.py: its output if flashlin cannot be imported, and that it has no dependencies."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.machines import BROKEN, CLEAN, ROOT, installed, package

SCRIPT = ROOT / "tools" / "first_aid.py"


def aid(*path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**CLEAN, "PYTHONPATH": search, **environment},
        cwd="/",
    )


def test_it_imports_nothing_but_python() -> None:
    names = {
        name.name.partition(".")[0]
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    names |= {
        str(node.module).partition(".")[0]
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert names <= sys.stdlib_module_names
    ast.parse(SCRIPT.read_text(), feature_version=(3, 8))


def test_what_does_not_import_is_told_and_what_else_there_is(tmp_path: Path) -> None:
    package(tmp_path, "pydantic", BROKEN)
    package(tmp_path, "torch", "__version__ = '9.9'")
    package(tmp_path, "triton", "import os; os.abort()")
    done = aid(tmp_path, ROOT, HF_TOKEN="hf_x", TRITON_SECRET="abc", HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "BAD  pydantic: exit code 1: OSError: libcudart.so.12: cannot open shared object file" in lines
    assert "ok   torch: found 9.9 from ~/torch/__init__.py" in lines
    assert any(line.startswith("BAD  triton: ended by signal 6") for line in lines)
    assert any(line.startswith("BAD  flashlin.diagnostics.doctor: exit code 1") for line in lines)
    assert "C compiler: " in done.stdout and "hf_x" not in done.stdout and "TRITON_SECRET=..." in lines
    # The missing library may belong to a dependency, so the advice must not contain --no-deps.
    assert lines[-1].startswith('Repair the first BAD line: pip install --force-reinstall "pydantic')
    assert str(tmp_path) not in done.stdout


def test_what_is_broken_is_pinned_and_what_is_missing_is_installed(tmp_path: Path) -> None:
    installed(package(tmp_path, "packaging", "1 / 0"), "packaging", "26.0")
    assert aid(tmp_path, ROOT).stdout.endswith('pip install --force-reinstall --no-deps "packaging==26.0"\n')
    package(tmp_path / "b", "packaging", "raise ModuleNotFoundError(\"No module named 'packaging'\")")
    assert aid(tmp_path / "b", ROOT).stdout.endswith("pip install packaging\n")
    # Only torch's own package index has this build.
    installed(package(tmp_path / "c", "torch", "1 / 0"), "torch", "9.9.0+cpu")
    assert aid(tmp_path / "c", ROOT).stdout.endswith(
        'pip install --force-reinstall --no-deps "torch==9.9.0" '
        "--index-url https://download.pytorch.org/whl/cpu\n"
    )


def test_where_flashlin_imports_it_names_the_doctor() -> None:
    done = aid(ROOT)
    assert done.returncode == 0 and "flashlin imports: flashlin doctor says more." in done.stdout
