"""Tables in markdown and plots in SVG of the recorded benchmarks, for docs/benchmarks.

``python -m tools.documents`` writes them. benchmarks/compare.py, context.py, invariant.py and training.py
make the records.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matrix import markdown
from tools import svg

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
PLOT, CURVES = DOCS / "speed.svg", DOCS / "training.svg"
# Of the plain calls, the overview shows these shapes.
MAIN = ("4x4096x32x128", "1x32768x8x128", "8x2048x80x64", "8x2048x32x64", "8x2048x4096x16")
OURS, FLA, TRITON, NONE = "flashlin", "fla", "fla (Triton)", "-"
PASSES = {"forward": "forward", "both": "with backward"}
Record = dict[str, Any]


def records(folder: Path = RESULTS) -> list[Record]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("speed-*.json"))]


class Row(NamedTuple):
    """One measured call of a record.

    record: the record: card, versions, date.
    row: the call, with the figures of each package for ``forward`` and ``both``.
    """
    record: Record
    row: dict[str, Any]

    @property
    def name(self) -> str:
        layout = ", channels last" if "channels_last" in self.row["arguments"] else ""
        layer = f", {self.row['layer']}" if self.row.get("layer") else ""
        gates = ", fast decay" if layer and " g " in self.row["arguments"] else ""
        return f"`{self.row['op']}`{layout}{layer}{gates}"

    @property
    def peers(self) -> list[str]:
        return [name for name in self.row["forward"] if name not in (OURS, "floor_ms")]

    def figures(self, what: str, side: str) -> dict[str, Any]:
        """Return the figures of a package for ``forward`` or ``both``; {} if it has none."""
        found = self.row.get(what, {}).get(side, {})
        return {} if "failed" in found else dict(found)

    def best(self, what: str) -> str | None:
        """Return the fastest other package, or None if no other package ran this call."""
        ran = [side for side in self.peers if self.figures(what, side)]
        return min(ran, key=lambda side: milliseconds(self.figures(what, side)), default=None)

    def ratio(self, what: str) -> float | None:
        """Return flashlin's GPU time divided by that of the best peer; None if either is missing."""
        best, ours = self.best(what), self.figures(what, OURS)
        return milliseconds(ours) / milliseconds(self.figures(what, best)) if best and ours else None

    @property
    def slower(self) -> bool:
        """True if a peer is faster, or ran a call that failed in flashlin."""
        return any((self.ratio(what) or 0) > 1 or (self.best(what) and not self.figures(what, OURS))
                   for what in PASSES)


def milliseconds(figures: dict[str, Any]) -> float:
    """Return milliseconds of GPU time.

    Between events the GPU may have waited for a host that waits for it. So the wall time is also an upper
    bound.
    """
    device, wall = (float(figures[clock]["median"]) for clock in ("device_ms", "wall_ms"))
    return device if figures["how"] == "graph" else min(device, wall)


