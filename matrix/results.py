"""What the matrix keeps, as data: ``matrix/results/triton-<version>.json``, one file a cell. It holds what
only a compiler or a run can tell; what calls a cell has and where they lead is planned anew (matrix/run.py)
each time it is asked for."""
from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from flashlin.compat.target import Target, parse
from flashlin.compat.versions import release
from flashlin.guards import proven
from flashlin.testing.record import Recorded, is_current, source_hash

Kind = Literal["gate", "report"]
Layer = Literal["import", "plan", "compile", "interpret", "torch"]


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
        return parse(f"{self.name},triton={triton}", torch_version=torch)


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
    """What came of a launch on a card: see ``testing.compile.Result``. counted: whether its figures are known
    (those of verdicts before 2026-11-23 are not); slow: they, where they are (``proven.slow_of``), of what is
    not very slow the bytes alone. Others are not kept: a checkout has to stay small."""
    status: str = "ok"
    message: str = ""
    cause: str = ""
    shared: int = 0
    counted: bool = False
    slow: Figures | None = None

    @property
    def refused(self) -> bool:
        """Whether a compiler has said no, as opposed to not having come to an end."""
        return self.status not in ("ok", "timeout")

    @property
    def remembered(self) -> bool:
        """Whether a plan that leads elsewhere does so because of it."""
        return self.refused or self.slow is not None

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
        """Whole or not at all: a run may be killed at any time."""
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{self.cell.name}.json"
        kernels = {name: self.kernels[name]
                   for name in sorted({kernel_of(launch) for launch in self.launches})}
        fields = self.model_dump(exclude_defaults=True, exclude={"cell", "kernels", "launches"})
        fresh.write_text(one_a_line({**fields, "kernels": kernels, "launches": _lines(self.launches)}), encoding="utf-8")
        os.replace(fresh, folder / f"{self.cell.name}.json")


def load_result(folder: Path, cell: Cell) -> CellResult:
    """What was kept of a cell, without verdicts on kernels that have changed since."""
    path = folder / f"{cell.name}.json"
    fields = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kernels = {name: source for name, source in fields.pop("kernels", {}).items() if is_current(source, name)}
    tried = dict(one for line in fields.pop("launches", ()) for one in _tried(line))
    return CellResult(cell=cell, kernels=kernels,
                      launches={name: one for name, one in tried.items() if kernel_of(name) in kernels},
                      **fields)


def slow_by_config(result: CellResult) -> dict[str, dict[str, list[int]]]:
    """configuration -> card -> what a ``proven.Slow`` has of its worst use, of NVIDIA's cards. Planned or not:
    what is slow is planned otherwise from then on."""
    slow: dict[str, dict[str, list[int]]] = {}
    for tried in result.launches.values():
        for card, verdict in tried.cards.items():
            if verdict.slow and card.startswith("sm"):
                one = proven.slow_of(verdict.slow.registers, verdict.slow.spills) or ()
                cards = slow.setdefault(tried.config, {})
                cards[card] = max(cards.get(card, []), [*filter(None, one)])
    return {config: dict(sorted(cards.items())) for config, cards in slow.items()}


def kernel_of(launch: str) -> str:
    return launch.rpartition("-")[0]


def _lines(launches: Mapping[str, Tried]) -> list[dict[str, Any]]:
    """A line for each configuration: by ids, without the kernel's name, what is known of all of these."""
    alike: dict[str, dict[str, list[str]]] = {}
    for launch, tried in sorted(launches.items()):
        known = alike.setdefault(tried.config, {})
        known.setdefault(json.dumps(_known(tried.cards)), []).append(launch.rpartition("-")[2])
    return [{"config": config, **{" ".join(ids): json.loads(one) for one, ids in known.items()}}
            for config, known in sorted(alike.items())]


def _known(of: Mapping[str, Compiled]) -> dict[str, Any]:
    """Cards of which the same is known stand together. fine: cards -> bytes of shared memory; slow: the same
    and the figures; ok: of what was not counted; failed: cards -> what happened."""
    alike: dict[str, list[str]] = {}
    for card in sorted(of, key=_by_number):
        alike.setdefault(of[card].model_dump_json(exclude_defaults=True), []).append(card)
    verdicts = {" ".join(cards): of[cards[0]] for cards in alike.values()}
    known = {"fine": {cards: one.shared for cards, one in verdicts.items()
                      if one.status == "ok" and one.counted and not one.slow},
             "slow": {cards: (one.shared, *filter(None, one.slow)) for cards, one in verdicts.items() if one.slow},
             "ok": {cards: one.shared for cards, one in verdicts.items()
                    if one.status == "ok" and not one.counted},
             "failed": {cards: one.model_dump(exclude_defaults=True)
                        for cards, one in verdicts.items() if one.status != "ok"}}
    return {name: value for name, value in known.items() if value}


def _tried(line: dict[str, Any]) -> Iterator[tuple[str, Tried]]:
    config = line.pop("config")
    for ids, known in line.items():
        verdicts = {cards: Compiled(shared=shared) for cards, shared in known.get("ok", {}).items()}
        verdicts |= {cards: Compiled(shared=shared, counted=True)
                     for cards, shared in known.get("fine", {}).items()}
        verdicts |= {cards: Compiled(shared=shared, counted=True, slow=Figures(*figures))
                     for cards, (shared, *figures) in known.get("slow", {}).items()}
        verdicts |= {cards: Compiled(**fields) for cards, fields in known.get("failed", {}).items()}
        for name in ids.split():
            yield f"{config.partition(' ')[0]}-{name}", Tried(config=config, cards={
                card: one for cards, one in verdicts.items() for card in cards.split()})


def _by_number(card: str) -> tuple[bool, int, str]:
    """NVIDIA's before AMD's, sm90 before sm100."""
    return not card.startswith("sm"), len(card), card


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
            entries = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in value.items()]
        elif isinstance(value, (list, tuple)) and any(isinstance(one, (dict, list)) for one in value):
            entries = [json.dumps(one) for one in value]
        else:
            return json.dumps(value)
        opened, closed = "{}" if isinstance(value, dict) else "[]"
        return f"{opened}\n " + ",\n ".join(entries) + f"\n{closed}" if entries else opened + closed
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {block(value)}"
                              for name, value in fields.items()) + "\n}\n"
