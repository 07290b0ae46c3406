"""The record of a stack, a file in matrix/results."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def packed(record: dict[str, Any]) -> dict[str, Any]:
    """A record as its file has it: each sentence once, by number elsewhere, since a model says it often, and
    the names of the quantities once, with a list of answers for each way (null where a row has none)."""
    sentences: dict[str, int] = {}

    def number(answer: str) -> str:
        verdict, found, said = answer.partition(": ")
        return f"{verdict}:#{sentences.setdefault(said, len(sentences))}" if found else answer
    names = list(dict.fromkeys(name for row in record["rows"] for one in row.values() if isinstance(one, dict)
                               for name in one))
    rows = [{key: one if isinstance(one, str) else
             [number(one[name]) if name in one else None for name in names]
             for key, one in row.items()} for row in record["rows"]]
    return {**record, "sentences": list(sentences), "quantities": names, "rows": rows}


def read(path: Path) -> dict[str, Any]:
    """A record, with its sentences and the names of its quantities. Older files name the quantities in each
    row."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    def said(answer: str) -> str:
        verdict, found, number = answer.partition(":#")
        return f"{verdict}: {record['sentences'][int(number)]}" if found else answer
    def named(one: Any) -> Any:
        if isinstance(one, str):
            return one
        pairs = one.items() if isinstance(one, dict) else zip(record["quantities"], one, strict=True)
        return {name: said(answer) for name, answer in pairs if answer is not None}
    return {**record, "rows": [{key: named(one) for key, one in row.items()} for row in record["rows"]]}
