"""Tests of the stub files, which give type checkers the public names that flashlin loads on first use."""
from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools.stubs import ROOT, STUBS, stub


@pytest.mark.parametrize("package", STUBS)
def test_the_stub_says_what_the_package_has(package: str) -> None:
    assert (ROOT / STUBS[package]).read_text() == stub(package), "run: python -m tools.stubs"
    module = import_module(package)
    assert dir(module) == sorted([*module.__all__, *getattr(module, "_SUBMODULES", ())])


def test_a_name_that_is_not_there_is_an_error_to_a_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for path in STUBS.values():  # only the stubs: checking the modules that they import takes a minute
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "flashlin/backends.pyi").touch()  # the only public module without a stub
    user = tmp_path / "user.py"
    user.write_text("import flashlin\n"
                    "flashlin.chunk_gla, flashlin.RMSNorm, flashlin.doctor, flashlin.__version__\n"
                    "flashlin.mamba.RMSNormGated, flashlin.serving.decode\n"
                    "flashlin.ops.gla, flashlin.backends\n"
                    "flashlin.chunk_glaa\n"
                    "from flashlin.modules import RMSNorn\n")
    options = ("--ignore-missing-imports", "--no-site-packages", "--config-file=", "--cache-dir=cache")
    done = subprocess.run([sys.executable, "-m", "mypy", *options, "user.py"], cwd=tmp_path, timeout=170,
                          capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, done.stdout + done.stderr
    assert "chunk_glaa" in errors[0] and "RMSNorn" in errors[1]
