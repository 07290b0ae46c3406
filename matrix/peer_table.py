"""Load the packages that flashlin is compared with, and write their comparison tables for SUPPORT.md.

The script matrix/peers.py makes the records that these tables show.
"""
from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from matrix import markdown

MARKS = {"right": "yes", "none": "-"}


def module_of(home: str) -> ModuleType:
    """Import a module of another package, or raise ImportError.

    Modules of mamba_ssm are imported without running its ``__init__``, which needs a CUDA extension.
    """
    if home.startswith("mamba_ssm."):
        package = ModuleType("mamba_ssm")
        package.__path__ = [str(Path(folder) / "mamba_ssm")
                            for folder in sys.path if (Path(folder) / "mamba_ssm").is_dir()]
        sys.modules["mamba_ssm"] = package
    return importlib.import_module(home)


def table(folder: Path) -> list[str]:
    """Return the comparison tables as lines of markdown, or an empty list if there is no record."""
    return [line for path in sorted(folder.glob("peers-*.json"))
            for line in _of_record(json.loads(path.read_text(encoding="utf-8")))]


def _of_record(record: dict[str, Any]) -> list[str]:
    aspects: dict[str, str] = record["aspects"]
    packages = ", ".join(f"{name} {facts['version']} (needs Triton {facts['triton']})"
                         for name, facts in record["packages"].items())
    answers = {(row["op"], row["side"]): row for row in record["rows"]}
    rows, reasons = list[list[str]](), list[tuple[str, ...]]()
    for (op, side), theirs in answers.items():
        if side == "flashlin":
            continue
        ours = answers[op, "flashlin"]
        marks = [dict.fromkeys(_mark(row[aspect]) for row in (theirs, ours)) for aspect in aspects]
        rows.append([f"`{op}`", side, *map(" / ".join, marks)])
        reasons += [(f"`{op}`", row["side"], aspect, row[aspect])
                    for aspect in aspects for row in (theirs, ours) if row[aspect] not in MARKS]
    return ["", "## Beside fla and mamba_ssm", "",
            f"`matrix/peers.py` ran these ops on an {record['device']} under Triton {record['triton']}, "
            f"{record['date']}, with {packages}. flashlin has kernels for Triton 3.0 to 3.9, and uses "
            "plain torch with other releases. A cell with two answers shows the other package, then "
            "flashlin. *yes*: right; *wrong*: differs from float64; *no*: an error; *-*: not "
            "applicable. The columns are:", "",
            "; ".join(f"*{aspect}*: {meaning}" for aspect, meaning in aspects.items()) + ".", "",
            *markdown.table(("op", "package", *aspects), rows), "",
            "Details of all answers other than *yes*:", "",
            *markdown.table(("op", "package", "column", "answer"), reasons)]


def _mark(answer: str) -> str:
    return MARKS.get(answer) or {"wrong": "wrong", "error": "no"}.get(answer.partition(":")[0], "see below")
