"""Tables in markdown and plots in SVG of the recorded benchmarks, for the README.

``python -m tests.test_readme --write`` inserts them.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from matrix import markdown

RESULTS = Path(__file__).parent / "results"
PLOT = Path(__file__).parents[1] / "docs" / "speed.svg"
CURVES = PLOT.with_name("training.svg")
PLOTTED = ("4x4096x32x128", "1x32768x8x128", "8x2048x80x64", "8x2048x4096x16")
NONE = "-"
Record = dict[str, Any]


def records(folder: Path = RESULTS) -> list[Record]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("speed-*.json"))]


class Pair(NamedTuple):
    """One row of a record, seen as a comparison of flashlin with one other package.

    row: the row.
    other: name of the package.
    """
    row: dict[str, Any]
    other: str

    @property
    def name(self) -> str:
        return str(self.row["op"]) + (", channels last" if "channels_last" in self.row["arguments"] else "")

    def figures(self, what: str, side: str) -> dict[str, Any]:
        """Return the metrics of a side for ``forward`` or ``both``; {} if it has none."""
        found = self.row.get(what, {}).get(side, {})
        return {} if "failed" in found else dict(found)

    def ratio(self, what: str) -> float | None:
        """Return the GPU time of flashlin divided by the other's; None if either is missing."""
        ours, theirs = (self.figures(what, side) for side in ("flashlin", self.other))
        if not ours or not theirs:
            return None
        return _card(ours) / _card(theirs)


def pairs(record: Record) -> list[Pair]:
    """Return a Pair for each row and each other package that ran anywhere in the record.

    A row has at least one pair.
    """
    every = [[Pair(row, other) for other in row["forward"] if other not in ("flashlin", "floor_ms")]
             for row in record["rows"]]
    ran = {pair.other for beside in every for pair in beside if pair.figures("forward", pair.other)}
    return [pair for beside in every
            for pair in [one for one in beside if one.other in ran] or beside[:1]]


def over_ranks(folder: Path = RESULTS) -> str:
    """Return one table per record of benchmarks/context.py.

    It compares one GPU that has the whole sequence with several GPUs that divide it.
    """
    lines: list[str] = []
    for path in sorted(folder.glob("context-*.json")):
        of = json.loads(path.read_text(encoding="utf-8"))
        ranks = path.name.split("-")[1]
        ways = {"one device": "one GPU", "tokens": f"{ranks} GPUs, states", "heads": f"{ranks} GPUs, all-to-all"}
        columns = ("op", *(f"{words}: {what}" for words in ways.values()
                           for what in ("forward, ms", "with backward, ms", "peak, MiB")))
        lines += [f"{of['tokens']:,} tokens, {of['heads']} heads of {of['head_dim']}, {of['dtype']}; "
                  f"{ranks} x {of['device']}, Triton {of['triton']}, torch {of['torch']}, {of['date']}:", "",
                  *markdown.table(columns, [
                      (f"`{op}`", *(cell for way in ways for cell in _of_ranks(row.get(way))))
                      for op, row in of["rows"].items()]), ""]
    return "\n".join(lines).rstrip()


def _of_ranks(figures: Record | None) -> tuple[str, ...]:
    if figures is None:
        return (NONE,) * 3
    both = figures["both"]
    return *(one["failed"] if "failed" in one else f"{one['ms']:.1f}" for one in (figures["forward"], both)), (
        NONE if "failed" in both else f"{both['peak_mib']:,}")


def of_invariance(folder: Path = RESULTS) -> str:
    """Return one table for each record of benchmarks/invariant.py."""
    lines: list[str] = []
    for path in sorted(folder.glob("invariant-*.json")):
        of = json.loads(path.read_text(encoding="utf-8"))
        shapes = list(dict.fromkeys(row["shape"] for row in of["rows"]))
        ways = {(row["op"], row["shape"]): row for row in of["rows"]}
        columns = ("op", *(f"{shape}: {words}" for shape in shapes for words in NAMES.values()))
        lines += ["Milliseconds of GPU time, bfloat16, B x T x H x D: by default -> with `invariant=True`; "
                  f"{of['device']}, Triton {of['triton']}, torch {of['torch']}, {of['date']}:", "",
                  *markdown.table(columns, [
                      (f"`{op}`", *(_changed(ways.get((op, shape), {}).get(what))
                                    for shape in shapes for what in NAMES))
                      for op in dict.fromkeys(row["op"] for row in of["rows"])]), ""]
    return "\n".join(lines).rstrip()


def _changed(figures: Record | None) -> str:
    if figures is None:
        return NONE
    return " -> ".join(one if isinstance(one, str) else f"{one:.3g}" for one in figures.values())


COLUMNS = ("op", "B x T x H x D", "compared with", "forward, ms", "ratio", "% of floor", "host",
           "with backward, ms", "ratio", "% of floor", "host", "memory, MB")


