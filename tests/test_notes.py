"""Tests of the form of benchmarks/notes: size, order, the lines of each entry, and its records."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.machines import ROOT

NOTES = ROOT / "benchmarks" / "NOTES.md"
FILES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
LINES = ("Shape", "Prediction", "Result", "Record", "Prediction held")
HELD = re.compile(r"(yes|no|partly|none made|not measured|not known)\b")


def entries(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return (date, lines by name) of each entry; the value of a line includes its continuation lines."""
    found = []
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        lines = re.split(r"^- ", body, flags=re.MULTILINE)[1:]
        pairs = [line.split(":", 1) for line in lines if ":" in line]
        found.append((head.partition(": ")[0],
                      {name.partition(",")[0]: " ".join(value.split()) for name, value in pairs}))
    return found


def complaints(text: str) -> list[str]:
    """Return what is wrong with the form of a file of entries."""
    size = len(text.encode())
    wrong = [f"{size} bytes"] * (size > 20_000)
    made = entries(text)
    dates = [date for date, _ in made]
    wrong += ["not newest first"] * (dates != sorted(dates, reverse=True))
    for date, lines in made:
        wrong += [f"{date} is no date"] * (not re.fullmatch(r"2\d{3}-\d\d-\d\d", date))
        wrong += [f"{date}: no line {name}" for name in LINES if not lines.get(name)]
        held = lines.get("Prediction held", "")
        wrong += [f"{date}: held {held}"] * (not HELD.match(held))
        failed = re.match(r"no\b", held)
        wrong += [f"{date}: no reason"] * (bool(failed) and "Reason" not in lines)
        for name in re.findall(r"`([^`]+)`", lines.get("Record", "")):
            folder = ROOT if "/" in name else ROOT / "benchmarks" / "results"
            wrong += [f"{date}: no record {name}"] * (not list(folder.glob(name)))
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_entry_has_its_lines_and_records(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert entries(text)
    assert not complaints(text)


def test_the_index_names_every_file() -> None:
    text = NOTES.read_text(encoding="utf-8")
    assert len(text.encode()) <= 20_000 and FILES
    assert set(re.findall(r"\]\((notes/[\w-]+\.md)\)", text)) == {f"notes/{file.name}" for file in FILES}


def test_a_wrong_entry_is_noticed() -> None:
    good = ("# T\n\n## 2026-01-02: c\n- Shape: s\n- Prediction: 1\n- Result: 2\n- Record: `speed-*`\n"
            "- Prediction held: no\n- Reason: r\n")
    assert not complaints(good)
    for old, new, why in (("- Shape: s\n", "", "no line Shape"), ("- Reason: r\n", "", "no reason"),
                          ("held: no", "held: maybe", "held maybe"), ("`speed-*`", "`sped-*`", "no record"),
                          ("2026-01-02", "January", "no date"), ("s\n", "s" * 20_000 + "\n", "bytes"),
                          ("# T\n", "## 2026-01-01: older\n", "newest first")):
        assert why in " ".join(complaints(good.replace(old, new, 1))), why
