"""Run the version matrix, and write the support table from its results: ``python -m matrix``."""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tqdm import tqdm

from matrix import cells, figures, support, workflow
from matrix import run as runner
from matrix.results import Cell, CellResult, Matrix, load_result
from matrix.stacks import run as stacks
from matrix.status import CellState, Planned

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results", HERE.parent / "build" / "support.html"


class Bar:
    """A progress bar of a cell, which counts failed compilations.

    On a terminal the line is updated in place. Otherwise a line is printed at most every 30 seconds, so that
    a log stays readable.
    """

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._layer, self.cell, self.failed = "", "", 0

    def __call__(self, layer: str, done: int, of: int, last: str) -> None:
        if self._bar is None or layer != self._layer or of != self._bar.total:
            self.close()
            self._layer, self._bar = layer, tqdm(total=of, initial=done, unit="",
                                                 mininterval=0.2 if sys.stderr.isatty() else 30)
        self.failed += layer == "compile" and bool(last) and not last.endswith(" ok")
        self._bar.set_description(f"{self.cell} {layer}")
        self._bar.set_postfix_str(f"{self.failed} failed  {last[:70]}", refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def planned(whole: Matrix) -> list[CellState]:
    """Return the state of every cell: its recorded results, and plans made now, which takes two minutes."""
    bar, every = Bar(), []
    for cell in whole.cell:
        bar.cell, result = cell.triton, load_result(RESULTS, cell)
        if "plan" in cell.layers:
            runner.plan_by(result)
            made = runner.plans(cell, whole.card, bar)
            every.append(CellState(result, made, plain=runner.plain(result, whole.card)))
        else:
            every.append(CellState(result, Planned()))
        bar.close()
    return every


def take(whole: Matrix, folder: Path, results: Path) -> list[Cell]:
    """Copy the results of cells from a folder into the folder ``results``, and return these cells."""
    there = [cell for cell in whole.cell if (folder / f"{cell.name}.json").exists()]
    for cell in there:
        load_result(folder, cell).save(results)
    return there


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m matrix", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="first time:  python -m matrix run --cell 3.6.0 --card sm90   "
                                            "then   python -m matrix report")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run cells; results that exist already are kept")
    run.add_argument("--cell", action="append", default=[],
                     help="a Triton release, such as 3.6.0 (repeatable; default: all)")
    run.add_argument("--card", action="append", default=[], help="such as sm90 (repeatable; default: all)")
    run.add_argument("--layer", action="append", default=[],
                     choices=("import", "plan", "compile", "interpret", "torch"),
                     help="only this layer (repeatable)")
    run.add_argument("--main", action="store_true",
                     help="plan and compile only the main calls, whose spills docs/support/spills.md counts")
    run.add_argument("--jobs", type=int, default=0, help="compilers at a time (default: one per core)")
    run.add_argument("--timeout", type=float, default=180, help="seconds for each kernel (default 180)")
    run.add_argument("--out", type=Path, default=RESULTS,
                     help="folder of the results (default: matrix/results)")
    run.add_argument("--afresh", action="store_true", help="delete earlier results first")
    report = commands.add_parser("report",
                                 help="write docs/support, the launch table and build/support.html from the "
                                      "results")
    either = report.add_mutually_exclusive_group()
    either.add_argument("--take", action="append", default=[], type=Path, metavar="FOLDER",
                        help="add the results of a cell that ran on another machine; the folder contains the "
                             "file of one cell and its launches.json (repeatable)")
    either.add_argument("--check", action="store_true",
                        help="write nothing; exit with 1 if docs/support or the launch table is stale")
    commands.add_parser("page", help="write build/support.html in seconds from the statuses in docs/support/ops.md, "
                                     "without the reasons that report adds")
    programs = commands.add_parser("stacks", help="run models of other packages, raw and patched")
    programs.add_argument("--stack", action="append", default=[],
                          help="name or beginning of the name of a stack, such as 'transformers 5.23.0' "
                               "(repeatable; default: all)")
    programs.add_argument("--model", action="append", default=[],
                          help="only this model, such as qwen3_next; the record keeps the rows of other "
                               "models (repeatable; default: all)")
    programs.add_argument("--way", choices=("raw", "patched", "both"), default="both")
    programs.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    programs.add_argument("--out", type=Path, default=RESULTS,
                          help="folder of the records (default: matrix/results)")
    figures_of = commands.add_parser("figures", help="measure the main kernels and write the metrics that "
                                                     "tests compare them with")
    figures_of.add_argument("--jobs", type=int, default=0, help="compilers at a time (default: one per core)")
    nightly = commands.add_parser("workflow", help="write the releases into matrix/github-workflow.yml")
    nightly.add_argument("--check", action="store_true", help="write nothing; exit with 1 if it is stale")
    return parser


def main() -> int:
    parser, whole = command_line(), cells.whole()
    options = parser.parse_args()
    if options.command == "workflow":
        return workflow.write(whole, check=options.check)
    if options.command == "page":
        return support.write_page(whole, HERE.parent / "docs" / "support", RESULTS, PAGE)
    if options.command == "figures":
        return figures.write(jobs=options.jobs)
    if options.command == "stacks":
        try:
            chosen_stacks = stacks.by_name(options.stack)
        except ValueError as error:
            parser.error(f"--stack: {error}")
        return stacks.run(chosen_stacks, options.model, options.way, options.out, options.jobs)
    if options.command == "report":
        for folder in options.take:
            if not take(whole, folder, RESULTS):
                parser.error(f"--take: got {folder}, need a folder with a cell's file, such as "
                             "triton-3.6.0.json")
        return support.write(whole, planned(whole), RESULTS, HERE.parent / "docs" / "support", PAGE,
                             check=options.check)
    unknown = [name for name in options.cell
               if name not in {text for cell in whole.cell for text in (cell.name, cell.triton)}]
    unknown += [name for name in options.card if name not in {card.name for card in whole.card}]
    if unknown:
        known = ", ".join(cell.triton for cell in whole.tritons)
        parser.error(f"got {', '.join(unknown)}, need a release or card out of {known}; "
                     f"{', '.join(card.name for card in whole.card)}")
    chosen = [cell for cell in whole.cell if not options.cell or {cell.name, cell.triton} & set(options.cell)]
    for cell in chosen:
        if not cell.runs_on(sys.version_info[:2]):
            parser.error(f"got Python {sys.version_info[0]}.{sys.version_info[1]}, need {cell.python} for "
                         f"Triton {cell.triton}; choose other releases with --cell")
    return run(whole, chosen, options)


def run(whole: Matrix, chosen: list[Cell], options: argparse.Namespace) -> int:
    """Run the chosen cells and print their failures. Return 1 if a cell of kind gate failed, else 0."""
    bar, began, failed = Bar(), time.monotonic(), 0
    cards = tuple(card for card in whole.card if not options.card or card.name in options.card)
    for cell in chosen:
        if options.afresh:
            CellResult(cell=cell).save(options.out)
        bar.cell = cell.triton
        state = runner.run(cell, cards, options.out, tuple(options.layer), main=options.main,
                           jobs=options.jobs, timeout=options.timeout, progress=bar)
        bar.close()
        lines = support.failures(whole, state)
        failed += len(lines) if cell.kind == "gate" else 0
        told = [f"{card.name}: {state.untried[card.name]}"
                for card in cards if card.kind == "report" and card.name in state.untried]
        print("\n  ".join([f"{cell.name}: {len(lines)} failed", *lines, *told]), flush=True)
    print(f"{time.monotonic() - began:.0f} s; results in {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
