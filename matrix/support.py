"""Write SUPPORT.md, its picture, the HTML page and the launch table from the results of the matrix."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from flashlin.guards.launch_table import PROVEN, Table, read
from flashlin.testing.record import is_current
from matrix import markdown, seeds, spilling
from matrix import peer_table as peers
from matrix.page import page
from matrix.picture import picture
from matrix.results import Matrix, compact, slow_by_config, together
from matrix.stacks import documents
from matrix.stacks import table as programs
from matrix.status import MEANS, STATUSES, CellState, Square, Status, gpu_files, gpu_records, squares

Fact = tuple[str, str, str, str]  # configuration, release, level, GPU
Grid = dict[tuple[str, str], str]  # (release, GPU) -> text of the entry
OPS = "Ops: "
PICTURE = "docs/support.svg"
MARKS: dict[Status, str] = {"FAILED": "**FAILED**", "refused": "refused", "not run": "not run",
                            "torch path": "torch", "compiled only": "compiled only", "slow": "compiled, slow",
                            "worked around": "around", "compiled": "compiled", "ran": "ran"}


def failures(matrix: Matrix, state: CellState) -> list[str]:
    """Return the failures of a cell, one line each.

    These are ops with status FAILED on a gate GPU, failed checks of the other layers, and launches for a gate
    GPU that could not be tried.
    """
    gates = {card.name for card in matrix.card if card.kind == "gate"}
    broken = [one for one in squares([state], {}) if one.status == "FAILED" and one.card in gates]
    return [*(f"{one.op} {one.card} triton {one.triton}: {reason}" for one in broken for reason in one.why),
            *(f"{one.layer}: {one.name}: {one.detail}" for one in state.result.verdicts if not one.ok),
            *(f"{card} triton {state.result.cell.triton}: {why}"
              for card, why in state.untried.items() if card in gates)]


def write(matrix: Matrix, every: list[CellState], results: Path, table: Path, html: Path,
          check: bool = False) -> int:
    """Write SUPPORT.md, its picture, the launch table and the HTML page, and return 0.

    With `check`, write nothing. Compare all files except the page, and return 1 if one of them is stale.
    """
    squared = squares(every, gpu_records(results))
    texts = {table: support_table(matrix, every, squared, results), PROVEN: launch_table(every, results)}
    texts[table.parent / PICTURE] = picture(marks_of(texts[table]), examples(matrix))
    if check:
        old = [path.name
               for path, text in texts.items() if not path.exists()
               or path.read_text(encoding="utf-8") != text]
        print(f"stale: {', '.join(old)}; run python -m matrix report" if old else "current")
        return 1 if old else 0
    html.parent.mkdir(parents=True, exist_ok=True)
    texts[html] = page(matrix, squared, max((state.result.date for state in every), default=""))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


def examples(matrix: Matrix) -> dict[str, str]:
    return {card.name: card.example for card in matrix.card}


def stale(every: list[CellState], results: Path, table: Path, launches: Path = PROVEN) -> list[str]:
    """Return the differences of SUPPORT.md and the launch table from the given cells, one line each.

    The cells in `every` may be planned for some of the GPUs only.
    """
    text = table.read_text(encoding="utf-8")
    said, wrong = marks_of(text), list[str]()
    for one in squares(every, gpu_records(results)):
        mark = said.get((one.op, one.triton, one.card))
        wrong += [] if mark == MARKS[one.status] else [
            f"{one.op} {one.triton} {one.card}: {mark}, now {MARKS[one.status]}"]
        wrong += [f"reason: {reason}"
                  for reason in map(_reason, one.why)
                  if markdown.line(reason, MARKS[one.status]) not in text]
    wrong += [line for line in (*seeds.table(), *peers.table(results), *programs.table(results),
                                *documents.table(results), *programs.on_gpus(results),
                                *programs.seeds(results), *spilling.lines(every)) if line not in text]
    planned = {(state.result.cell.triton, outcome.card) for state in every
               for outcome in state.planned.outcomes}
    shipped = read(launches)
    then = {(config, triton, level, card) for config, releases in shipped.items()
            for triton, levels in releases.items() for level in set(levels) - {"slow"}
            for card in levels[level].split()}
    for state in every:
        triton, now = state.result.cell.triton, slow_by_config(state.result)
        if not state.planned.outcomes:  # This cell shares the launches of another cell.
            continue
        was = {config: releases[triton]["slow"] for config, releases in shipped.items()
               if "slow" in releases.get(triton, ())}
        wrong += [f"launch table: {config} {triton} slow: {was.get(config)}, now {now.get(config)}"
                  for config in sorted(was.keys() | now.keys()) if was.get(config) != now.get(config)]
    # Compare the level "compiled" only for planned GPUs, because it needs the result of every use.
    return wrong + [f"launch table: {' '.join(fact)}" for fact in sorted(launch_facts(every, results) ^ then)
                    if fact[2] != "compiled" or (fact[1], fact[3]) in planned]


def marks_of(text: str) -> dict[tuple[str, str, str], str]:
    """Return (op, release, GPU) -> the mark in the text of SUPPORT.md."""
    marks, ops, cards = {}, list[str](), list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            ops, cards = [], []
        elif line.startswith(OPS):
            ops = re.findall(r"`(\w+)`", line)
        elif cells[0] == "Triton":
            cards = [cell.partition(" ")[0] for cell in cells[1:]]
        elif cells[0][:1].isdigit():
            marks.update({(op, cells[0], card): mark
                          for op in ops for card, mark in zip(cards, cells[1:], strict=False)})
    return marks


def launch_facts(every: Iterable[CellState], folder: Path) -> set[Fact]:
    """Return the known facts of all configurations.

    compiled: every launch that the matrix plans with the configuration compiles.
    failed: at least one launch with the configuration fails to compile.
    ran: the configuration has run on a GPU, and all its cases were correct.
    """
    facts: set[Fact] = set()
    for state in every:
        triton, holds = state.result.cell.triton, dict[tuple[str, str], bool]()
        for launch, card in state.planned.started:
            place = state.planned.places[launch, card].config, card
            holds[place] = (holds.get(place, True) and state.verdict(launch, card) is not None
                            and not state.why(launch, card))
        facts |= {(config, triton, "compiled", card) for (config, card), good in holds.items() if good}
        # Include launches that are not planned, because planning avoids a launch after its first failure.
        facts |= {(tried.config, triton, "failed", card) for tried in state.result.launches.values()
                  for card, verdict in tried.cards.items() if verdict.refused and card.startswith("sm")}
    for _, card, record in gpu_files(folder):
        facts |= {(config, record["triton"], "ran", card)
                  for config, source in record.get("configs", {}).items()
                  if is_current(source, config.partition(" ")[0])}
    return facts


def launch_table(every: Iterable[CellState], folder: Path) -> str:
    """Return the launch table as JSON, in the form that ``guards.launch_table`` reads.

    It maps each configuration to its releases. A release has the keys ``compiled``, ``failed`` and ``ran``,
    each with GPU names separated by spaces. Its key ``slow`` maps a GPU to the fields of
    ``launch_table.Slow``.
    """
    every, table = list(every), Table()
    for config, triton, level, card in sorted(launch_facts(every, folder)):
        levels = table.setdefault(config, {}).setdefault(triton, {})
        levels[level] = f"{levels[level]} {card}" if level in levels else card
    for state in every:
        for config, cards in slow_by_config(state.result).items():
            table.setdefault(config, {}).setdefault(state.result.cell.triton, {})["slow"] = cards
    return "{\n" + ",\n".join(f"{compact(config)}:{compact(together(table[config]))}"
                              for config in sorted(table)) + "\n}\n"  # separate lines give short diffs


def support_table(matrix: Matrix, every: list[CellState], squared: list[Square], folder: Path) -> str:
    places = [(cell.triton, card.name) for cell in matrix.tritons for card in matrix.card]
    grids = {op: dict.fromkeys(places, MARKS["not run"]) for op in sorted({one.op for one in squared})}
    for one in squared:
        grids[one.op][one.triton, one.card] = MARKS[one.status]
    lines = ["# What runs where", "",
             "`python -m matrix report` makes this page from the records in `matrix/results/`. It also "
             "writes an interactive page with every reason: `build/support.html`.", "",
             f"![how many ops run where, and how]({PICTURE})", "",
             "The first tables show the failures that flashlin was first written to prevent, and "
             "compare flashlin with fla, mamba_ssm and real programs. Next come [all ops](#all-ops) on "
             "every GPU under every Triton release, and the [reasons](#why).", "",
             "## The failures it began with", "", *seeds.table(), *peers.table(folder),
             *programs.table(folder), *documents.table(folder), *programs.on_gpus(folder),
             *programs.seeds(folder),
             "", "## What the words mean", "",
             *markdown.table(("", "means"), [(MARKS[one], MEANS[one]) for one in reversed(STATUSES)]), "",
             "A *gate* is a GPU or a release on which a failure fails the run. On a *report*, failures are "
             "only reported.", "", "## All ops", "", "The number of ops with each status, best first.", "",
             *_grid(matrix, {place: _counted(grid[place] for grid in grids.values()) for place in places})]
    for ops in _alike(grids):
        others = f" and {len(ops) - 1} more" if len(ops) > 1 else ""
        lines += ["", f"## {ops[0]}{others}", "", OPS + ", ".join(f"`{op}`" for op in ops), "",
                  *_grid(matrix, grids[ops[0]])]
    lines += ["", *spilling.table(every)]
    lines += ["", "## Why", "", "Reasons for each status except *compiled* and *ran*, most frequent first."]
    reasons = Counter((_reason(why), one.status) for one in squared for why in one.why)
    lines += ["", *markdown.table(("reason", "status", "calls"), [
        (reason, MARKS[status], str(count)) for (reason, status), count in reasons.most_common()])]
    lines += ["", "## The runs", "", *markdown.table(
        ("cell", "kind", "date", "(kernel, GPU) pairs compiled", "failed", "failures that plans avoid",
         "cases in the interpreter or on the torch path", "seconds"), map(_ran, every))]
    return "\n".join(lines) + "\n"


def _ran(state: CellState) -> list[str]:
    """Return the row of a cell in the table "The runs"."""
    result, planned = state.result, state.planned.started
    verdicts = [one for one in result.verdicts if one.layer in ("interpret", "torch")]
    right = f"{sum(one.ok for one in verdicts)} of {len(verdicts)} right" if verdicts else "not run"
    tried = [place for place in planned if state.verdict(*place)]
    failed = sum(bool(state.why(*place)) for place in tried)
    refused = sum(verdict.refused for launch, one in result.launches.items()
                  for card, verdict in one.cards.items()
                  if (launch, card) not in planned and card.startswith("sm"))
    seconds = ", ".join(f"{layer} {took:.0f}" for layer, took in sorted(result.layers.items()))
    compiled = f"{len(tried)} of {len(planned)}"
    return [result.cell.name, result.cell.kind, result.date or "not run", compiled, str(failed), str(refused),
            right, seconds]


def _reason(why: str) -> str:
    """Return the reason from a text of the form ``call: reason: details``."""
    return why.partition(": ")[2].partition(":")[0]


def _counted(marks: Iterable[str]) -> str:
    """Return the counts of the marks, best status first, such as ``57 ran, 9 compiled``."""
    counts = Counter(marks)
    return ", ".join(f"{counts[MARKS[one]]} {MARKS[one]}" for one in reversed(STATUSES) if counts[MARKS[one]])


def _alike(grids: dict[str, Grid]) -> list[list[str]]:
    """Return groups of ops with identical grids, largest group first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for op, grid in grids.items():
        groups.setdefault(tuple(grid.values()), []).append(op)
    return sorted(groups.values(), key=lambda ops: (-len(ops), ops))


def _grid(matrix: Matrix, texts: Grid) -> list[str]:
    return markdown.table(("Triton", *(f"{card.name} ({card.example})" for card in matrix.card)), [
        (cell.triton, *(texts[cell.triton, card.name] or MARKS["not run"] for card in matrix.card))
        for cell in matrix.tritons])
