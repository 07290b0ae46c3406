"""What doctor found, as data and as text. Nothing here asks the machine anything."""
from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field, field_validator, model_validator

# worked around: something is in the way and costs nothing worth telling. degraded: a GPU that is not used, or
# used at a price, which is named.
Status = Literal["ok", "worked around", "degraded", "problem", "could not check"]
# worst first
STATUSES: tuple[Status, ...] = ("problem", "degraded", "worked around", "could not check", "ok")

# A report is made to be pasted into an issue: whose machine it is, and what identifies it, stays out.
LEFT_OUT = ((r"(?<![\w.~-])(/home/[^/\s'\":]+|/Users/[^/\s'\":]+|/root\b|[A-Z]:\\Users\\[^\\\s'\"]+)", "~"),
            (r"://[^/\s@]+@", "://"),
            (r"(?i)\b(\w*(?:token|password|secret|api_?key)\w*)=\S+", r"\1=..."),
            (r"(?i)\b(?:GPU-|MIG-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "(uuid)"))


def scrub(text: str) -> str:
    """``text`` without home folders, credentials and UUIDs."""
    home = os.path.expanduser("~")
    if len(home) > 3:
        text = text.replace(home, "~")
    for pattern, instead in LEFT_OUT:
        text = re.sub(pattern, instead, text)
    return text


class Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _scrubbed(cls, value: Any) -> Any:
        return scrub(value) if isinstance(value, str) else value


class Device(Facts):
    """A machine that was planned for. where: torch's name of the device (``cuda:0``), or ``named`` for one
    described by hand."""
    where: str
    name: str
    backend: str
    sm: str
    triton: str
    ptxas: str
    torch: str
    shared: int
    sms: int

    def __str__(self) -> str:
        gpu = f"{self.name} {self.sm}, "
        card = {"cuda": gpu, "hip": gpu, "interpreter": "Triton's interpreter, "}.get(self.backend, "")
        ptxas = f", ptxas {self.ptxas}" if self.ptxas else ""
        return f"{self.where}: {card}triton {self.triton or 'none'}{ptxas}, torch {self.torch or 'unknown'}"


class Check(Facts):
    """fix: a command that repairs it, or ``""``."""
    name: str
    status: Status
    detail: str
    fix: str = ""


class OpPlan(Facts):
    """What dispatch plans for an op's typical calls. where: the devices it holds for. evidence: ``ran``,
    ``compiled``, ``compiled, slow: `` and what spills, ``no record``, and ``plain torch`` or ``interpreter``
    where no kernel of ours is compiled. cost: of a degraded op, what that takes."""
    op: str
    where: str
    path: str
    verdict: Status
    because: str
    remedy: str
    evidence: str
    cost: str = ""


class Issue(Facts):
    """A known issue whose versions and cards include this machine. status: whether our launches meet it, and
    what happens then."""
    id: str
    where: str
    status: Status
    effect: str
    detail: str
    url: str


class Ran(Facts):
    """A case that doctor really ran, forward and backward, against the float64 reference."""
    case: str
    where: str
    dtype: str
    status: Status
    detail: str
    seconds: float


class Package(Facts):
    """A package beside flashlin that is installed. imports: whether it can be imported, and what was raised
    if not. patch: what ``flashlin.patch`` would change, or has changed."""
    name: str
    version: str
    status: Status
    imports: str
    patch: str = ""


class Binding(Facts):
    """Kernels that are called through a loaded file of another package. where: that file, or the package.
    implementation: whose functions they are; ``torch`` is the model's own, and why says why."""
    where: str
    kernels: str
    implementation: str
    status: Status
    why: str


class Flaw(Facts):
    """What a package is known to do slowly or wrongly (``compat/known_flaws.py``). where: the package, or the
    loaded models that it concerns. status: ``worked around`` where a patch in force takes it away,
    ``could not check`` where it depends on how the program calls, which the effect says."""
    id: str
    where: str
    status: Status
    effect: str
    remedy: str
    source: str


class Layer(Facts):
    """A function that layers of a model call. layers: their names, those that are alike in one
    (``layers.0-2,4.attn``). function: as the layer calls it, with the kernel that it is, where that has
    another name. implementation: as in Binding. on: device and dtype of the weights. path: what flashlin
    plans for it there, with the sizes of the layer, ``""`` if they cannot be read; because says why, then."""
    layers: str
    kind: str
    function: str
    implementation: str
    on: str
    path: str
    verdict: Status
    because: str
    cost: str = ""


class Report(Facts):
    """The whole answer of ``flashlin.doctor()``. Text by ``str``, ``text()`` or ``markdown()``; JSON by
    ``model_dump_json()``."""
    version: str
    devices: tuple[Device, ...]
    checks: tuple[Check, ...]
    plans: tuple[OpPlan, ...]
    issues: tuple[Issue, ...]
    ran: tuple[Ran, ...] = ()
    packages: tuple[Package, ...] = ()
    bindings: tuple[Binding, ...] = ()
    flaws: tuple[Flaw, ...] = ()
    layers: tuple[Layer, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _computed_anew(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in cls.model_computed_fields}

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorated property
    @property
    def ok(self) -> bool:
        """Whether every op runs here and nothing is known to be wrong."""
        return not self.fails()

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorated property
    @property
    def status(self) -> Status:
        """The worst of all that was found."""
        return min(self._statuses(), key=STATUSES.index, default="ok")

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorated property
    @property
    def verdict(self) -> str:
        """One sentence."""
        stopped = [plan for plan in self.plans if plan.verdict == "problem"]
        bad = [f"{check.name}: {check.detail}" for check in self.checks if check.status == "problem"]
        bad += [f"known issue {issue.id} is not worked around"
                for issue in self.issues if issue.status == "problem"]
        bad += [f"{ran.case} {ran.dtype}: {ran.detail}" for ran in self.ran if ran.status == "problem"]
        bad += [f"{layer.layers} calls {layer.function}: {layer.because}"
                for layer in self.layers if layer.verdict == "problem"]
        if stopped:
            why = "" if bad else f" ({stopped[0].because})"
            bad.append(f"{len(stopped)} of {len(self.plans)} ops cannot run, or may be wrong{why}")
        if bad:
            more = [f"and {len(bad) - 2} more"] if len(bad) > 2 else []
            return f"Not everything works here. {'; '.join(bad[:2] + more)}."
        idle = [f"{check.name}: {check.detail}" for check in self.checks if check.status == "degraded"]
        slower = [plan for plan in self.plans if plan.verdict == "degraded"]
        if slower:
            idle.append(f"{len(slower)} of {len(self.plans)} ops do not always run kernels on the tensors as "
                        "they are (below, at what cost)")
        if idle:
            return f"Every op runs here, but not all of the GPU is used. {'; '.join(idle)}."
        others = [f"{layer.layers} calls {layer.function}: {layer.because or layer.cost}"
                  for layer in self.layers if layer.verdict == "degraded"]
        others += [f"{package.name}: {package.imports}"
                   for package in self.packages if package.status == "degraded"]
        others += [f"{flaw.where}: {flaw.effect}" for flaw in self.flaws if flaw.status == "degraded"]
        others += [f"{one.where}: {one.implementation}, {one.why}"
                   for one in self.bindings if one.status == "degraded"]
        if others:
            below = f"; and {len(others) - 1} more below" if len(others) > 1 else ""
            return ("Every op runs here. What calls other packages may run slowly or stop. "
                    f"{others[0]}{below}.")
        around = sum(plan.verdict == "worked around" for plan in self.plans)
        if around:
            return (f"Every op runs here, {around} of {len(self.plans)} by a way around a limit of this "
                    "machine (below). Nothing needs action.")
        if "worked around" in self._statuses():
            return "Every op runs here. What is marked below does no harm; nothing needs action."
        return "Every op runs here. If everything works for you, nothing below needs action."

    @property
    def exit_code(self) -> int:
        return int(self.fails())

    def fails(self, on: Status = "problem") -> bool:
        """Whether anything is as bad as ``on``, or worse."""
        return STATUSES.index(self.status) <= STATUSES.index(on)

    def _statuses(self) -> set[Status]:
        return {*(check.status for check in self.checks), *(plan.verdict for plan in self.plans),
                *(issue.status for issue in self.issues), *(ran.status for ran in self.ran),
                *(package.status for package in self.packages), *(one.status for one in self.bindings),
                *(flaw.status for flaw in self.flaws), *(layer.verdict for layer in self.layers)}

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """(title, columns, rows). The column ``where`` only if there is more than one device."""
        many = len(self.devices) > 1
        yield ("The model",
               ("", "layers", "class", "calls", "of", "on", "flashlin's plan", "because", "cost"),
               [(one.verdict, one.layers, one.kind, one.function, one.implementation, one.on, one.path,
                 one.because, one.cost and f"cost: {one.cost}") for one in self.layers])
        yield ("Ops", ("", "op", *["where"] * many, "path", "evidence", "because", "remedy", "cost"),
               [(p.verdict, p.op, *[p.where] * many, p.path, p.evidence, p.because, p.remedy,
                 p.cost and f"cost: {p.cost}") for p in self.plans])
        yield ("Checks", ("", "check", "found", "fix"),
               [(c.status, c.name, c.detail, c.fix and f"fix: {c.fix}") for c in self.checks])
        yield ("Packages beside flashlin", ("", "package", "version", "imports", "patch"),
               [(p.status, p.name, p.version, p.imports, p.patch) for p in self.packages])
        yield ("What they are bound to now", ("", "where", "of", "kernels", "why"),
               [(b.status, b.where, b.implementation, b.kernels, b.why) for b in self.bindings])
        yield ("What they are known to do here", ("", "flaw", "where", "effect", "fix", "source"),
               [(f.status, f.id, f.where, f.effect, f"fix: {f.remedy}", f.source) for f in self.flaws])
        yield ("Known issues of this machine", ("", "issue", *["where"] * many, "effect", "here", "source"),
               [(i.status, i.id, *[i.where] * many, i.effect, i.detail, i.url) for i in self.issues])
        yield ("Ran here, against the float64 reference", ("", "case", "where", "dtype", "found", "time"),
               [(r.status, r.case, r.where, r.dtype, r.detail, f"{r.seconds:.1f} s") for r in self.ran])

    def text(self) -> str:
        lines = [f"flashlin {self.version}: {self.verdict}", ""]
        lines += [f"  {device}" for device in self.devices]
        for title, _, rows in self._tables():
            if rows:
                lines += ["", title, *_aligned(rows)]
        return "\n".join(lines)

    def markdown(self) -> str:
        lines = [f"**flashlin {self.version}: {_cell(self.verdict)}**", "",
                 *(f"- {_cell(str(device))}" for device in self.devices)]
        for title, columns, rows in self._tables():
            if rows:
                lines += ["", f"### {title}", "", _row(columns), _row("---" for _ in columns),
                          *(_row(map(_cell, row)) for row in rows)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell, up to a point: long cells push the rest of their line to the
    right."""
    widths = [min(max(len(cell) for cell in column), 64) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    """A table cell on one line that Markdown reads as plain text."""
    return re.sub(r"([|*_<>`\\])", r"\\\1", " ".join(text.split()))
