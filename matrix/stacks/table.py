"""Real programs, raw and patched, as tables of SUPPORT.md, made of the records of
``python -m matrix stacks``."""
from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matrix import markdown
from matrix.stacks.records import read
from matrix.stacks.verdicts import GRADIENTS, LOGITS, MEANS

MARKS = {"agrees": "yes", "reference": "yes", "alone": "runs", "as raw": "as raw", "differs": "**differs**",
         "raises": "error", "not patched": "torch", "-": "-"}
REFERENCES = {
    "": "the raw program's own torch path, and that in float64",
    "without fla": "the same models without fla",
    "interpreter": "raw fla in Triton's interpreter (logits and gradients)",
    "transformers": "transformers' model of the same weights, and that in float64"}


def table(folder: Path) -> list[str]:
    """Lines of markdown; none without a record."""
    records = [read(path) for path in sorted(folder.glob("stacks-*.json")) if "-gpu-" not in path.name]
    if not records:
        return []
    lines = ["", "## Real programs", "",
             "Models of other packages on a CPU, as they are and under `flashlin.patched`, made by "
             "`python -m matrix stacks`. A cell is raw, then patched, where they differ; a figure is the "
             "patched program's RMS ratio, or that of its worst gradient. Allowed are "
             f"{LOGITS:g} for logits and {GRADIENTS:g} for gradients, and tokens have to be equal. Padding, "
             "pieces and packed rows are compared with the row alone, the prompt at once, the documents one "
             "by one.", "",
             *markdown.table(("", "means"), [(MARKS[verdict], meaning) for verdict, meaning in MEANS.items()
                                             if verdict != "reference"])]
    for record in sorted(records, key=lambda one: (one["of"], one["stack"]), reverse=True):
        lines += _of_record(record)
    return [*lines, "", "What is behind everything else than *yes*, patched:", "",
            *markdown.table(("answer", "quantity", "where"), _reasons(records))]


def seeds(folder: Path) -> list[str]:
    """The programs that flashlin began with, on GPUs; no lines without a record."""
    lines: list[str] = []
    for path in sorted(folder.glob("seeds-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        lines += ["", f"### {record['device']}, Triton {record['triton']}", "",
                  f"fla {record['fla']}, torch {record['torch']}, {record['date']}.", "",
                  *markdown.table(("program", "what it does", "raw", "patched"),
                                  [(row["program"], row["part"], row["raw"], row["patched"])
                                   for row in record["rows"]])]
    return lines and ["", "## Programs it began with", "",
                      "fla's layers and functions as they are and under `flashlin.patched(\"fla\")`, made by "
                      "`python -m matrix.stacks.seeds`. *right* is within bounds of float32 in plain torch, "
                      "or the error that was asked for. What a program does second meets what the first has "
                      "left behind.", *lines]


def _of_record(record: dict[str, Any]) -> Iterable[str]:
    quantities = list(record["rows"][0].get("raw") or record["rows"][0]["patched"])
    patches = ", ".join(map(repr, record["patches"]))
    yield from ("", f"### {record['stack']}", "",
                f"`patched({patches})`, torch {record['torch']}, {record['date']}; beside "
                f"{REFERENCES[record['reference']]}.", "")
    yield from markdown.table(("model", *quantities), [
        (f"`{row['model']}`", *(_cell(row, quantity) for quantity in quantities)) for row in record["rows"]])


def _cell(row: dict[str, Any], quantity: str) -> str:
    raw, patched = (_mark(row.get(way, {}).get(quantity, "alone")) for way in ("raw", "patched"))
    shown = f"{patched} {_figure(row['patched'].get(quantity, ''))}".strip()
    return shown if raw == patched else f"{raw} / {shown}"


def _mark(answer: str) -> str:
    return MARKS[verdict_of(answer)]


def verdict_of(answer: str) -> str:
    """The verdict at the head of a record's answer."""
    return next(one for one in sorted(MARKS, key=len, reverse=True)
                if answer == one or answer.startswith((f"{one} ", f"{one}:")))


def _figure(answer: str) -> str:
    """Beside itself if there is such a figure, or beside float64, or beside float32; none for tokens."""
    found = (re.search(rf" {name} ([^ /]+)/", answer) for name in ("itself", "fp64", "fp32"))
    return next((one[1] for one in found if one), "")


def _reasons(records: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    where: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for row in record["rows"]:
            for quantity, answer in row["patched"].items():
                if _mark(answer) not in ("yes", "runs"):
                    said = answer if ":" in answer.partition(" ")[0] else verdict_of(answer)
                    where.setdefault((said, quantity), []).append(f"{row['model']} ({record['stack']})")
    return [(said, quantity, _some(places)) for (said, quantity), places in sorted(where.items())]


def _some(places: list[str], most: int = 4) -> str:
    return ", ".join(places[:most]) + (f" and {len(places) - most} more" if len(places) > most else "")
