"""matrix/github-workflow.yml: the releases in it and the Python it sets up come of the table of releases."""
from __future__ import annotations

import json
import re
from pathlib import Path

from matrix.results import Cell, Matrix

WORKFLOW = Path(__file__).with_name("github-workflow.yml")


def current(text: str, whole: Matrix) -> str:
    """The workflow with the releases of today: the values of ``triton:`` and of every ``python-version:`` are
    put in anew, all else stays. Raises ValueError where there is no such line."""
    gates = [cell for cell in whole.tritons if cell.kind == "gate"]
    values = {"triton": [cell.triton for cell in gates], "python-version": python_of(gates)}
    for name, value in values.items():
        line = re.compile(rf"^( *{name}:) [^#\n]*?( #.*)?$", re.MULTILINE)
        text, count = line.subn(rf"\1 {json.dumps(value)}\2", text)
        if not count:
            raise ValueError(f"{WORKFLOW.name}: found no line {name}: ...")
    return text


def python_of(cells: list[Cell]) -> str:
    """The oldest Python, from flashlin's own 3.10 on, for which all their releases have wheels: one for all
    jobs.

    Raises ValueError where there is none.
    """
    shared = [minor for minor in range(10, 100) if all(cell.runs_on((3, minor)) for cell in cells)]
    if not shared:
        raise ValueError("no Python has wheels of every release: the workflow needs one for each cell")
    return f"3.{shared[0]}"


def write(whole: Matrix, path: Path = WORKFLOW, check: bool = False) -> int:
    """Write it; with check only compare. 1 if it was not what it should be."""
    old = path.read_text(encoding="utf-8")
    new = current(old, whole)
    if check:
        print("current" if new == old else f"stale: {path.name}; run python -m matrix workflow")
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    print(f"wrote {path}")
    return 0
