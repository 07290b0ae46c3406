"""What the matrix found, as data: ``matrix/results/triton-<version>.json``, one file a cell. The support table and the page are made of it."""
from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flashlin.compat.target import Target, parse
from flashlin.compat.versions import release

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # the same module under its older name

Kind = Literal["gate", "report"]
Layer = Literal["import", "plan", "compile", "interpret", "torch"]
# Of an op on a card under a release, worst first.
Status = Literal["FAILED", "refused", "not run", "torch path", "worked around", "compiled", "ran"]
STATUSES: tuple[Status, ...] = ("FAILED", "refused", "not run", "torch path", "worked around", "compiled", "ran")
MEANS: dict[Status, str] = {
    "FAILED": "At least one call raised what was neither planned nor refused, or needs a kernel that does not compile.",
    "refused": "At least one call is refused before anything is started, with the reason and what to do.",
    "not run": "Nothing is known, or not enough: not every kernel has been tried.",
    "torch path": "At least one call is computed by plain torch: right, but slower than a kernel.",
    "worked around": "Kernels do it all, but at least one call had to be planned around a known failure.",
    "compiled": "Every kernel compiles to machine code for this card; no real card has run the cases.",
    "ran": "Every case was right on a real card.",
}


class Facts(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Card(Facts):
    """name: ``sm90`` or AMD's ``gfx942``; example: what people call it."""
    name: str
    example: str
    kind: Kind

    @property
    def sm(self) -> int:
        """90 of sm90; 0 of an AMD card."""
        return int(self.name[2:]) if self.name.startswith("sm") else 0

    @property
    def arch(self) -> int | str:
        """What to compile for."""
        return self.sm or self.name

    def target(self, triton: str, torch: str = "") -> Target:
        return parse(f"triton={triton},sm={self.sm}" if self.sm else f"triton={triton},backend=hip,name={self.name}", torch_version=torch)


class Cell(Facts):
    """One Triton release. python: the versions it is made for, ``3.9 to 3.13``; numpy: a bound that its interpreter needs; torch: a release
    of it in place of the installed one. layers: what is run under it."""
    triton: str
    python: str = ""
    numpy: str = ""
    torch: str = ""
    kind: Kind
    layers: tuple[Layer, ...] = ("import", "plan", "compile", "interpret")

    def runs_on(self, python: tuple[int, int]) -> bool:
        first, _, last = self.python.partition(" to ")
        return not first or release(first)[:2] <= python <= release(last)[:2]

    @property
    def name(self) -> str:
        return f"triton-{self.triton}" + (f"-torch-{self.torch}" if self.torch else "")


class Matrix(Facts):
    card: tuple[Card, ...]
    cell: tuple[Cell, ...]

    @property
    def tritons(self) -> tuple[Cell, ...]:
        """The cells whose launches are compiled for the cards: another torch makes no others."""
        return tuple(cell for cell in self.cell if not cell.torch)


def load_matrix(path: Path) -> Matrix:
    return Matrix.model_validate(tomllib.loads(path.read_text()))


class Outcome(Facts):
    """The plan of one call on one card. path: ``triton``, ``torch`` or ``refused``; remedies: what the plan did, by name; because: a reason for
    each; launches: ids of the kernels it would start; on AMD, where plans lead to the torch path, those that it would start otherwise.
    failed: what the call raised, if it was neither planned nor refused."""
    op: str
    call: str
    card: str
    path: str
    remedies: tuple[str, ...] = ()
    because: tuple[str, ...] = ()
    launches: tuple[str, ...] = ()
    failed: str = ""


class Described(Facts):
    """A kernel that was compiled. text: in words; config: ``Launch.config``; source: its module and a hash of its source."""
    text: str
    config: str
    source: str


class Compiled(Facts):
    """A launch compiled for a card: see ``testing.compile.Result``."""
    status: str
    message: str = ""
    cause: str = ""
    registers: int = 0
    spills: int = 0
    shared: int = 0
    planned_shared: int = 0
    seconds: float = 0.0

    @property
    def refused(self) -> bool:
        """Whether a compiler has said no, as opposed to not having come to an end."""
        return self.status not in ("ok", "timeout")

    @property
    def why(self) -> str:
        """``""`` if it may be launched."""
        if self.status != "ok":
            return f"{self.status}: {self.message} {self.cause}".strip()
        if self.shared > self.planned_shared:
            return f"{self.shared} bytes of shared memory, planned {self.planned_shared}"
        return ""


class Verdict(Facts):
    """Of a layer that runs things: the import, a case in the interpreter, a case on the torch path."""
    name: str
    ok: bool
    detail: str = ""
    seconds: float = 0.0


class CellResult(Facts):
    """All of a cell. launches: id -> the kernel; compiled: ``id@card`` -> what came of it; layers: seconds that a layer took."""
    cell: Cell
    date: str = ""
    torch: str = ""
    python: str = ""
    layers: dict[str, float] = {}
    outcomes: tuple[Outcome, ...] = ()
    launches: dict[str, Described] = {}
    compiled: dict[str, Compiled] = {}
    verdicts: dict[str, tuple[Verdict, ...]] = {}

    def save(self, folder: Path) -> None:
        """Whole or not at all: a run may be killed at any time."""
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{self.cell.name}.json"
        fields = self.model_dump(exclude_defaults=True)
        fresh.write_text(json.dumps(fields, indent=None, separators=(",", ":")).replace('},"', '},\n"').replace('},{', '},\n{') + "\n")
        os.replace(fresh, folder / f"{self.cell.name}.json")


def load_result(folder: Path, cell: Cell) -> CellResult:
    path = folder / f"{cell.name}.json"
    found = CellResult.model_validate_json(path.read_text()) if path.exists() else CellResult(cell=cell)
    return found.model_copy(update={"cell": cell})


class Square(Facts):
    """An op on a card under a release: the worst of its calls, and why."""
    op: str
    card: str
    triton: str
    status: Status
    why: tuple[str, ...] = ()
    evidence: str = ""
    calls: int = 0


def squares(matrix: Matrix, results: Iterable[CellResult], ran: dict[tuple[str, str, str], str], stale: Collection[str] = ()) -> list[Square]:
    """ran: (op, card, triton) -> the record of a GPU where every case of the op was right. stale: launches whose kernel has changed since."""
    found = []
    for result in results:
        by_place: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in result.outcomes:
            by_place.setdefault((outcome.op, outcome.card), []).append(outcome)
        for (op, card), outcomes in by_place.items():
            found.append(_square(op, card, result, outcomes, ran.get((op, card, result.cell.triton), ""), stale))
    return found


def _square(op: str, card: str, result: CellResult, outcomes: list[Outcome], record: str, stale: Collection[str]) -> Square:
    judged = [(_status(outcome, result, stale), outcome) for outcome in outcomes]
    status = min((status for (status, _), _ in judged), key=STATUSES.index)
    changed = any(launch in stale for outcome in outcomes for launch in outcome.launches)
    if record and status == "compiled":  # not where a kernel or a plan has changed since: what is new was tried by nobody
        status = "ran"
    why = dict.fromkeys(reason for (found, reasons), _ in judged if found == status or status != "FAILED" for reason in reasons)
    kernels = {launch for outcome in outcomes for launch in outcome.launches if launch not in stale}
    tried = [result.compiled[place] for place in (f"{launch}@{card}" for launch in kernels) if place in result.compiled]
    compiled = sum(one.status == "ok" for one in tried)
    evidence = (record if not changed else "") or (f"{compiled} of {len(kernels)} kernels compiled" if tried else "")
    return Square(op=op, card=card, triton=result.cell.triton, status=status, why=tuple(why), evidence=evidence, calls=len(outcomes))


def _status(outcome: Outcome, result: CellResult, stale: Collection[str]) -> tuple[Status, list[str]]:
    forced = [f"{outcome.call}: {reason}" for reason in outcome.because]
    if outcome.failed:
        return "FAILED", [f"{outcome.call}: {outcome.failed}"]
    if outcome.path == "refused":
        return "refused", forced
    if outcome.path == "torch":
        return "torch path", forced
    tried = {launch: None if launch in stale else result.compiled.get(f"{launch}@{outcome.card}") for launch in outcome.launches}
    broken = [f"{outcome.call}: {result.launches[launch].text}: {found.why}" for launch, found in tried.items() if found and found.why]
    if broken:
        return "FAILED", broken
    if not all(tried.values()):
        return "not run", []
    return ("worked around", forced) if outcome.remedies else ("compiled", [])


def gpu_records(folder: Path) -> dict[tuple[str, str, str], str]:
    """(op, card, triton) -> in words, out of ``gpu-*.json`` where every case of the op passed."""
    found = {}
    for path in sorted(folder.glob("gpu-*.json")):
        record: dict[str, Any] = json.loads(path.read_text())
        card = "sm{}{}".format(*record["capability"])
        for op in sorted({row["op"] for row in record["rows"]}):
            rows = [row for row in record["rows"] if row["op"] == op]
            if all(row["ok"] for row in rows):
                found[op, card, record["triton"]] = f"{len(rows)} cases right on {record['device']}, {record['date']} ({path.name})"
    return found
