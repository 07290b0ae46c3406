"""Tables as markdown has them."""
from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of markdown."""
    return [line(*head), "|---" * len(head) + "|", *(line(*row) for row in rows)]


def line(*cells: str) -> str:
    """A row of a table."""
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in escaped)