ABOUT = (
    "bfloat16. A pair of numbers is flashlin / the other package. Both run in one process and take turns. "
    "Times are medians of GPU time, measured by replay of a CUDA graph. °: the call cannot be captured, so "
    "it is timed by events around calls in a full queue, or by wall time if that is less. Ratio: flashlin's "
    "time divided by the other's; lower is better. % of floor: time of a copy of the bytes that the call "
    "must read and write, divided by flashlin's time. It exceeds 100 % if kernels copy faster than the "
    "driver, whose copy is the reference, or if inputs are in the GPU's cache. Host: time of Python for a "
    "call, in launches of a kernel with eight tensors in the same run. Memory: peak above the memory in use "
    "before the call, with backward if the op has one. -: it fails, has no backward, or its host waits for "
    "the GPU. *: fla refuses this backward here, so its refusal was switched off.")


def table(found: Sequence[Record]) -> str:
    """Return a table for each GPU and Triton release; ``""`` without records."""
    lines: list[str] = []
    for made_by, together in _by_machine(found):
        lines += [f"{made_by}:", "",
                  *markdown.table(COLUMNS, [_cells(pair) for one in together for pair in pairs(one)]), ""]
        waits = [wait for one in together for wait in one["first"]]
        if waits:
            lines += [*markdown.table(FIRST, map(_first, waits)), ""]
    if lines:
        lines.append(ABOUT)
    return "\n".join(lines)


FIRST = ("first result of a process, s", "caches empty", "with backward", "caches full", "with backward")


def _first(wait: dict[str, Any]) -> list[str]:
    seconds = [wait[caches].get(what) for caches in ("empty", "full") for what in ("forward", "both")]
    return [f"`{wait['op']}`", *(f"{one:.1f}" if isinstance(one, float) else NONE for one in seconds)]