def machines(found: Sequence[Record]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows by (card, Triton release). The card with the most rows is first."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for one in found:
        rows.setdefault((one["device"], one["triton"]), []).extend(Row(one, row) for row in one["rows"])
    size = {card: max(len(rows[key]) for key in rows if key[0] == card) for card, _ in rows}
    return dict(sorted(rows.items(), key=lambda item: (-size[item[0][0]], item[0][0], -len(item[1]))))


def overview(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the overview, with the largest ratio first.

    They are the calls with a layer's options. For an op without such a row, they are its plain calls with a
    backward at the shapes of MAIN. Plain calls in which a peer is faster are always shown.
    """
    layers = {row.row["op"] for row in rows if row.row.get("layer")}
    chosen = [row for row in rows if row.row.get("layer") or row.slower or (
        row.row["op"] not in layers and row.row["shape"] in MAIN and "both" in row.row
        and row.best("forward"))]
    return sorted(chosen, key=lambda row: -max(row.ratio(what) or 0 for what in PASSES))


COLUMNS = ("op, and the layer whose call it is", "B x T x H x D", "forward, ms", "best peer", "ratio",
           "with backward, ms", "best peer", "ratio", "memory, MB")


def compared(rows: Sequence[Row]) -> list[str]:
    """Return a table that compares each row with its best peer."""
    return markdown.table(COLUMNS, [[
        row.name, row.row["shape"],
        *(cell for what in PASSES for cell in _beside_best(row, what)), _memory_of_both(row)]
        for row in rows])


def _beside_best(row: Row, what: str) -> list[str]:
    best, ratio = row.best(what), row.ratio(what)
    refused = what == "both" and best == TRITON and row.row.get("refused")
    theirs = f"{best} {_time(row.figures(what, best))}{'†' if refused else ''}" if best else NONE
    return [_time(row.figures(what, OURS)), theirs, f"{ratio:.2f}" if ratio else NONE]


def _memory_of_both(row: Row) -> str:
    what = "both" if "both" in row.row else "forward"
    return " / ".join(_memory(row.figures(what, side)) for side in (OURS, row.best(what)) if side)


ALL = ("op, and the layer whose call it is", "B x T x H x D", "package", "forward, ms", "% of floor", "host",
       "with backward, ms", "% of floor", "host", "memory, MB", "output differs by")


def everything(rows: Sequence[Row]) -> list[str]:
    """Return a table with one line for each package that ran a row."""
    return markdown.table(ALL, [
        [row.name, row.row["shape"], side, *(cell for what in PASSES for cell in (
            _time(row.figures(what, side)), _share(row, what, side), _host(row.figures(what, side)))),
         _memory(row.figures("both" if "both" in row.row else "forward", side)),
         f"{row.figures('forward', side).get('differs', 0):.0e}" if "differs" in row.figures("forward", side)
         else NONE]
        for row in rows for side in (OURS, *row.peers) if side == OURS or row.figures("forward", side)])


def failures(rows: Sequence[Row]) -> list[str]:
    """Return one line for each reason why a package that is installed could not run a row.

    A package that fails only with backward also runs forward.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for side in (OURS, *row.peers):
            for what in PASSES:
                reason = row.row.get(what, {}).get(side, {}).get("failed", "")
                if reason and not reason.startswith(("ModuleNotFoundError", "ImportError")) and (
                        what == "forward" or row.figures("forward", side)):
                    found.setdefault((side, what, reason), []).append(f"`{row.row['op']}`")
    return [f"- {side}, {PASSES[what]}, in {len(calls)} rows ({', '.join(dict.fromkeys(calls))}): "
            f"{(reason.partition(': ')[2] or reason).partition('. ')[0]}"
            for (side, what, reason), calls in found.items()]


def _time(figures: dict[str, Any]) -> str:
    if not figures:
        return NONE
    return f"{milliseconds(figures):.3g}" + ("" if figures["how"] == "graph" else "°")


def _share(row: Row, what: str, side: str) -> str:
    figures, floor = row.figures(what, side), row.row.get(what, {}).get("floor_ms")
    return f"{100 * floor / milliseconds(figures):.0f}%" if figures and floor else NONE


def _host(figures: dict[str, Any]) -> str:
    return f"{figures['launches']['median']:.1f}" if "launches" in figures else NONE


def _memory(figures: dict[str, Any]) -> str:
    return f"{figures['peak_mb']:.0f}" if "peak_mb" in figures else NONE


def over_ranks(folder: Path = RESULTS) -> str:
    """Return one table per record of benchmarks/context.py.

    It compares one GPU that has the whole sequence with several GPUs that divide it.
    """
    lines: list[str] = []
    for path in sorted(folder.glob("context-*.json")):
        of = json.loads(path.read_text(encoding="utf-8"))
        ranks = path.name.split("-")[1]
        ways = {"one device": "one GPU", "tokens": f"{ranks} GPUs, states",
                "heads": f"{ranks} GPUs, all-to-all"}
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
        columns = ("op", *(f"{shape}: {words}" for shape in shapes for words in PASSES.values()))
        lines += ["Milliseconds of GPU time, bfloat16, B x T x H x D: by default -> with `invariant=True`; "
                  f"{of['device']}, Triton {of['triton']}, torch {of['torch']}, {of['date']}:", "",
                  *markdown.table(columns, [
                      (f"`{op}`", *(_changed(ways.get((op, shape), {}).get(what))
                                    for shape in shapes for what in PASSES))
                      for op in dict.fromkeys(row["op"] for row in of["rows"])]), ""]
    return "\n".join(lines).rstrip()


def _changed(figures: Record | None) -> str:
    if figures is None:
        return NONE
    return " -> ".join(one if isinstance(one, str) else f"{one:.3g}" for one in figures.values())


FIRST = ("first result of a process, s", "caches empty", "with backward", "caches full", "with backward")


def _first(wait: dict[str, Any]) -> list[str]:
    seconds = [wait[caches].get(what) for caches in ("empty", "full") for what in ("forward", "both")]
    return [f"`{wait['op']}`", *(f"{one:.1f}" if isinstance(one, float) else NONE for one in seconds)]


# -- pages

GENERATED = "<!-- Generated by python -m tools.documents from benchmarks/results -->"
LEGEND = """How to read the tables:

- Times are milliseconds of GPU time in bfloat16, the medians of several rounds in which the packages take
  turns in one process. A CUDA graph of the call is replayed. °: the call cannot be captured, so events
  around queued calls measure it, or the wall time if that is less.
- *ratio* is flashlin's time divided by that of the best peer. Lower is better; above 1 the peer is faster.
- The *best peer* is the fastest of all other packages that ran the call, chosen for each column:
    - *fla* is flash-linear-attention as it is installed. By default it calls FlashQLA and TileLang for some
      ops.
    - *fla (Triton)* is fla with these backends switched off. †: fla itself refuses this backward on this GPU
      with this Triton, because its gradients can be wrong there; the refusal was switched off.
    - *FlashQLA* is called directly. It has the gated delta rule with heads of 128. It takes gates that are
      ready. In the rows of *GatedDeltaNet*, flashlin's function computes them first, and its time counts.
      fla itself does not call FlashQLA with the options of *GatedDeltaNet*.
    - *cuDNN* is the Kimi Delta Attention of nvidia-cudnn-frontend. In the rows of *KimiDeltaAttention*,
      flashlin's functions compute gate, norm and sigmoid first, and their time counts. *cuDNN (own gate)*
      computes them in its kernel; it has no backward on Hopper.
    - *mamba_ssm* has the ops of Mamba, Mamba2 and Mamba-3.
- *memory* is the peak above the memory in use before the call, with backward if the op has one: flashlin /
  best peer.
- A layer or model behind an op's name means that the call has its options: *Qwen3-Next* normalizes q and k
  in the kernel; *GatedDeltaNet*, *KimiDeltaAttention* and *RWKV7Attention* are layers of fla with gates in
  the kernel; *Mamba2* passes D, dt_bias and softplus. All other calls use the default options.
- *fast decay*: an older row, in which the log decay was about -0.8 per token. Such decays help FlashQLA.
- A shape such as 1x8192x16/64x128 has 16 heads of q and k and 64 heads of v. *in 32* means 32 packed
  sequences.
"""


def pages(folder: Path = RESULTS) -> dict[str, str]:
    """Return the pages of docs/benchmarks by their file name."""
    by_machine = machines(records(folder))
    cards = list(dict.fromkeys(card for card, _ in by_machine))
    return {"index.md": _index(by_machine),
            **{page_of(card): _card_page(card, {release: rows for (of, release), rows in by_machine.items()
                                                if of == card}) for card in cards},
            "several-gpus.md": _page("Several GPUs", SEVERAL, over_ranks(folder)),
            "invariance.md": _page("The cost of batch-invariant results", INVARIANT, of_invariance(folder)),
            "training.md": _page("Training with flashlin and with fla", TRAINING,
                                 f"![loss curves](../{CURVES.name})")}


SEVERAL = """\
`benchmarks/context.py` measured one long sequence on one GPU, and split over several GPUs. *states*: each
rank scans its own tokens, and the ranks exchange states (`process_group` or `cp_context`). *all-to-all*: the
ranks exchange data, so that each has all tokens of some heads. *peak* is the memory of one GPU, with
backward."""
INVARIANT = """\
With `flashlin.settings(invariant=True)`, the bits of a row do not depend on the other rows of its batch.
`benchmarks/invariant.py` measured the cost. The first shape fills a GPU; the others leave most of it idle,
because sequences are not split into segments."""
TRAINING = """\
`benchmarks/training.py` trained a small Gated DeltaNet on the bytes of Python's standard library: with
flashlin in bfloat16, with fla in bfloat16, and with flashlin in float32. All begin with the same weights
and see the same bytes. The curves should coincide. The legend gives the mean loss of the last steps."""


def page_of(card: str) -> str:
    """Return the file name of a card's page, such as h100-80gb-hbm3.md."""
    return "-".join(card.removeprefix("NVIDIA ").lower().split()) + ".md"


def _page(title: str, about: str, body: str) -> str:
    return f"# {title}\n\n{GENERATED}\n\n{about}\n\n{body or 'No record yet.'}\n"


def _index(by_machine: dict[tuple[str, str], list[Row]]) -> str:
    about = ("flashlin's ops, compared with the fastest other package that can be installed. An op of a "
             "layer is called with the options of that layer. Other ops are called plainly, at their main "
             "shapes. The rows in which another package is faster come first.")
    lines = [f"![flashlin's time divided by that of the best peer](../{PLOT.name})", "", LEGEND]
    for (card, release), rows in by_machine.items():
        shown = overview(rows)
        if not shown:
            continue
        lines += [f"## {card}, Triton {release}", "", f"{_versions(shown)} All calls and all packages: "
                  f"[{page_of(card)}]({page_of(card)}).", ""]
        if any(TRITON in row.peers and FLA not in row.peers for row in shown):
            lines += ["In the rows with *fla (Triton)* but without *fla*, only fla's Triton kernels were "
                      "measured; with FlashQLA or TileLang, fla may be faster.", ""]
        if lacking := [row.row["shape"] for row in shown
                       if row.row.get("layer") == "GatedDeltaNet" and "FlashQLA" not in row.peers]:
            lines += [f"FlashQLA was not measured as *GatedDeltaNet* calls it at {', '.join(lacking)}.", ""]
        for words, some in (("a peer is faster", [row for row in shown if row.slower]),
                            ("flashlin is the fastest", [row for row in shown if not row.slower])):
            if some:
                lines += [f"### {card}, Triton {release}: {words}, {len(some)} of {len(shown)} rows", "",
                          *compared(some), ""]
        if found := failures(shown):
            lines += ["Failures of other packages:", "", *found, ""]
    lines += ["More: [several GPUs](several-gpus.md), [batch-invariant results](invariance.md), "
              "[training](training.md). The history of the optimizations, with predictions and results, is "
              "in `benchmarks/NOTES.md`."]
    return _page("Benchmarks", about, "\n".join(lines))


def _card_page(card: str, releases: dict[str, list[Row]]) -> str:
    about = (f"Every recorded call on an {card}, with all packages that ran it. The [overview](index.md) "
             "explains the packages and shapes.\n\n"
             "*% of floor*: time of a copy of the bytes that the call must read and write, divided by the "
             "time of the call. Higher is better. It exceeds 100 % if kernels copy faster than the driver, "
             "or if inputs are in the GPU's cache. *host*: Python time of a call, as a multiple of the time "
             "to launch one kernel with eight tensors in the same run. Lower is better. *memory*: peak "
             "above the memory in use before the call, with backward if the op has one. *output differs by*: "
             "relative L2 distance from flashlin's output, where it was recorded. -: not measured, no "
             "backward, or the host waits for the GPU.")
    lines: list[str] = []
    for release, rows in releases.items():
        lines += [f"## Triton {release}", "", _versions(rows), "", *everything(rows), ""]
        files = {id(row.record): row.record for row in rows}
        waits = [wait for record in files.values() for wait in record["first"]]
        lines += [*markdown.table(FIRST, map(_first, waits)), ""] if waits else []
        if found := failures(rows):
            lines += ["Failures of other packages:", "", *found, ""]
    return _page(f"Benchmarks on an {card}", about, "\n".join(lines).rstrip())


def _versions(rows: Sequence[Row]) -> str:
    """Return the versions and dates of these rows in one sentence."""
    found: dict[str, set[str]] = {"torch": {row.record["torch"] for row in rows}}
    for row in rows:
        for name, version in row.row["versions"].items():
            found.setdefault(name, set()).add(version)
    versions = [f"{name} {' or '.join(sorted(some))}" for name, some in found.items()]
    dates = sorted({str(row.row.get("date", row.record["date"])) for row in rows})
    return f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} with {', '.join(versions)}."


# -- plots

# Sizes in pixels. WIDE_PLOT: width of the picture, which fits a phone. UNIT: width of the best peer's time.
WIDE_PLOT, UNIT, BAR, TOP, TEXT, HEAD = 400, 170, 13, 84, 12, 56
# for light pages and for dark pages
FILLS = {"forward": ("#3b76af", "#6aa5dd"), "both": ("#d1812f", "#e09b52")}
STYLE = "\n".join([
    "<style>", *(f"{around}.back {{ fill: {back} }} text {{ fill: {fore} }} .theirs {{ stroke: #777 }} "
                 + " ".join(f".{what} {{ fill: {fills[dark]} }}" for what, fills in FILLS.items()) + close
                 for dark, (around, back, fore, close) in enumerate(
                     [("", "#fff", "#1b1f24", ""),
                      ("@media (prefers-color-scheme: dark) { ", "#14171b", "#e4e8ec", " }")])), "</style>"])


def plot(found: Sequence[Record]) -> str:
    """Return a bar chart in SVG with a panel for each card, for light and dark pages; ``""`` without records.

    A panel shows the rows of the card's overview, under the Triton release with the most rows. A bar is
    flashlin's time divided by that of the best peer, which the row names. A dashed line marks 1.
    """
    panels: dict[str, tuple[str, list[Row]]] = {}
    for (card, release), rows in machines(found).items():
        panels.setdefault(card, (release, overview(rows)))
    y, body = 0.0, list[str]()
    for card, (release, rows) in panels.items():
        if rows:
            part, y = _panel(f"{card}, Triton {release}", rows, y)
            body += part
    return svg.picture(WIDE_PLOT, y, STYLE, body) if body else ""


def _panel(title: str, rows: Sequence[Row], above: float) -> tuple[list[str], float]:
    """Return the panel of one card, and the y at which it ends."""
    body, y = [svg.text(10, above + 22, title, size=15)], above + TOP
    body += [svg.text(10, above + 40, "flashlin's time / best peer's time, lower is better", size=TEXT)]
    for at, (what, words) in enumerate(PASSES.items()):
        body += [svg.rect(10 + 90 * at, above + 49, 11, 11, what),
                 svg.text(26 + 90 * at, above + 59, words, size=TEXT)]
    for row in rows:
        label = f"{row.name.replace('`', '')}, {row.row['shape']}"
        body.append(svg.text(10, y + 10, label, size=TEXT))
        y += 15
        for what in PASSES:
            if (ratio := row.ratio(what)) is not None:
                # a longer bar would leave the picture; its number still shows the ratio
                width = min(ratio, 1.55) * UNIT
                body += [svg.rect(10, y, width, BAR, what),
                         svg.text(14 + width, y + BAR - 2, f"{ratio:.2f} {row.best(what)}", size=TEXT)]
                y += BAR + 1
        y += 7
    line = 10 + UNIT
    return [f'<line x1="{line}" y1="{above + TOP - 8}" x2="{line}" y2="{y}" class="theirs" '
            'stroke-dasharray="3 3"/>',
            svg.text(line + 4, above + TOP - 10, "1", size=TEXT), *body], y + 12


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
        return HEAD + HIGH_UP * (high - loss) / (high - low or 1)
    for part in range(5):
        loss, step = low + part * (high - low) / 4, part * of["steps"] // 4
        body += [svg.text(left - 6, y_of(loss) + 4, f"{loss:.2f}", anchor="end"),
                 svg.text(left + WIDE * part / 4, HEAD + HIGH_UP + 18, str(step), anchor="middle")]
    for at, (way, (colour, name)) in enumerate((way, told) for way, told in WAYS.items() if way in means):
        points = " ".join(f"{left + WIDE * step / max(of['steps'] - 1, 1):.1f},{y_of(loss):.1f}"
                          for step, loss in [*enumerate(means[way])][::5])
        width = 5 - 1.5 * at  # the curves overlap, so the first one is the widest
        body += [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>',
                 f'<rect x="{left + 210 * at}" y="26" width="11" height="11" fill="{colour}"/>',
                 svg.text(left + 210 * at + 16, 36, f"{name}: {means[way][-1]:.3f} at the end")]
    title = (f"loss of a small Gated DeltaNet, mean of {SMOOTH} steps; {of['device']}, Triton "
             f"{of['triton']}, fla {of['fla']}" + (", its refusal switched off" if of["refused"] else ""))
    body = [svg.text(left, 16, title), *body]
    return svg.picture(left + WIDE + 20, HEAD + HIGH_UP + 30, STYLE, body)
