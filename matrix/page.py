"""The support matrix as one HTML page that needs nothing else: ``page.html`` with the squares in it as
JSON."""
from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from flashlin.compat.known_issues import KNOWN_ISSUES
from matrix.results import Matrix, compact
from matrix.status import MEANS, STATUSES, Square


def data(matrix: Matrix, squares: list[Square], date: str) -> dict[str, Any]:
    """squares: every op under every Triton on every card, known or not; texts by number, because most come
    back hundreds of times."""
    known = {(square.op, square.triton, square.card): square for square in squares}
    texts: dict[str, int] = {}
    axes = {"op": [{"name": op, "note": "", "kind": ""} for op in sorted({square.op for square in squares})],
            "triton": [{"name": cell.triton, "note": "", "kind": cell.kind} for cell in matrix.tritons],
            "card": [{"name": card.name, "note": card.example, "kind": card.kind} for card in matrix.card]}
    rows = []
    for op, triton, card in product(*([item["name"] for item in axis] for axis in axes.values())):
        square = known.get((op, triton, card)) or Square(op=op, card=card, triton=triton, status="not run")
        evidence, *why = (texts.setdefault(text, len(texts)) for text in (square.evidence, *square.why))
        rows.append((STATUSES.index(square.status), square.calls, evidence, why))
    issues = {issue.id: {"effect": issue.effect, "url": issue.url if issue.url.startswith("https://") else ""}
              for issue in KNOWN_ISSUES}
    return {"date": date, "issues": issues, "statuses": [(status, MEANS[status]) for status in STATUSES],
            "axes": axes, "texts": list(texts), "squares": rows}


def page(matrix: Matrix, squares: list[Square], date: str) -> str:
    # or a text might end the script
    embedded = compact(data(matrix, squares, date)).replace("<", "\\u003c")
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8").replace("{{data}}", embedded)
