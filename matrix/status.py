"""Derive the status of each op on each GPU and Triton release.

A status combines the current plans of a cell with the recorded compilations of their launches. docs/support
and the HTML page are made from these statuses.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flashlin.guards.launch_table import SPILLS
from flashlin.testing.record import Recorded
from matrix.results import CellResult, Compiled, Figures, load_gpu

# Status of an op on a GPU under a Triton release, worst first.
Status = Literal["FAILED", "refused", "not run", "torch path", "compiled only", "slow", "worked around",
                 "compiled", "ran"]
STATUSES: tuple[Status, ...] = get_args(Status)
MEANS: dict[Status, str] = {
    "FAILED": "At least one call raised an unexpected error while it was planned, or needs a kernel that "
              "does not compile.",
    "refused": "At least one call is refused before any launch. The error gives the reason and what to do.",
    "not run": "The op has no results, or not all of its kernels have been compiled.",
    "torch path": "Plain torch computes at least one call. The results are right, but it is slower than a "
                  "kernel.",
    "compiled only": "Every kernel compiles to machine code for this GPU. Plain torch computes the calls "
                     "until the kernels have run on such a GPU; `flashlin warmup` runs them on one machine.",
    "slow": f"Every kernel compiles, but at least one spills more than {SPILLS:,} bytes a thread in every "
            "configuration. It has not been timed.",
    "worked around": "Kernels compute all calls, but the plan of at least one call avoids a known failure.",
    "compiled": "Every kernel compiles to machine code for this GPU. The cases have not run on such a GPU.",
    "ran": "Every case was right on a GPU of this kind.",
}


class Outcome(NamedTuple):
    """The plan of one call on one GPU.

    path: ``triton``, ``torch`` or ``refused``.
    remedies: names of the remedies that the plan applies.
    because: the reason for each remedy.
    launches: ids of the planned launches. On AMD, plans use the torch path by default; there, these are the
        launches that kernels would need.
    failed: the error of a call that was neither planned nor refused, or an empty string.
    """
    op: str
    call: str
    card: str
    path: str
    remedies: tuple[str, ...] = ()
    because: tuple[str, ...] = ()
    launches: tuple[str, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class Planned:
    """The plans of all calls of a cell.

    outcomes: the plan of each call on each GPU.
    places: (launch id, GPU) -> launch, including launches that no plan uses until they have run on that GPU.
        Launches with the same id have the same code. Their shared memory may differ between GPUs, and so may
        their configuration, if a GPU without bf16 computes in float32.
    """
    outcomes: tuple[Outcome, ...] = ()
    places: dict[tuple[str, str], Recorded] = field(default_factory=dict)

    def beside(self, other: Planned) -> Planned:
        """Return the union of both, which lists everything to compile."""
        return Planned((*self.outcomes, *other.outcomes), {**other.places, **self.places})

    @property
    def started(self) -> set[tuple[str, str]]:
        """Return (launch id, GPU) for every launch that a plan with path ``triton`` uses."""
        return {(launch, outcome.card) for outcome in self.outcomes if outcome.path == "triton"
                for launch in outcome.launches}


@dataclass(frozen=True)
class CellState:
    """One cell, with its recorded results and its current plans.

    result: the recorded results.
    planned: the current plans.
    untried: GPU -> the reason why some of its launches could not be compiled.
    plain: the plans of the main calls if no launch were known to be slow.
    """
    result: CellResult
    planned: Planned
    untried: dict[str, str] = field(default_factory=dict)
    plain: Planned = Planned()

    def verdict(self, launch: str, card: str) -> Compiled | None:
        return self.result.verdict(launch, card)

    def slow(self, launch: str, card: str) -> Figures | None:
        """Return the metrics of a launch that compiles to slow code, or None."""
        tried = self.verdict(launch, card)
        return tried.slow if tried else None

    def why(self, launch: str, card: str) -> str:
        """Return the reason why a launch fails, or ``""`` if it compiles or was not tried."""
        tried = self.verdict(launch, card)
        return tried.why(self.planned.places[launch, card].shared) if tried else ""


class Square(NamedTuple):
    """One op on one GPU under one Triton release, with the status of its worst call and the reasons."""
    op: str
    card: str
    triton: str
    status: Status
    why: tuple[str, ...] = ()
    evidence: str = ""
    calls: int = 0


def squares(every: Iterable[CellState], ran: dict[tuple[str, str, str], str]) -> list[Square]:
    """Return one square for each op, GPU and Triton release.

    ran: (op, GPU, Triton release) -> a text about a run on a GPU, as ``gpu_records`` returns it.
    """
    squared = []
    for state in every:
        by_place: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in state.planned.outcomes:
            by_place.setdefault((outcome.op, outcome.card), []).append(outcome)
        for (op, card), outcomes in by_place.items():
            squared.append(_square(op, card, state, outcomes,
                                   ran.get((op, card, state.result.cell.triton), "")))
    return squared


def _square(op: str, card: str, state: CellState, outcomes: list[Outcome], record: str) -> Square:
    judged = [_status(outcome, state) for outcome in outcomes]
    status = min((status for status, _ in judged), key=STATUSES.index)
    kernels = {launch for outcome in outcomes for launch in outcome.launches}
    tried = [verdict for launch in kernels if (verdict := state.verdict(launch, card))]
    if record and status in ("slow", "compiled"):
        status = "ran"
    why = dict.fromkeys(reason for its, reasons in judged if its == status or status != "FAILED"
                        for reason in reasons)
    evidence = (f"{sum(one.status == 'ok' for one in tried)} of {len(kernels)} kernels compiled" if tried
                else "")
    if len(tried) == len(kernels):  # otherwise a kernel or a plan changed, so the GPU record is outdated
        evidence = record or evidence
    return Square(op, card, state.result.cell.triton, status, tuple(why), evidence, len(outcomes))


def _status(outcome: Outcome, state: CellState) -> tuple[Status, list[str]]:
    forced = [f"{outcome.call}: {reason}" for reason in outcome.because]
    if outcome.failed:
        return "FAILED", [f"{outcome.call}: {outcome.failed}"]
    if outcome.path == "refused":
        return "refused", forced
    broken = [f"{outcome.call}: {state.planned.places[launch, outcome.card]}: {why}"
              for launch in outcome.launches if (why := state.why(launch, outcome.card))]
    tried = all(state.verdict(launch, outcome.card) for launch in outcome.launches)
    if outcome.path == "torch":
        all_compile = outcome.launches and tried and not broken
        return "compiled only" if all_compile else "torch path", forced + broken
    if broken:
        return "FAILED", broken
    if not tried:
        return "not run", []
    slow = [f"{outcome.call}: {state.planned.places[launch, outcome.card].kernel} spills: {one.spills} bytes"
            for launch in outcome.launches if (one := state.slow(launch, outcome.card))]
    if slow:
        return "slow", [*forced, *slow]
    return ("worked around", forced) if outcome.remedies else ("compiled", [])


def gpu_files(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the file name, the GPU architecture and the content of each record of ``python -m matrix.gpu``."""
    for path in sorted(folder.glob("gpu-*.json")):
        record = load_gpu(path)
        yield path.name, record.get("arch") or "sm{}{}".format(*record["capability"]), record


def gpu_records(folder: Path) -> dict[tuple[str, str, str], str]:
    """Return (op, GPU, Triton release) -> a text about the record of a run on that GPU.

    The text says how many cases of the op were right, on which GPU and when. The records are ``gpu-*.json``.
    Only ops with no failed case are included. If several records match, the text is about the record with the
    most cases.
    """
    wrong, most = set[tuple[str, str, str]](), dict[tuple[str, str, str], tuple[int, str]]()
    for name, card, record in gpu_files(folder):
        triton = record["triton"]
        wrong |= {(row["op"], card, triton) for row in record["rows"] if not row["ok"]}
        for op, cases in Counter(row["op"] for row in record["rows"]).items():
            words = f"{cases} cases right on {record['device']}, {record['date']} ({name})"
            most[op, card, triton] = max(most.get((op, card, triton), (0, "")), (cases, words))
    return {place: words for place, (_, words) in most.items() if place not in wrong}
