"""What the matrix keeps, as data, in ``matrix/results``: ``triton-<version>.json``, a file for each cell, and
``launches.json``, what came of each launch under every release, since much of it is the same. They hold what
only a compiler or a run can tell; what calls a cell has and where they lead is planned anew (matrix/run.py)
each time it is asked for."""
from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from flashlin.compat.target import Target, parse
from flashlin.compat.versions import release
from flashlin.guards import launch_table
from flashlin.testing.record import Recorded, is_current, source_hash

Kind = Literal["gate", "report"]
Layer = Literal["import", "plan", "compile", "interpret", "torch"]
LAUNCHES = "launches.json"
# JSON without blanks: a checkout has to stay small
compact = json.JSONEncoder(separators=(",", ":")).encode
# (configuration, launch without the kernel's name) -> release -> cards, ``together`` -> ``Compiled.brief``
Ledger = dict[tuple[str, str], dict[str, dict[str, Any]]]


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
        # a card of the matrix has the torch that is made for it, whatever build of it is installed here
        return parse(f"{self.name},triton={triton}", torch_version=torch.partition("+")[0])


class Cell(Facts):
    """One Triton release. python: the versions it is made for, ``3.9 to 3.13``; torch: a release of it in
    place of the installed one. layers: what is run under it."""
    triton: str
    python: str = ""
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


class Figures(NamedTuple):
    """Of the machine code: see ``testing.compile.Result``."""
    spills: int
    registers: int = 0
    instructions: int = 0
    local: int = 0


class Compiled(Facts):
    """What came of a launch on a card: see ``testing.compile.Result``. slow: figures of what is
    (``launch_table.slow_of``), of what is not very slow the bytes alone. Others are not kept: a checkout has
    to stay small."""
    status: str = "ok"
    message: str = ""
    cause: str = ""
    shared: int = 0
    slow: Figures | None = None

    @property
    def refused(self) -> bool:
        """Whether a compiler has said no, as opposed to not having come to an end."""
        return self.status not in ("ok", "timeout")

    @property
    def remembered(self) -> bool:
        """Whether a plan that leads elsewhere does so because of it."""
        return self.refused or self.slow is not None

    def brief(self) -> Any:
        """As it is kept: bytes of shared memory; of what is slow they and the figures; else what happened."""
        if self.status == "ok":
            return [self.shared, *filter(None, self.slow)] if self.slow else self.shared
        return self.model_dump(exclude_defaults=True)

    @classmethod
    def of(cls, brief: Any) -> Compiled:
        """What ``brief`` made short."""
        if isinstance(brief, dict):
            return cls(**brief)
        shared, *figures = brief if isinstance(brief, list) else [brief]
        return cls(shared=shared, slow=Figures(*figures) if figures else None)

    def why(self, planned_shared: int) -> str:
        """``""`` if it may be launched where the plan reckons with that many bytes of shared memory."""
        if self.status != "ok":
            return f"{self.status}: {self.message} {self.cause}".strip()
        if self.shared > planned_shared:
            return f"{self.shared} bytes of shared memory, planned {planned_shared}"
        return ""


class Tried(Facts):
    """A launch that was compiled. config: ``Launch.config``; cards: what came of it on each."""
    config: str
    cards: dict[str, Compiled] = {}


class Verdict(Facts):
    """What came of what a layer ran: the import, a case in the interpreter, a case on the torch path."""
    layer: Layer
    name: str
    ok: bool
    detail: str = ""


class CellResult(Facts):
    """All that is known of a cell. layers: seconds that a layer took; kernels: each one's ``source_hash``
    when it was compiled; launches: id -> what came of it. An id is the kernel's name and a hash
    (``matrix.identity``)."""
    cell: Cell
    date: str = ""
    torch: str = ""
    python: str = ""
    layers: dict[str, float] = {}
    verdicts: tuple[Verdict, ...] = ()
    kernels: dict[str, str] = {}
    launches: dict[str, Tried] = {}

    def verdict(self, launch: str, card: str) -> Compiled | None:
        """None: not tried, or with another source."""
        return self.launches[launch].cards.get(card) if launch in self.launches else None

    def enter(self, launch: Recorded, name: str, card: str, verdict: Compiled) -> None:
        self.kernels[launch.kernel] = source_hash(launch.module, launch.kernel)
        self.launches.setdefault(name, Tried(config=launch.config)).cards[card] = verdict

    def save(self, folder: Path) -> None:
        """Each file whole or not at all: a run may be killed at any time. Of other cells' launches those go
        whose kernels have changed since."""
        folder.mkdir(parents=True, exist_ok=True)
        own = _release(self.cell)
        with _alone(folder):
            kernels, ledger = _ledger(folder)
            for known in ledger.values():
                known.pop(own, None)
            for launch, tried in self.launches.items():
                ledger.setdefault((tried.config, launch.rpartition("-")[2]), {})[own] = together(
                    {card: one.brief() for card, one in sorted(tried.cards.items())})
            write_ledger(folder, {**kernels, **self.kernels}, ledger)
            _replace(folder / f"{self.cell.name}.json",
                     self.model_dump(exclude_defaults=True, exclude={"cell", "kernels", "launches"}))


