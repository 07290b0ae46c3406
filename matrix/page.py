"""Build the support matrix as one self-contained HTML page.

The page is the template ``page.html`` with all results embedded as JSON.
"""
from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from flashlin.compat.known_issues import KNOWN_ISSUES
from matrix.results import Matrix, compact
from matrix.status import MEANS, STATUSES, Square


def data(matrix: Matrix, squares: list[Square], date: str) -> dict[str, Any]:
    """Return the JSON data of the page.

    The data has one entry for each op, Triton release and GPU. A combination that is missing from `squares`
    gets the status "not run". Entries refer to texts by number, because most texts occur hundreds of times.
    """
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


def page(matrix: Matrix, squares: list[Square], date: str, overview: str = "../docs/support/index.md") -> str:
    """Return the page.

    overview: address of the overview of docs/support, relative to the page.
    """
    # Escape "<", because a text with "</script>" would end the script element.
    embedded = compact(data(matrix, squares, date)).replace("<", "\\u003c")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("{{overview}}", overview).replace("{{data}}", embedded)
