"""Pack and read the record of a stack, which is a JSON file in matrix/results."""
from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

SHARED = ("torch", "date")  # facts that are the same in most rows of a record


def packed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record in the compact form of its file.

    Each sentence is stored once, and answers refer to it by number. The names of the quantities are stored
    once, and each way of running a model has a list of answers (null if a row has none). ``usual`` contains
    the facts that most rows have in common, and those rows omit them.
    """
    sentences: dict[str, int] = {}

    def number(answer: str) -> str:
        verdict, found, said = answer.partition(": ")
        return f"{verdict}:#{sentences.setdefault(said, len(sentences))}" if found else answer
    names = list(dict.fromkeys(name for row in record["rows"] for one in row.values() if isinstance(one, dict)
                               for name in one))
    rows = [{key: one if isinstance(one, str) else
             [number(one[name]) if name in one else None for name in names]
             for key, one in row.items()} for row in record["rows"]]
    usual = {name: Counter(row[name] for row in rows if name in row).most_common(1)[0][0]
             for name in SHARED if any(name in row for row in rows)}
    rows = [{name: one for name, one in row.items() if usual.get(name) != one} for row in rows]
    return {**record, "sentences": list(sentences), "quantities": names, "usual": usual, "rows": rows}


def read(path: Path) -> dict[str, Any]:
    """Read a record, with all sentences and names of quantities filled in.

    Older files name the quantities in each row.
    """
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    def said(answer: str) -> str:
        verdict, found, number = answer.partition(":#")
        return f"{verdict}: {record['sentences'][int(number)]}" if found else answer
    def named(one: Any) -> Any:
        if isinstance(one, str):
            return one
        pairs = one.items() if isinstance(one, dict) else zip(record["quantities"], one, strict=True)
        return {name: said(answer) for name, answer in pairs if answer is not None}
    usual = record.get("usual", {})
    return {**record, "rows": [{**usual, **{key: named(one) for key, one in row.items()}}
                               for row in record["rows"]]}
