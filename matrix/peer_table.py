"""Load the packages that flashlin is compared with, and write docs/support/packages.md.

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
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("peers-*.json"))]
    if not records:
        return []
    aspects = {aspect: meaning for record in records for aspect, meaning in record["aspects"].items()}
    return ["`matrix/peers.py` runs the same cases with each package, and compares the results with float64. flashlin "
            "has kernels for Triton 3.0 to 3.9, and uses plain torch with other releases. A cell with two "
            "answers shows the other package, then flashlin.", "",
            *markdown.table(("answer", "meaning"), [
                ("yes", "the result is right"),
                ("wrong", "the result differs from float64 by more than the limit of the test"),
                ("no", "the call raises an error"), ("-", "not applicable")]), "",
            *markdown.table(("column", "case"), list(aspects.items())),
            *(line for record in records for line in _of_record(record))]


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
    title = f"{record['device']}, Triton {record['triton']}"
    return ["", f"## {title}", "",
            f"{record['date']}, with {packages}.", "",
            *markdown.table(("op", "package", *aspects), rows), "",
            f"### Answers other than yes: {title}", "",
            "The records `matrix/results/peers-*.json` have the whole error messages.", "",
            *markdown.table(("package", "columns", "answer", "ops"), _shared(reasons))]


# Pieces of error messages, and what they say in words.
PHRASES = {
    "cpu tensor": "no kernels for CPU tensors",
    "invalid argument": "the grid is too large for the GPU",
    "out of resource: shared memory": "needs more shared memory than the GPU has",
    "see #640": "refuses, because its kernels are wrong on Hopper under this Triton release (fla issue 640)",
    "is_cuda() to be true": "no kernels for CPU tensors",
    "state dimension <= 256": "the state is too large",
    "Backward pass": "has no backward",
    "headdim": "heads are too large",
    "head dimension": "heads are too large",
    "does not support float32": "no float32",
    "CompilationError": "a kernel does not compile"}


def in_words(answer: str) -> str:
    """Return an answer other than yes as a phrase: the kind of error, or the wrong tensors."""
    if answer.startswith("wrong: "):
        tensors = [one.split() for one in answer.removeprefix("wrong: ").split(", ")]
        errors = [error for _, error in tensors]
        worst = "NaN" if "nan" in errors else max(errors, key=float)
        names = ", ".join(name for name, _ in tensors[:3])
        names += f" and {len(tensors) - 3} more" if tensors[3:] else ""
        return f"wrong: {names}; largest error {worst}"
    return next((f"error: {said}" for piece, said in PHRASES.items() if piece in answer), answer)


def _shared(reasons: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return one row for all columns and ops of a package that have the same answer."""
    columns: dict[tuple[str, str, str], list[str]] = {}
    for op, side, aspect, answer in reasons:
        columns.setdefault((op, side, in_words(answer)), []).append(aspect)
    ops: dict[tuple[str, str, str], list[str]] = {}
    for (op, side, answer), some in columns.items():
        ops.setdefault((side, ", ".join(some), answer), []).append(op)
    return [(*row, ", ".join(some)) for row, some in ops.items()]


def _mark(answer: str) -> str:
    return MARKS.get(answer) or {"wrong": "wrong", "error": "no"}.get(answer.partition(":")[0], "see below")
