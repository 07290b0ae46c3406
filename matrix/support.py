"""SUPPORT.md and the page, made of the matrix's results. Nothing is written by hand there, and nothing is
left blank."""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from flashlin.guards.proven import PROVEN
from flashlin.testing.record import is_current
from matrix import peer_table as peers
from matrix import seeds
from matrix.page import page
from matrix.results import Matrix
from matrix.squares import MEANS, STATUSES, Found, Square, Status, gpu_records, squares

Table = dict[str, dict[str, dict[str, list[str]]]]  # configuration -> release -> level -> cards
MARKS: dict[Status, str] = {"FAILED": "**FAILED**", "refused": "refused", "not run": "not run",
                            "torch path": "torch", "worked around": "around", "compiled": "compiled",
                            "ran": "ran"}


def failures(matrix: Matrix, found: Found) -> list[str]:
    """Of one cell, a line each: squares that FAILED on a gate card, verdicts of the layers that run
    something, and what could not be tried."""
    gates = {card.name for card in matrix.card if card.kind == "gate"}
    broken = [one for one in squares([found], {}) if one.status == "FAILED" and one.card in gates]
    return [*(f"{one.op} {one.card} triton {one.triton}: {reason}" for one in broken for reason in one.why),
            *(f"{one.layer}: {one.name}: {one.detail}" for one in found.result.verdicts if not one.ok),
            *(f"{card} triton {found.result.cell.triton}: {why}"
              for card, why in found.untried.items() if card in gates)]


def write(matrix: Matrix, every: list[Found], results: Path, table: Path, html: Path,
          check: bool = False) -> int:
    """Write SUPPORT.md, the launch table and the page; with check only compare the first two. 1 if they were
    not what they should be."""
    squared = squares(every, gpu_records(results))
    texts = {table: support_table(matrix, every, squared, results), PROVEN: launch_table(every, results)}
    if check:
        old = [path.name
               for path, text in texts.items() if not path.exists()
               or path.read_text(encoding="utf-8") != text]
        print(f"stale: {', '.join(old)}; run python -m matrix report" if old else "current")
        return 1 if old else 0
    html.parent.mkdir(parents=True, exist_ok=True)
    texts[html] = page(matrix, squared, max((found.result.date for found in every), default=""))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


def stale(every: list[Found], results: Path, table: Path, proven: Path = PROVEN) -> list[str]:
    """What SUPPORT.md and the launch table say otherwise than ``every`` does, which may be planned for some
    of the cards only; a line each."""
    text = table.read_text(encoding="utf-8")
    said, wrong = _said(text), list[str]()
    for one in squares(every, gpu_records(results)):
        mark = said.get((one.op, one.triton, one.card))
        wrong += [] if mark == MARKS[one.status] else [
            f"{one.op} {one.triton} {one.card}: {mark}, now {MARKS[one.status]}"]
        wrong += [f"reason: {reason}"
                  for reason in map(_reason, one.why)
                  if f"| {_cell(reason)} | {MARKS[one.status]} |" not in text]
    wrong += [line for line in (*seeds.table(), *peers.table(results)) if line not in text]
    planned = {(found.result.cell.triton, outcome.card) for found in every
               for outcome in found.planned.outcomes}
    now, then = (_facts(levels, planned)
                 for levels in (json.loads(launch_table(every, results)),
                                json.loads(proven.read_text(encoding="utf-8"))))
    return wrong + [f"launch table: {' '.join(fact)}" for fact in sorted(now ^ then)]


def _said(text: str) -> dict[tuple[str, str, str], str]:
    """(op, release, card) -> the mark in SUPPORT.md."""
    marks, op, cards = {}, "", list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            op, cards = line.removeprefix("## "), []
        elif cells[0] == "Triton":
            cards = [cell.partition(" ")[0] for cell in cells[1:]]
        else:
            marks.update({(op, cells[0], card): mark for card, mark in zip(cards, cells[1:], strict=False)})
    return marks


def _facts(table: Table, planned: set[tuple[str, str]]) -> set[tuple[str, str, str, str]]:
    """(configuration, release, level, card); what compiles only where it is planned, since only there it is
    known of all uses."""
    return {(config, triton, level, card) for config, releases in table.items()
            for triton, levels in releases.items()
            for level, cards in levels.items()
            for card in cards if level != "compiled" or (triton, card) in planned}