def load_result(folder: Path, cell: Cell) -> CellResult:
    """What was kept of a cell, without verdicts on kernels that have changed since."""
    own = _release(cell)
    kernels, ledger = _ledger(folder)
    tried = {f"{config.partition(' ')[0]}-{name}": Tried(config=config, cards={
                 card: Compiled.of(brief) for card, brief in apart(known[own]).items()})
             for (config, name), known in ledger.items() if own in known}
    return CellResult(cell=cell, kernels=kernels, launches=tried, **_read(folder / f"{cell.name}.json"))


def together(known: Mapping[str, Any]) -> dict[str, Any]:
    """Names of which the same is known as one, with spaces between them."""
    alike: dict[str, list[str]] = {}
    for name, one in known.items():
        alike.setdefault(json.dumps(one), []).append(name)
    return {" ".join(names): json.loads(one) for one, names in alike.items()}


def apart(known: Mapping[str, Any]) -> dict[str, Any]:
    """What was ``together``, name by name."""
    return {name: one for names, one in known.items() for name in names.split()}


def _ledger(folder: Path) -> tuple[dict[str, str], Ledger]:
    """Each kernel's source when it was compiled, and what is known of launches: without kernels that have
    changed since."""
    kernels, ledger = read_ledger(folder)
    kernels = {name: source for name, source in kernels.items() if is_current(source, name)}
    return kernels, {(config, name): known for (config, name), known in ledger.items()
                     if config.partition(" ")[0] in kernels}


def read_ledger(folder: Path) -> tuple[dict[str, str], Ledger]:
    """Read each kernel's source and the launches as they are kept, also of kernels that have changed."""
    kept = _read(folder / LAUNCHES)
    return dict(kept.get("kernels", {})), {
        (config, name): apart(known)
        for config, line in kept.get("launches", {}).items() for name, known in apart(line).items()}


def write_ledger(folder: Path, kernels: Mapping[str, str], ledger: Ledger) -> None:
    lines = dict[str, Any]()
    for (config, name), known in sorted(ledger.items()):
        if known:
            lines.setdefault(config, {})[name] = together({one: known[one] for one in sorted(known, key=release)})
    _replace(folder / LAUNCHES, {"kernels": dict(sorted(kernels.items())),
                                 "launches": {config: together(line) for config, line in lines.items()}})


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Other processes that keep something there wait meanwhile: cells are run side by side."""
    import fcntl
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _replace(path: Path, fields: dict[str, Any]) -> None:
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(one_a_line(fields), encoding="utf-8")
    os.replace(fresh, path)


def _release(cell: Cell) -> str:
    return cell.name.partition("-")[2]


def slow_by_config(result: CellResult) -> dict[str, dict[str, list[int]]]:
    """configuration -> card -> what a ``launch_table.Slow`` has of its worst use, of NVIDIA's cards. Planned
    or not: what is slow is planned otherwise from then on."""
    slow: dict[str, dict[str, list[int]]] = {}
    for tried in result.launches.values():
        for card, verdict in tried.cards.items():
            if verdict.slow and card.startswith("sm"):
                one = launch_table.slow_of(verdict.slow.registers, verdict.slow.spills) or ()
                cards = slow.setdefault(tried.config, {})
                cards[card] = max(cards.get(card, []), [*filter(None, one)])
    return {config: dict(sorted(cards.items())) for config, cards in slow.items()}


# What the record of a GPU keeps of a case that was right, as a list. One that was not is a dict.
RIGHT = ("op", "case", "dtype", "worst", "rms", "row", "allowed")


def load_gpu(path: Path) -> dict[str, Any]:
    """The record of a GPU, with a dict for each case, and the source of each configuration."""
    record = json.loads(path.read_text(encoding="utf-8"))
    configs = {config: source for source, of_one in record.get("configs", {}).items() for config in of_one}
    rows = [{**dict(zip(RIGHT, row, strict=True)), "ok": True} if isinstance(row, list) else row
            for row in record.get("rows", ())]
    return {**record, "configs": configs, "rows": rows}


def by_source(configs: Mapping[str, str]) -> dict[str, list[str]]:
    """Configurations as a record of a GPU keeps them: those of one kernel together."""
    kept: dict[str, list[str]] = {}
    for config, source in sorted(configs.items()):
        kept.setdefault(source, []).append(config)
    return kept


def one_a_line(fields: dict[str, Any]) -> str:
    """JSON in which each entry of a long value has its line, so that a change is a change of lines."""
    def block(value: Any) -> str:
        if isinstance(value, dict):
            entries = [f"{compact(name)}: {compact(one)}" for name, one in value.items()]
        elif isinstance(value, (list, tuple)) and any(isinstance(one, (dict, list)) for one in value):
            entries = [compact(one) for one in value]
        else:
            return compact(value)
        opened, closed = "{}" if isinstance(value, dict) else "[]"
        return f"{opened}\n " + ",\n ".join(entries) + f"\n{closed}" if entries else opened + closed
    return "{\n" + ",\n".join(f"{compact(name)}: {block(value)}"
                              for name, value in fields.items()) + "\n}\n"
