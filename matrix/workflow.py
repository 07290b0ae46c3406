"""Update the Triton releases and the Python version in matrix/github-workflow.yml."""
from __future__ import annotations

import json
import re
from pathlib import Path

from matrix.results import Cell, Matrix

WORKFLOW = Path(__file__).with_name("github-workflow.yml")


def current(text: str, whole: Matrix) -> str:
    """Return the workflow text with the current Triton releases and Python version.

    Only the values of ``triton:`` and of every ``python-version:`` change. Raise ValueError if the text has
    no such line.
    """
    gates = [cell for cell in whole.tritons if cell.kind == "gate"]
    values = {"triton": [cell.triton for cell in gates], "python-version": python_of(gates)}
    for name, value in values.items():
        line = re.compile(rf"^( *{name}:) [^#\n]*?( #.*)?$", re.MULTILINE)
        text, count = line.subn(rf"\1 {json.dumps(value)}\2", text)
        if not count:
            raise ValueError(f"{WORKFLOW.name}: found no line {name}: ...")
    return text


def python_of(cells: list[Cell]) -> str:
    """Return the oldest Python, 3.10 or newer, for which the releases of all cells have wheels.

    All jobs of the workflow use this version. Raise ValueError if no Python version fits.
    """
    shared = [minor for minor in range(10, 100) if all(cell.runs_on((3, minor)) for cell in cells)]
    if not shared:
        raise ValueError("no Python has wheels of every release: the workflow needs one for each cell")
    return f"3.{shared[0]}"


def write(whole: Matrix, path: Path = WORKFLOW, check: bool = False) -> int:
    """Write the current workflow file and return 0.

    With `check`, only compare the file and return 1 if it is stale.
    """
    old = path.read_text(encoding="utf-8")
    new = current(old, whole)
    if check:
        print("current" if new == old else f"stale: {path.name}; run python -m matrix workflow")
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    print(f"wrote {path}")
    return 0