def _by_machine(found: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    """Return the records by machine and versions, those with the most rows first."""
    machines: dict[str, list[Record]] = {}
    for one in found:
        versions = [f"{name} {one[name if name in one else name.lower()]}"
                    for name in ("Triton", "torch", "fla", "mamba_ssm", "FlashQLA")]
        made_by = ", ".join([one["device"], *versions])
        machines.setdefault(made_by, []).append(one)
    return sorted(machines.items(), key=lambda machine: -sum(len(one["rows"]) for one in machine[1]))


def _cells(pair: Pair) -> list[str]:
    cells = [f"`{pair.row['op']}`{pair.name.removeprefix(pair.row['op'])}", pair.row["shape"], pair.other]
    for what in ("forward", "both"):
        ratio, ours = pair.ratio(what), pair.figures(what, "flashlin")
        shown = what == "both" and pair.other == "fla" and pair.row["refused"] and ratio is not None
        cells += [_beside(pair, what, _time) + "*" * shown, NONE if ratio is None else f"{ratio:.2f}",
                  f"{ours['share']:.0%}" if ours else NONE, _beside(pair, what, _host)]
    return [*cells, _beside(pair, "both" if "both" in pair.row else "forward", _memory)]


def _beside(pair: Pair, what: str, tell: Callable[[dict[str, Any]], str]) -> str:
    told = [tell(pair.figures(what, side)) for side in ("flashlin", pair.other)]
    return NONE if told == [NONE, NONE] else " / ".join(told)


def _card(figures: dict[str, Any]) -> float:
    """Return milliseconds of GPU time.

    A time between events can be too long: if a call waits for the GPU, the GPU then idles until the host
    continues. The wall time is another upper bound of the GPU time, so the smaller of the two counts.
    """
    device, wall = (float(figures[clock]["median"]) for clock in ("device_ms", "wall_ms"))
    return device if figures["how"] == "graph" else min(device, wall)


def _time(figures: dict[str, Any]) -> str:
    return NONE if not figures else f"{_card(figures):.3g}" + ("" if figures["how"] == "graph" else "°")


def _host(figures: dict[str, Any]) -> str:
    return f"{figures['launches']['median']:.1f}" if "launches" in figures else NONE


def _memory(figures: dict[str, Any]) -> str:
    return f"{figures['peak_mb']:.0f}" if "peak_mb" in figures else NONE


# Sizes in pixels. UNIT: width of the other package's time. LETTER: width of a wide letter.
UNIT, HIGH, GAP, TOP, LETTER = 300, 11, 10, 56, 6
# for light pages and for dark pages
FILLS = {"forward": ("#3b76af", "#6aa5dd"), "both": ("#d1812f", "#e09b52")}
NAMES = {"forward": "forward", "both": "with backward"}
STYLE = "\n".join([
    "<style>", *(f"{around}.back {{ fill: {back} }} text {{ fill: {fore} }} .theirs {{ stroke: #777 }} "
                 + " ".join(f".{what} {{ fill: {fills[dark]} }}" for what, fills in FILLS.items()) + close
                 for dark, (around, back, fore, close) in enumerate(
                     [("", "#fff", "#1b1f24", ""),
                      ("@media (prefers-color-scheme: dark) { ", "#14171b", "#e4e8ec", " }")])), "</style>"])


def plot(found: Sequence[Record]) -> str:
    """Return a bar chart of the ratios in these records; ``""`` without records."""
    chosen = [(one, pair) for one in found for pair in pairs(one)
              if pair.row["shape"] in PLOTTED and pair.ratio("forward") is not None]
    cards, releases = (list(dict.fromkeys(one[name] for one, _ in chosen)) for name in ("device", "triton"))
    rows = [(f"{pair.name}, {pair.row['shape']}, vs {pair.other}"
             + f", Triton {one['triton']}" * (len(releases) > 1) + f", {one['device']}" * (len(cards) > 1),
             {what: ratio for what in FILLS if (ratio := pair.ratio(what)) is not None})
            for one, pair in chosen]
    return bars(rows, ", ".join(cards))


def bars(rows: Sequence[tuple[str, dict[str, float]]], device: str) -> str:
    """Return a bar chart in SVG, for light and dark pages; ``""`` without rows.

    A bar is flashlin's time divided by the other package's. A dashed line marks 1, the other's time.

    rows: (label, {``forward``, ``both``: the ratio}).
    """
    if not rows:
        return ""
    left, y, body = LETTER * max(len(label) for label, _ in rows), TOP, list[str]()
    for label, ratios in rows:
        body.append(_text(left - 8, y + HIGH * len(ratios) / 2 + 4, label, anchor="end"))
        for what, ratio in ratios.items():
            # a longer bar would leave the picture; its number still shows the ratio
            width = min(ratio, 2) * UNIT
            body += [f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{HIGH}" class="{what}"/>',
                     _text(left + width + 4, y + HIGH - 2, f"{ratio:.2f}")]
            y += HIGH
        y += GAP
    keys = [f'<rect x="{left + 150 * at}" y="26" width="11" height="11" class="{what}"/>'
            + _text(left + 150 * at + 16, 36, NAMES[what]) for at, what in enumerate(FILLS)]
    line = (f'<line x1="{left + UNIT}" y1="{TOP - 8}" x2="{left + UNIT}" y2="{y}" class="theirs" '
            'stroke-dasharray="3 3"/>' + _text(left + UNIT + 4, TOP - 6, "theirs"))
    title = _text(left, 16, f"flashlin's time over theirs, {device}", size=13)
    return _svg(left + 2 * UNIT + 50, y + 8, [title, *keys, line, *body])


SMOOTH, WIDE, HIGH_UP = 20, 640, 300  # steps of a running mean; pixels of the plot
WAYS = {"float32": ("#777", "float32, flashlin"), "fla": ("#d1812f", "bf16, fla"),
        "flashlin": ("#3b76af", "bf16, flashlin")}


def curves(folder: Path = RESULTS) -> str:
    """Return the loss curves of the newest record of benchmarks/training.py, in SVG; ``""`` without any."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("training-*.json"))]
    if not found:
        return ""
    of = max(found, key=lambda one: str(one["date"]))
    means = {way: [fmean(losses[max(at - SMOOTH + 1, 0):at + 1]) for at in range(len(losses))]
             for way, losses in of["losses"].items()}
    low, high = (of_all(of_all(one) for one in means.values()) for of_all in (min, max))
    left, body = 50, list[str]()

    def y_of(loss: float) -> float:
        return TOP + HIGH_UP * (high - loss) / (high - low or 1)
    for part in range(5):
        loss, step = low + part * (high - low) / 4, part * of["steps"] // 4
        body += [_text(left - 6, y_of(loss) + 4, f"{loss:.2f}", anchor="end"),
                 _text(left + WIDE * part / 4, TOP + HIGH_UP + 18, str(step), anchor="middle")]
    for at, (way, (colour, name)) in enumerate((way, told) for way, told in WAYS.items() if way in means):
        points = " ".join(f"{left + WIDE * step / max(of['steps'] - 1, 1):.1f},{y_of(loss):.1f}"
                          for step, loss in [*enumerate(means[way])][::5])
        width = 5 - 1.5 * at  # the curves overlap, so the first one is the widest
        body += [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>',
                 f'<rect x="{left + 210 * at}" y="26" width="11" height="11" fill="{colour}"/>',
                 _text(left + 210 * at + 16, 36, f"{name}: {means[way][-1]:.3f} at the end")]
    title = (f"loss of a small Gated DeltaNet, mean of {SMOOTH} steps; {of['device']}, Triton {of['triton']}, "
             f"fla {of['fla']}" + (", its refusal switched off" if of["refused"] else ""))
    return _svg(left + WIDE + 20, TOP + HIGH_UP + 30, [_text(left, 16, title), *body])


def _svg(wide: float, high: float, body: Sequence[str]) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="11">', STYLE, f'<rect width="{wide}" height="{high}" class="back"/>',
        *body, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
