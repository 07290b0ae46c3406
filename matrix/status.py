"""What a cell comes to: the plans of today beside what is known of their launches, as a status for each op on
each card. SUPPORT.md and the page are made of it."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flashlin.guards.launch_table import SPILLS
from flashlin.testing.record import Recorded
from matrix.results import CellResult, Compiled, Figures, load_gpu

# Of an op on a card under a release, worst first.
Status = Literal["FAILED", "refused", "not run", "torch path", "compiled only", "slow", "worked around",
                 "compiled", "ran"]
STATUSES: tuple[Status, ...] = get_args(Status)
MEANS: dict[Status, str] = {
    "FAILED": "At least one call raised what was neither planned nor refused, or needs a kernel that does "
              "not compile.",
    "refused": "At least one call is refused before anything is started, with the reason and what to do.",
    "not run": "Nothing is known, or not enough: not every kernel has been tried.",
    "torch path": "At least one call is computed by plain torch: right, but slower than a kernel.",
    "compiled only": "Every kernel compiles to machine code for this card, and plain torch serves until "
                     "somebody has run them there, as `flashlin warmup` does for one machine.",
    "slow": f"Every kernel compiles, but at least one, however it is started, keeps more than {SPILLS:,} "
            "bytes of a thread in memory for want of registers; nobody has timed it.",
    "worked around": "Kernels do it all, but at least one call had to be planned around a known failure.",
    "compiled": "Every kernel compiles to machine code for this card; no real card has run the cases.",
    "ran": "Every case was right on a real card.",
}


class Outcome(NamedTuple):
    """The plan of one call on one card. path: ``triton``, ``torch`` or ``refused``; remedies: what the plan
    did, by name; because: a reason for each; launches: ids of the kernels it would start; on AMD, where plans
    lead to the torch path, those that it would start otherwise. failed: what the call raised, if it was
    neither planned nor refused."""
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
    """What a cell's calls lead to. places: each launch, by its id and the card that it is compiled for, be it
    that no plan leads there before it has run. Launches of one id are the same code, but cards may reckon
    with other shared memory or, where one without bf16 computes in float32, have another configuration."""
    outcomes: tuple[Outcome, ...] = ()
    places: dict[tuple[str, str], Recorded] = field(default_factory=dict)

    def beside(self, other: Planned) -> Planned:
        """Both, for what is compiled."""
        return Planned((*self.outcomes, *other.outcomes), {**other.places, **self.places})

    @property
    def started(self) -> set[tuple[str, str]]:
        """Those without the ones that no plan leads to."""
        return {(launch, outcome.card) for outcome in self.outcomes if outcome.path == "triton"
                for launch in outcome.launches}


@dataclass(frozen=True)
class CellState:
    """A cell: what is known of it and what is planned there. untried: card -> why some of its launches could
    not be tried. plain: main calls as they would be planned if nothing were known to be slow."""
    result: CellResult
    planned: Planned
    untried: dict[str, str] = field(default_factory=dict)
    plain: Planned = Planned()

    def verdict(self, launch: str, card: str) -> Compiled | None:
        return self.result.verdict(launch, card)

    def slow(self, launch: str, card: str) -> Figures | None:
        """The figures of a launch that is slow."""
        tried = self.verdict(launch, card)
        return tried.slow if tried else None

    def why(self, launch: str, card: str) -> str:
        """``""`` of a launch that holds, and of one that was not tried."""
        tried = self.verdict(launch, card)
        return tried.why(self.planned.places[launch, card].shared) if tried else ""


class Square(NamedTuple):
    """An op on a card under a release: the worst of its calls, and why."""
    op: str
    card: str
    triton: str
    status: Status
    why: tuple[str, ...] = ()
    evidence: str = ""
    calls: int = 0


def squares(every: Iterable[CellState], ran: dict[tuple[str, str, str], str]) -> list[Square]:
    """ran: (op, card, triton) -> the record of a GPU where every case of the op was right."""
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
    if len(tried) == len(kernels):  # else a kernel or a plan has changed since: what is new was run by nobody
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
    """Each record of ``python -m matrix.gpu``: its file's name, its card and what it says."""
    for path in sorted(folder.glob("gpu-*.json")):
        record = load_gpu(path)
        yield path.name, record.get("arch") or "sm{}{}".format(*record["capability"]), record


def gpu_records(folder: Path) -> dict[tuple[str, str, str], str]:
    """(op, card, triton) -> in words, out of ``gpu-*.json`` where every case of the op passed: of several
    GPUs of that card, the one that has run most cases."""
    wrong, most = set[tuple[str, str, str]](), dict[tuple[str, str, str], tuple[int, str]]()
    for name, card, record in gpu_files(folder):
        triton = record["triton"]
        wrong |= {(row["op"], card, triton) for row in record["rows"] if not row["ok"]}
        for op, cases in Counter(row["op"] for row in record["rows"]).items():
            words = f"{cases} cases right on {record['device']}, {record['date']} ({name})"
            most[op, card, triton] = max(most.get((op, card, triton), (0, "")), (cases, words))
    return {place: words for place, (_, words) in most.items() if place not in wrong}
