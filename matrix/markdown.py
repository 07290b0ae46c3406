"""Format tables in markdown."""
from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table with a header row as lines of markdown."""
    return [line(*head), "|---" * len(head) + "|", *(line(*row) for row in rows)]


def line(*cells: str) -> str:
    """Return one table row with its cells escaped for markdown."""
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in escaped)
