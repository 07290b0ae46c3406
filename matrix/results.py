"""The results of the matrix as data in ``matrix/results``.

``triton-<version>.json`` has the results of one cell. ``launches.json`` has the result of each launch under
every release, because most of these are the same. Its field ``names`` has short names for lists of releases
and of GPUs, because a checkout has to stay small. The files contain only facts that a compilation or a run
determines. The calls of a cell and their launches are planned again each time (matrix/run.py).
"""
from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
# JSON without spaces, because a checkout has to stay small
compact = json.JSONEncoder(separators=(",", ":")).encode
# (configuration, hash of the launch) -> release -> names of GPUs as in ``by_card`` -> ``Compiled.brief``
Ledger = dict[tuple[str, str], dict[str, dict[str, Any]]]
OfLaunch = Mapping[str, Mapping[str, Any]]  # list of releases -> list of GPUs -> ``Compiled.brief``


class Facts(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Card(Facts):
    """A GPU of the matrix.

    name: ``sm90``, or AMD's ``gfx942``.
    example: the usual name of such a GPU.
    kind: gate or report, see cells.py.
    """
    name: str
    example: str
    kind: Kind

    @property
    def sm(self) -> int:
        """The number of the compute capability, 90 for sm90; 0 for an AMD GPU."""
        return int(self.name[2:]) if self.name.startswith("sm") else 0

    @property
    def arch(self) -> int | str:
        """The architecture to compile for: the number of the capability, or the name of an AMD architecture."""
        return self.sm or self.name

    def target(self, triton: str, torch: str = "") -> Target:
        # plan with the torch build for this GPU, whatever build is installed here
        return parse(f"{self.name},triton={triton}", torch_version=torch.partition("+")[0])


class Cell(Facts):
    """One Triton release of the matrix.

    python: the supported versions, such as ``3.9 to 3.13``.
    torch: a torch release to use instead of the installed one.
    kind: gate or report, see cells.py.
    layers: the layers to run under the release.
    """
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
        """The cells whose launches are compiled. A cell with another torch has the same launches."""
        return tuple(cell for cell in self.cell if not cell.torch)


class Figures(NamedTuple):
    """Metrics of machine code, see ``testing.compile.Result``."""
    spills: int
    registers: int = 0
    instructions: int = 0
    local: int = 0


class Compiled(Facts):
    """The result of compiling a launch for a GPU, see ``testing.compile.Result``.

    slow: None if the launch is not slow (``launch_table.slow_of``). Only the spilled bytes if it is slow, and
    all metrics if it is very slow. Other metrics are not stored, because a checkout has to stay small.
    """
    status: str = "ok"
    message: str = ""
    cause: str = ""
    shared: int = 0
    slow: Figures | None = None

    @property
    def refused(self) -> bool:
        """True if a compiler has refused the launch; False if it compiled or did not finish."""
        return self.status not in ("ok", "timeout")

    @property
    def remembered(self) -> bool:
        """True if this result changes plans."""
        return self.refused or self.slow is not None

    def brief(self) -> Any:
        """Return the form that is stored.

        The form is the bytes of shared memory; for a slow launch, a list of these bytes and the metrics that
        are not 0; and for a failed launch, a dict of the fields that are not defaults.
        """
        if self.status == "ok":
            return [self.shared, *filter(None, self.slow)] if self.slow else self.shared
        return self.model_dump(exclude_defaults=True)

    @classmethod
    def of(cls, brief: Any) -> Compiled:
        """Return the result whose stored form is ``brief``."""
        if isinstance(brief, dict):
            return cls(**brief)
        shared, *figures = brief if isinstance(brief, list) else [brief]
        return cls(shared=shared, slow=Figures(*figures) if figures else None)

    def why(self, planned_shared: int) -> str:
        """Return the reason why the launch cannot run, or ``""`` if it can.

        planned_shared: bytes of shared memory that the plan assumes.
        """
        if self.status != "ok":
            return f"{self.status}: {self.message} {self.cause}".strip()
        if self.shared > planned_shared:
            return f"{self.shared} bytes of shared memory, planned {planned_shared}"
        return ""


class Tried(Facts):
    """A launch that was compiled.

    config: ``Launch.config``.
    cards: the result for each GPU.
    """
    config: str
    cards: dict[str, Compiled] = {}


class Verdict(Facts):
    """The result of one item of a layer: the import, a case in the interpreter, or a case on the torch path."""
    layer: Layer
    name: str
    ok: bool = True
    detail: str = ""


class CellResult(Facts):
    """All results of a cell.

    layers: duration of each layer in seconds.
    kernels: the ``source_hash`` of each kernel when it was compiled.
    launches: results by id. An id is the name of the kernel and a hash (``matrix.run.identity``).
    """
    cell: Cell
    date: str = ""
    torch: str = ""
    python: str = ""
    layers: dict[str, float] = {}
    verdicts: tuple[Verdict, ...] = ()
    kernels: dict[str, str] = {}
    launches: dict[str, Tried] = {}

    def verdict(self, launch: str, card: str) -> Compiled | None:
        """Return the result of a launch, or None if the current source of its kernel was not compiled."""
        return self.launches[launch].cards.get(card) if launch in self.launches else None

    def enter(self, launch: Recorded, name: str, card: str, verdict: Compiled) -> None:
        self.kernels[launch.kernel] = source_hash(launch.module, launch.kernel)
        self.launches.setdefault(name, Tried(config=launch.config)).cards[card] = verdict

    def save(self, folder: Path) -> None:
        """Write the files, each as a whole, because a run may be killed at any time.

        Launches of other cells are dropped if their kernel has changed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        own = _release(self.cell)
        with _alone(folder):
            kernels, ledger = _ledger(folder)
            for known in ledger.values():
                known.pop(own, None)
            for launch, tried in self.launches.items():
                ledger.setdefault((tried.config, launch.rpartition("-")[2]), {})[own] = by_card(
                    {card: one.brief() for card, one in sorted(tried.cards.items())})
            write_ledger(folder, {**kernels, **self.kernels}, ledger)
            _replace(folder / f"{self.cell.name}.json",
                     self.model_dump(exclude_defaults=True, exclude={"cell", "kernels", "launches"}))


def load_result(folder: Path, cell: Cell) -> CellResult:
    """Return the stored results of a cell, without those of kernels that have changed."""
    own = _release(cell)
    kernels, ledger = _ledger(folder)
    tried = {f"{config.partition(' ')[0]}-{name}": Tried(config=config, cards={
                 card: Compiled.of(brief) for card, brief in of_cards(known[own]).items()})
             for (config, name), known in ledger.items() if own in known}
    return CellResult(cell=cell, kernels=kernels, launches=tried, **_read(folder / f"{cell.name}.json"))


def together(known: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the names with equal values into one key, separated by spaces, and return the entries."""
    alike: dict[str, list[str]] = {}
    for name, one in known.items():
        alike.setdefault(json.dumps(one), []).append(name)
    return {" ".join(names): json.loads(one) for one, names in alike.items()}


def apart(known: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``together``: return one entry for each name."""
    return {name: one for names, one in known.items() for name in names.split()}


def by_card(known: Mapping[str, Any]) -> dict[str, Any]:
    """Merge as ``together``, and write ``sm80 86 90`` for ``sm80 sm86 sm90``."""
    return {names.replace(" sm", " "): one for names, one in together(known).items()}


def of_cards(known: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``by_card``: return one entry for each GPU."""
    return {f"sm{name}" if name.isdigit() else name: one for name, one in apart(known).items()}


def _ledger(folder: Path) -> tuple[dict[str, str], Ledger]:
    """Return the source of each kernel and the results of launches, without kernels that have changed."""
    kernels, ledger = read_ledger(folder)
    kernels = {name: source for name, source in kernels.items() if is_current(source, name)}
    return kernels, {(config, name): known for (config, name), known in ledger.items()
                     if config.partition(" ")[0] in kernels}


def read_ledger(folder: Path) -> tuple[dict[str, str], Ledger]:
    """Return the source of each kernel and the results of launches, including kernels that have changed."""
    kept = _read(folder / LAUNCHES)
    full = kept.get("names", {})
    return dict(kept.get("kernels", {})), {
        (config, name): apart(_renamed(of_one, full))
        for config, line in kept.get("launches", {}).items() for name, of_one in apart(line).items()}


def write_ledger(folder: Path, kernels: Mapping[str, str], ledger: Ledger) -> None:
    lines = dict[str, Any]()
    for (config, name), known in sorted(ledger.items()):
        if known:
            lines.setdefault(config, {})[name] = together({one: known[one] for one in sorted(known, key=release)})
    launches = {config: together(line) for config, line in lines.items()}
    short = _short_names(launches.values())
    _replace(folder / LAUNCHES, {
        "kernels": dict(sorted(kernels.items())),
        "names": {code: names for names, code in short.items()},
        "launches": {config: {launch: _renamed(of_one, short) for launch, of_one in line.items()}
                     for config, line in launches.items()}})


def _renamed(of_one: OfLaunch, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the results of a launch, with other names for some lists of releases and of GPUs."""
    return {names.get(releases, releases): {names.get(cards, cards): one for cards, one in known.items()}
            for releases, known in of_one.items()}


def _short_names(lines: Iterable[Mapping[str, OfLaunch]]) -> dict[str, str]:
    """Return short names for the lists of releases and of GPUs that many launches have: hashes of the lists."""
    used = Counter(names for line in lines for of_one in line.values() for releases, known in of_one.items()
                   for names in (releases, *known))
    short = dict[str, str]()
    for names in sorted(names for names, times in used.items() if len(names) > 6 and times > 3):
        code = hashlib.sha256(names.encode()).hexdigest()[:3]
        if code not in short.values():
            short[names] = code
    return short


def proven_text(table: Mapping[str, Any]) -> str:
    """Return the launch table as JSON. Configurations with equal records share a line, separated by ``; ``."""
    alike: dict[str, list[str]] = {}
    for config in sorted(table):
        alike.setdefault(compact(table[config]), []).append(config)
    lines = (f"{compact('; '.join(configs))}:{record}" for record, configs in alike.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder, because several cells run at the same time."""
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
    """Return configuration -> GPU -> the fields of ``launch_table.Slow`` for its slowest use, on NVIDIA GPUs.

    Launches that are no longer planned count as well, because planning avoids them for being slow.
    """
    slow: dict[str, dict[str, list[int]]] = {}
    for tried in result.launches.values():
        for card, verdict in tried.cards.items():
            if verdict.slow and card.startswith("sm"):
                one = launch_table.slow_of(verdict.slow.registers, verdict.slow.spills) or ()
                cards = slow.setdefault(tried.config, {})
                cards[card] = max(cards.get(card, []), [*filter(None, one)])
    return {config: dict(sorted(cards.items())) for config, cards in slow.items()}


# The fields of a correct case in a GPU record, which stores them as a list. A wrong case is stored as a dict.
RIGHT = ("dtype", "worst", "rms", "row", "allowed")


def load_gpu(path: Path) -> dict[str, Any]:
    """Return the record of a GPU, with a dict for each case and the source of each configuration."""
    record = json.loads(path.read_text(encoding="utf-8"))
    configs = source_of_each(record.get("configs", {}))
    rows = [{"op": op, "case": case, **dict(zip(RIGHT, one, strict=True)), "ok": True}
            if isinstance(one, list) else one
            for op, cases in record.get("rows", {}).items()
            for case, of_one in cases.items() for one in of_one]
    return {**record, "configs": configs, "rows": rows}


def by_source(configs: Mapping[str, str]) -> dict[str, list[str]]:
    """Return configurations in the form of a GPU record, without the kernel's name, by source and kernel."""
    kept: dict[str, list[str]] = {}
    for config, source in sorted(configs.items()):
        kernel, _, tile = config.partition(" ")
        kept.setdefault(f"{source} {kernel}", []).append(tile)
    return kept


def source_of_each(kept: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the source of each configuration, from the result of ``by_source``.

    Raises ValueError if a key names no kernel, as in older records.
    """
    if old := [key for key in kept if " " not in key]:
        raise ValueError(f"configs: got the key {old[0]!r} of an older record, need a source and a kernel; "
                         "delete the file and run python -m matrix.gpu")
    return {f"{kernel} {tile}": source for key, tiles in kept.items()
            for source, kernel in [key.split(" ")] for tile in tiles}


def by_case(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return rows in the form of a GPU record, by op and case, with errors rounded to two digits.

    The row of a right case becomes a list with the fields RIGHT. The list has no field for bitwise
    repetition, because every right case repeats bitwise.
    """
    kept: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        rounded = {name: float(f"{value:.1e}") if isinstance(value, float) else value
                   for name, value in row.items()}
        brief = [rounded[name] for name in RIGHT] if row["ok"] else rounded
        kept.setdefault(row["op"], {}).setdefault(row["case"], []).append(brief)
    return kept


def one_a_line(fields: dict[str, Any]) -> str:
    """Return JSON with one line for each entry of a long value, so that a diff shows the changed entries."""
    def block(value: Any) -> str:
        if isinstance(value, dict):
            entries = [f"{compact(name)}:{compact(one)}" for name, one in value.items()]
        elif isinstance(value, (list, tuple)) and any(isinstance(one, (dict, list)) for one in value):
            entries = [compact(one) for one in value]
        else:
            return compact(value)
        opened, closed = "{}" if isinstance(value, dict) else "[]"
        return f"{opened}\n" + ",\n".join(entries) + f"\n{closed}" if entries else opened + closed
    return "{\n" + ",\n".join(f"{compact(name)}: {block(value)}"
                              for name, value in fields.items()) + "\n}\n"
