"""Helpers for the tests of doctor: broken environments in child processes, and hand-made machines."""
from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flashlin.compat.target import parse
from flashlin.diagnostics import report
from flashlin.diagnostics.machine import Machine
from flashlin.diagnostics.report import Report
from flashlin.policy import Policy

ROOT = Path(__file__).resolve().parent.parent
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHLIN_", "TRITON_"))}
NO_TORCH = "import sys; sys.modules['torch'] = None"
BROKEN = "print('noise on stdout')\nraise OSError('libcudart.so.12: cannot open shared object file')"
H200 = "triton=3.6.0,sm=90"


def run(*arguments: str, before: str = "", path: tuple[Path, ...] = (), cwd: str | Path = ROOT,
        **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the ``flashlin`` command in a child process and return its result.

    before: a script that runs first in the child.
    path: folders that are put in front of the import path.
    environment: additional environment variables.
    """
    script = (f"{textwrap.dedent(before)}\nimport sys\nfrom flashlin.__main__ import "
              f"main\nsys.exit(main({list(arguments)!r}))")
    search = os.pathsep.join(map(str, (*path, ROOT)))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300,
                          cwd=cwd, env={**CLEAN, "PYTHONPATH": search, **environment})


def read(done: subprocess.CompletedProcess[str]) -> Report:
    """Return the JSON report from stdout; fail on other output there, or on a traceback on stderr."""
    assert "Traceback" not in done.stderr, done.stderr
    return Report.model_validate_json(done.stdout)


def package(folder: Path, name: str, text: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return folder


def installed(folder: Path, name: str, version: str) -> Path:
    """Write the metadata that pip writes for an installed package, and return the folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def check(found: Report, name: str) -> report.Check:
    return next(one for one in found.checks if one.name == name)


def made(*targets: str, torch: str = "2.10.0", cuda: str | None = "12.8", hip: str | None = None,
         **changes: Any) -> Machine:
    found = {f"cuda:{index}": parse(target, torch_version=torch) for index, target in enumerate(targets)}
    module = SimpleNamespace(__version__=torch, version=SimpleNamespace(cuda=cuda, hip=hip))
    triton = next(iter(found.values())).triton if found else "3.6.0"
    return Machine(module, "", triton, "", found, {}, Policy(), "")._replace(**changes)
