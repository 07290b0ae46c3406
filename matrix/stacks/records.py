"""The record of a stack, a file in matrix/results."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def packed(record: dict[str, Any]) -> dict[str, Any]:
    """A record as its file has it: each sentence once, by number elsewhere, since a model says it often."""
    sentences: dict[str, int] = {}

    def number(answer: str) -> str:
        verdict, found, said = answer.partition(": ")
        return f"{verdict}:#{sentences.setdefault(said, len(sentences))}" if found else answer
    rows = [_each(one, number) for one in record["rows"]]
    return {**record, "sentences": list(sentences), "rows": rows}


def read(path: Path) -> dict[str, Any]:
    """A record, with its sentences."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    def said(answer: str) -> str:
        verdict, found, number = answer.partition(":#")
        return f"{verdict}: {record['sentences'][int(number)]}" if found else answer
    return {**record, "rows": [_each(one, said) for one in record["rows"]]}


def _each(row: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    return {key: one if isinstance(one, str) else {name: change(answer) for name, answer in one.items()}
            for key, one in row.items()}
