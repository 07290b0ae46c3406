"""SUPPORT.md and the page, made of the matrix's results. Nothing is written by hand there, and nothing is left blank."""
from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from flashlin.guards.proven import PROVEN
from flashlin.testing import peers, seeds
from flashlin.testing.page import page
from flashlin.testing.record import is_current
from flashlin.testing.results import MEANS, STATUSES, CellResult, Matrix, Square, Status, gpu_records, load_result, squares

MARKS: dict[Status, str] = {"FAILED": "**FAILED**", "refused": "refused", "not run": "not run", "torch path": "torch", "worked around": "around",
                            "compiled": "compiled", "ran": "ran"}


def failures(matrix: Matrix, result: CellResult) -> list[str]:
    """Of one cell, a line each: squares that FAILED on a gate card, and verdicts of the layers that run something."""
    gates = {card.name for card in matrix.card if card.kind == "gate"}
    broken = [one for one in squares(matrix, [result], {}) if one.status == "FAILED" and one.card in gates]
    wrong = [(layer, one) for layer, verdicts in result.verdicts.items() for one in verdicts if not one.ok]
    return [*(f"{one.op} {one.card} triton {one.triton}: {reason}" for one in broken for reason in one.why),
            *(f"{layer}: {one.name}: {one.detail}" for layer, one in wrong)]


def write(matrix: Matrix, results: Path, table: Path, check: bool = False) -> int:
    """Write SUPPORT.md, the launch table and the page; with check only compare. 1 if they were not what they should be."""
    found = [load_result(results, cell) for cell in matrix.cell]
    stale = stale_launches(found)
    every = squares(matrix, found, gpu_records(results), stale)
    texts = {table: support_table(matrix, found, every, results), PROVEN: launch_table(found, stale, results),
             results / "index.html": page(matrix, every, max((one.date for one in found), default=""))}
    if check:
        old = [path.name for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
        print(f"stale: {', '.join(old)}; run python -m matrix report" if old else "current")
        return 1 if old else 0
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


def stale_launches(results: list[CellResult]) -> set[str]:
    """Those whose kernel is not what it was when they were compiled."""
    return {name for result in results for name, one in result.launches.items() if not is_current(one.source, name.rpartition("-")[0])}


def launch_table(results: list[CellResult], stale: set[str], folder: Path) -> str:
    """JSON: configuration -> release -> ``compiled``, ``failed`` and ``ran``, each the cards of which it is known. compiled: every launch that
    the matrix plans with that configuration; failed: at least one; ran: on a GPU, in cases that were all right."""
    table: dict[str, dict[str, dict[str, list[str]]]] = {}

    def enter(config: str, triton: str, level: str, card: str) -> None:
        cards = table.setdefault(config, {}).setdefault(triton, {}).setdefault(level, [])
        if card not in cards:
            cards.append(card)
    for result in results:
        by_place: dict[tuple[str, str], list[bool | None]] = {}
        for launch, card in sorted(_planned(result)):
            tried = None if launch in stale else result.compiled.get(f"{launch}@{card}")
            by_place.setdefault((result.launches[launch].config, card), []).append(None if tried is None else not tried.why)
        for (config, card), verdicts in by_place.items():
            if verdicts == [True] * len(verdicts):
                enter(config, result.cell.triton, "compiled", card)
        for place, tried in result.compiled.items():  # planned or not: what has failed is planned otherwise from then on
            launch, _, card = place.partition("@")
            if launch not in stale and tried.refused and card.startswith("sm"):
                enter(result.launches[launch].config, result.cell.triton, "failed", card)
    for path in sorted(folder.glob("gpu-*.json")):
        record = json.loads(path.read_text())
        for config, source in record.get("configs", {}).items():
            if is_current(source, config.partition(" ")[0]):
                enter(config, record["triton"], "ran", "sm{}{}".format(*record["capability"]))
    lines = [f" {json.dumps(config)}: {json.dumps(releases, sort_keys=True)}" for config, releases in sorted(table.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"  # a line each, so that a change is a change of lines


def _planned(result: CellResult) -> set[tuple[str, str]]:
    """Launches and cards, without those that no plan leads to."""
    return {(launch, outcome.card) for outcome in result.outcomes if outcome.path == "triton" for launch in outcome.launches}


def support_table(matrix: Matrix, results: list[CellResult], every: list[Square], folder: Path) -> str:
    at = {(one.op, one.triton, one.card): one for one in every}
    ops = sorted({one.op for one in every})
    lines = ["# What runs where", "", "Made by `python -m matrix report` out of `matrix/results/`. The same as a page to click through, with every "
             "reason: `matrix/results/index.html`.", "", "| | means |", "|---|---|"]
    lines += [f"| {MARKS[status]} | {MEANS[status]} |" for status in reversed(STATUSES)]
    lines += ["", "## All ops", "", "The worst of all ops in each square.", ""]
    places = [(cell.triton, card.name) for cell in matrix.tritons for card in matrix.card]
    lines += _grid(matrix, {place: _worst([at.get((op, *place)) for op in ops]) for place in places})
    for op in ops:
        lines += ["", f"## {op}", "", *_grid(matrix, {place: _worst([at.get((op, *place))]) for place in places})]
    lines += ["", "## The failures it began with", "", *seeds.table(), *peers.table(folder)]
    lines += ["", "## Why", "", "Reasons behind everything that is not compiled or ran, most frequent first."]
    reasons = Counter((reason.partition(": ")[2].partition(":")[0], one.status) for one in every for reason in one.why)
    lines += ["", "| reason | status | calls |", "|---|---|---|"]
    lines += [f"| {_cell(reason)} | {MARKS[status]} | {count} |" for (reason, status), count in reasons.most_common()]
    lines += ["", "## The runs", "", "| cell | kind | date | kernels x cards compiled | failed | refused, so planned otherwise | interpreter, or "
              "torch path | seconds |", "|---|---|---|---|---|---|---|---|"]
    for result in results:
        verdicts = [one for layer in ("interpret", "torch") for one in result.verdicts.get(layer, ())]
        right = f"{sum(one.ok for one in verdicts)} of {len(verdicts)} right" if verdicts else "not run"
        planned = {f"{launch}@{card}" for launch, card in _planned(result)}
        failed = sum(bool(one.why) for place, one in result.compiled.items() if place in planned)
        refused = sum(one.refused for place, one in result.compiled.items() if place not in planned and "@sm" in place)
        seconds = ", ".join(f"{layer} {took:.0f}" for layer, took in sorted(result.layers.items()))
        compiled = f"{len(planned & set(result.compiled))} of {len(planned)}"
        facts = (result.cell.name, result.cell.kind, result.date or "not run", compiled, failed, refused, right, seconds)
        lines.append("| " + " | ".join(map(str, facts)) + " |")
    return "\n".join(lines) + "\n"


def _worst(found: list[Square | None]) -> Status:
    return min((one.status if one else "not run" for one in found), key=STATUSES.index, default="not run")


def _grid(matrix: Matrix, status: dict[tuple[str, str], Status]) -> list[str]:
    head = "| Triton | " + " | ".join(f"{card.name} ({card.example})" for card in matrix.card) + " |"
    rows = [f"| {cell.triton} | " + " | ".join(MARKS[status[cell.triton, card.name]] for card in matrix.card) + " |" for cell in matrix.tritons]
    return [head, "|---" * (len(matrix.card) + 1) + "|", *rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