def launch_table(every: Iterable[Found], folder: Path) -> str:
    """JSON: configuration -> release -> ``compiled``, ``failed`` and ``ran``, each the cards of which it is
    known. compiled: every launch that the matrix plans with that configuration; failed: at least one; ran: on
    a GPU, in cases that were all right."""
    table: Table = {}

    def enter(config: str, triton: str, level: str, card: str) -> None:
        levels = table.setdefault(config, {}).setdefault(triton, {})
        levels[level] = sorted({*levels.get(level, ()), card})
    for found in every:
        triton, by_place = found.result.cell.triton, dict[tuple[str, str], list[bool]]()
        for launch, card in sorted(found.planned.started):
            holds = found.verdict(launch, card) is not None and not found.why(launch, card)
            by_place.setdefault((found.planned.launches[launch].config, card), []).append(holds)
        for (config, card), verdicts in by_place.items():
            if all(verdicts):
                enter(config, triton, "compiled", card)
        # planned or not: what has failed is planned otherwise from then on
        for tried in found.result.launches.values():
            for card, verdict in tried.cards.items():
                if verdict.refused and card.startswith("sm"):
                    enter(tried.config, triton, "failed", card)
    for path in sorted(folder.glob("gpu-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for config, source in record.get("configs", {}).items():
            if is_current(source, config.partition(" ")[0]):
                enter(config, record["triton"], "ran", "sm{}{}".format(*record["capability"]))
    lines = [f" {json.dumps(config)}: {json.dumps(releases, sort_keys=True)}"
             for config, releases in sorted(table.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"  # a line each, so that a change is a change of lines


def support_table(matrix: Matrix, every: list[Found], squared: list[Square], folder: Path) -> str:
    at = {(one.op, one.triton, one.card): one for one in squared}
    ops = sorted({one.op for one in squared})
    lines = ["# What runs where", "",
             "Made by `python -m matrix report` out of `matrix/results/`. It writes the same as a page to "
             "click through, "
             "with every reason: `build/support.html`.", "", "| | means |", "|---|---|"]
    lines += [f"| {MARKS[status]} | {MEANS[status]} |" for status in reversed(STATUSES)]
    lines += ["", "## All ops", "", "The worst of all ops in each square.", ""]
    places = [(cell.triton, card.name) for cell in matrix.tritons for card in matrix.card]
    lines += _grid(matrix, {place: _worst([at.get((op, *place)) for op in ops]) for place in places})
    for op in ops:
        lines += ["", f"## {op}", "",
                  *_grid(matrix, {place: _worst([at.get((op, *place))]) for place in places})]
    lines += ["", "## The failures it began with", "", *seeds.table(), *peers.table(folder)]
    lines += ["", "## Why", "", "Reasons behind everything that is not compiled or ran, most frequent first."]
    reasons = Counter((_reason(why), one.status) for one in squared for why in one.why)
    lines += ["", "| reason | status | calls |", "|---|---|---|"]
    lines += [f"| {_cell(reason)} | {MARKS[status]} | {count} |"
              for (reason, status), count in reasons.most_common()]
    lines += ["", "## The runs", "",
              "| cell | kind | date | kernels x cards compiled | failed | refused, so planned otherwise | "
              "interpreter, or "
              "torch path | seconds |", "|---|---|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(_ran(found)) + " |" for found in every]
    return "\n".join(lines) + "\n"


def _ran(found: Found) -> list[str]:
    """A row of "The runs"."""
    result, planned = found.result, found.planned.started
    verdicts = [one for one in result.verdicts if one.layer in ("interpret", "torch")]
    right = f"{sum(one.ok for one in verdicts)} of {len(verdicts)} right" if verdicts else "not run"
    tried = [place for place in planned if found.verdict(*place)]
    failed = sum(bool(found.why(*place)) for place in tried)
    refused = sum(verdict.refused for launch, one in result.launches.items()
                  for card, verdict in one.cards.items()
                  if (launch, card) not in planned and card.startswith("sm"))
    seconds = ", ".join(f"{layer} {took:.0f}" for layer, took in sorted(result.layers.items()))
    compiled = f"{len(tried)} of {len(planned)}"
    return [result.cell.name, result.cell.kind, result.date or "not run", compiled, str(failed), str(refused),
            right, seconds]


def _reason(why: str) -> str:
    """Of ``call: reason: details``."""
    return why.partition(": ")[2].partition(":")[0]


def _worst(found: list[Square | None]) -> Status:
    return min((one.status if one else "not run" for one in found), key=STATUSES.index, default="not run")


def _grid(matrix: Matrix, status: dict[tuple[str, str], Status]) -> list[str]:
    head = "| Triton | " + " | ".join(f"{card.name} ({card.example})" for card in matrix.card) + " |"
    rows = [f"| {cell.triton} | " + " | ".join(MARKS[status[cell.triton, card.name]]
                                               for card in matrix.card) + " |" for cell in matrix.tritons]
    return [head, "|---" * (len(matrix.card) + 1) + "|", *rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
