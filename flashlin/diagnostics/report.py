"""The result of ``doctor`` as data, as text and as Markdown. Nothing here examines the machine."""
from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field, field_validator, model_validator

from flashlin.compat.target import GPUS
from flashlin.guards.family import USES

# worked around: a problem is avoided at no significant cost. degraded: a GPU is not used, or is used at a
# cost, which the report names.
Status = Literal["ok", "worked around", "degraded", "problem", "could not check"]
# worst first
STATUSES: tuple[Status, ...] = ("problem", "degraded", "worked around", "could not check", "ok")

GRADES = {"problem": "broken", "degraded": "degraded"}  # every other status is ok
COLOURS = {"problem": 31, "broken": 31, "degraded": 33, "worked around": 36, "ok": 32}
WIDTH, LINES = 80, 24  # of the short text
# Ways to run that cost something, worst first, with their words in the verdict ("some calls of 8 ops run ...").
PRICES = {"plain torch": "in plain torch", "fp32 copies": "on fp32 copies",
          "untested kernels": "kernels that were never tested on such a GPU",
          "slow kernels": "kernels that spill registers", "batch in parts": "with their batch in parts",
          "fewer warps": "with fewer warps"}

# A report is pasted into public issues, so it must not identify the machine or its user.
LEFT_OUT = ((r"(?<![\w.~-])(/home/[^/\s'\":]+|/Users/[^/\s'\":]+|/root\b|[A-Z]:\\Users\\[^\\\s'\"]+)", "~"),
            (r"://[^/\s@]+@", "://"),
            (r"(?i)\b(?=\w*?(?:token|password|secret|api_?key))(\w+)=\S+", r"\1=..."),
            (r"(?i)\b(?:GPU-|MIG-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "(uuid)"))


def scrub(text: str) -> str:
    """Return ``text`` without home folders, credentials and UUIDs."""
    home = os.path.expanduser("~")
    if len(home) > 3:
        text = text.replace(home, "~")
    for pattern, instead in LEFT_OUT:
        text = re.sub(pattern, instead, text)
    return text


class Facts(BaseModel):
    """A frozen record of the report; ``scrub`` is applied to each of its strings."""
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _scrubbed(cls, value: Any) -> Any:
        return scrub(value) if isinstance(value, str) else value


class Device(Facts):
    """A device for which the calls were planned: one of this machine, or one that the user named.

    where: torch's name of the device (``cuda:0``), or ``named`` for a target that the user named.
    shared: shared memory of one block, in bytes.
    sms: number of multiprocessors.
    """
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
        card = {**dict.fromkeys(GPUS, gpu), "interpreter": "Triton's interpreter, "}.get(self.backend, "")
        ptxas = f", ptxas {self.ptxas}" if self.ptxas else ""
        where = "" if self.where == "named" else f"{self.where}: "
        return f"{where}{card}triton {self.triton or 'none'}{ptxas}, torch {self.torch or 'unknown'}"


class Check(Facts):
    """A line of the report about this machine.

    fix: a command that repairs only this line, or ``""``. The report's advice repairs all lines together.
    """
    name: str
    status: Status
    detail: str
    fix: str = ""


def line(name: str, status: Status, detail: str, fix: str = "") -> Check:
    """Return a line of the report."""
    return Check(name=name, status=status, detail=detail, fix=fix)


class OpPlan(Facts):
    """The plans of dispatch for the typical calls of an op.

    where: the devices that the row is valid for.
    path: how the calls run, by dtype and kind of call.
    way: how the worst call runs: ``kernels``, ``fewer warps``, ``batch in parts``, ``slow kernels``,
        ``untested kernels``, ``fp32 copies``, ``plain torch`` or ``cannot run``.
    because: the reasons that calls do not run unchanged.
    remedy: how each reason is avoided.
    evidence: ``ran``, ``compiled``, ``compiled, slow:`` with the kernel that spills, or ``no record``;
        ``plain torch`` or ``interpreter`` if no kernel of flashlin is compiled.
    cost: the cost of a degraded op.
    """
    op: str
    where: str
    path: str
    way: str
    verdict: Status
    because: str
    remedy: str
    evidence: str
    cost: str = ""


class Advice(Facts):
    """The one thing that the user should do.

    command: a line for a shell; ``""`` if no command helps.
    why: the change that the command makes, and what prevents a better result.
    """
    command: str
    why: str

    def __str__(self) -> str:
        return " | ".join(filter(None, (self.command, self.why)))


class Issue(Facts):
    """A known issue whose releases and GPUs include this machine.

    status: ``problem`` if a launch meets the issue, ``worked around`` if planning avoids it, ``ok`` if no
        launch meets it.
    """
    id: str
    where: str
    status: Status
    effect: str
    detail: str
    url: str


class Ran(Facts):
    """A case that doctor ran, forward and backward, and compared with the float64 reference."""
    case: str
    where: str
    dtype: str
    status: Status
    detail: str
    seconds: float


class Package(Facts):
    """An installed package that flashlin can patch, or that such packages use.

    imports: the result of its import, with the error if it failed.
    patch: what ``flashlin.patch`` would change, or has changed.
    fix: the command that repairs the import.
    """
    name: str
    version: str
    status: Status
    imports: str
    patch: str = ""
    fix: str = ""


class Binding(Facts):
    """The functions that a loaded modeling file, or another package, has imported as its kernels.

    where: the file or the package.
    kernels: the names of the functions.
    implementation: the package that they come from; ``torch`` means the model's own functions.
    why: the reason for a binding to ``torch``.
    """
    where: str
    kernels: str
    implementation: str
    status: Status
    why: str


class Flaw(Facts):
    """A known flaw of another package: it runs slowly or wrongly (``compat/known_flaws.py``).

    where: the package, or the loaded models that have the flaw.
    status: ``worked around`` if a patch in force removes it, ``could not check`` if it depends on the calls
        of the program; then the effect says on which.
    """
    id: str
    where: str
    status: Status
    effect: str
    remedy: str
    source: str


class Layer(Facts):
    """A function that layers of a model call.

    layers: the names of equal layers, as one text (``layers.0-2,4.attn``).
    kind: the class of the layers.
    function: the function as the layer names it, with the kernel's name if that differs.
    implementation: the package of the function, as in Binding.
    on: device and dtype of the weights.
    path: flashlin's plan for the call, with the sizes of the layer; ``""`` if the sizes cannot be read.
    because: the reasons for the plan or for the verdict.
    """
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
    """The result of ``flashlin.doctor()``.

    ``str`` and ``text()`` are short. ``text(verbose=True)`` and ``markdown()`` show everything.
    ``model_dump_json()`` returns it as JSON.
    """
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
    advice: Advice | None = None

    @model_validator(mode="before")
    @classmethod
    def _computed_anew(cls, values: Any) -> Any:
        return values if not isinstance(values, dict) else {
            name: value for name, value in values.items() if name not in cls.model_computed_fields}

    @computed_field  # type: ignore[prop-decorator]  # mypy does not support decorated properties
    @property
    def ok(self) -> bool:
        """Return True if every op runs here and nothing is known to be wrong."""
        return not self.fails()

    @computed_field  # type: ignore[prop-decorator]  # mypy does not support decorated properties
    @property
    def status(self) -> Status:
        """Return the worst status of all rows."""
        found = [*(row.status for rows in (self.checks, self.issues, self.ran, self.packages, self.bindings,
                                           self.flaws) for row in rows),
                 *(row.verdict for rows in (self.plans, self.layers) for row in rows)]
        return min(found, key=STATUSES.index, default="ok")

    @computed_field  # type: ignore[prop-decorator]  # mypy does not support decorated properties
    @property
    def verdict(self) -> str:
        """Return ``ok``, ``degraded`` or ``broken``, and a sentence that gives the reason."""
        said = "; and ".join(_few(self._bad())) if self.fails() else self._cost() or self._plain()
        subject = self._subject()
        return f"{self.grade}. {subject}{said if subject else re.sub('^every', 'Every', said)}."

    @property
    def grade(self) -> str:
        """Return ``ok``, ``degraded`` or ``broken``."""
        return GRADES.get(self.status, "ok")

    def _subject(self) -> str:
        """Return ``For an H100 with Triton 3.2.0:`` for a named target, or ``""`` for this machine."""
        [one, *_] = [*self.devices, None]
        if one is None or one.where != "named":
            return ""
        name = one.name if one.backend in GPUS else f"machine without a GPU ({one.name})"
        an = "an" if re.match(r"[AEFHILMNORSX](?![a-z])|[AEIO][a-z]", name) else "a"
        return f"For {an} {name} with {f'Triton {one.triton}' if one.triton else 'no Triton'}: "

    def _bad(self) -> list[str]:
        """Return a text for each thing that does not run, or may give wrong results."""
        bad = [f"{check.name}: {check.detail}" for check in self.checks if check.status == "problem"]
        bad += [f"known issue {issue.id} is not worked around"
                for issue in self.issues if issue.status == "problem"]
        bad += [f"{ran.case} {ran.dtype}: {ran.detail}" for ran in self.ran if ran.status == "problem"]
        bad += [f"{layer.layers} calls {layer.function}: {layer.because}"
                for layer in self.layers if layer.verdict == "problem"]
        if stopped := [plan for plan in self.plans if plan.verdict == "problem"]:
            why = "" if bad else f" ({stopped[0].because})"
            bad.append(f"{len(stopped)} of {len(self.plans)} ops cannot run, or may be wrong{why}")
        return bad

    def _cost(self) -> str:
        """Return the reason for the grade ``degraded``, or ``""``.

        An unused GPU comes first, then a GPU that is used at a cost, then calls of other packages.
        """
        if idle := [check.detail for check in self.checks if check.status == "degraded"]:
            return f"every op runs, but {'; and '.join(_few(idle))}"
        slower = [plan for plan in self.plans if plan.verdict == "degraded"]
        cards = " and ".join(dict.fromkeys(one.name for one in self.devices if one.backend in GPUS))
        if slower and all(plan.path == "torch" for plan in self.plans):
            [(why, _)] = Counter(why for plan in slower for why in plan.because.split("; ")).most_common(1)
            whose = "this" if self._subject() else "your"
            return f"every op runs, but no kernels run on {whose} {cards}: {self._told(why)}"
        if slower:
            places = {plan.where for plan in slower}
            where = f", all on {places.pop()}" if len(self.devices) > 1 and len(places) == 1 else ""
            return f"every op runs, but {self._prices(slower)}{where}"
        # Only names: the rows of the report say what each of these layers, packages, flaws and bindings does.
        others = [*(f"{layer.layers} calls {layer.function}"
                    for layer in self.layers if layer.verdict == "degraded"),
                  *(package.name for package in self.packages if package.status == "degraded"),
                  *(flaw.where for flaw in self.flaws if flaw.status == "degraded"),
                  *(one.where for one in self.bindings if one.status == "degraded")]
        what = "; and ".join(_few(list(dict.fromkeys(others))))
        return f"every op runs, but calls of other packages may run slowly or fail: {what}" if what else ""

    def _plain(self) -> str:
        """Return the sentence for the grade ``ok``."""
        if around := [plan for plan in self.plans if plan.verdict == "worked around"]:
            return f"every op runs, {self._prices(around) or 'some of them around a limit of the machine'}"
        if not any(one.backend in GPUS for one in self.devices):
            return "every op runs, in plain torch: there is no GPU to use"
        return "every op runs kernels on the tensors as they are"

    def _prices(self, plans: list[OpPlan]) -> str:
        """Return a text such as ``some calls of 62 ops run on fp32 copies, some of 4 in plain torch``."""
        counts = Counter(plan.way for plan in {plan.op: plan for plan in reversed(plans)}.values())
        [first, *rest] = [(counts[way], how) for way, how in PRICES.items() if counts[way]] or [(0, "")]
        ops = "op" if first[0] == 1 else "ops"
        words = [f"{first[0]} {ops} run {first[1]}", *(f"{count} {how}" for count, how in rest)]
        return f"some calls of {', some of '.join(words)}" if first[0] else ""

    @property
    def exit_code(self) -> int:
        """Return 1 if something does not run or may be wrong, else 0."""
        return int(self.fails())

    def fails(self, on: Status = "problem") -> bool:
        """Return True if the status is ``on`` or worse."""
        return STATUSES.index(self.status) <= STATUSES.index(on)

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Yield (title, columns, rows) of each table; ``where`` is a column only for several devices."""
        many = len(self.devices) > 1
        yield ("The model",
               ("", "layers", "class", "calls", "package", "on", "flashlin's plan", "because", "cost"),
               [(one.verdict, one.layers, one.kind, one.function, one.implementation, one.on, one.path,
                 one.because, one.cost and f"cost: {one.cost}") for one in self.layers])
        yield ("What to do", ("command", "why"),
               [(self.advice.command, self.advice.why)] if self.advice is not None else [])
        yield ("Ops", ("", "op", *["where"] * many, "path", "evidence", "because", "remedy", "cost"),
               [(p.verdict, p.op, *[p.where] * many, p.path, p.evidence, p.because, p.remedy,
                 p.cost and f"cost: {p.cost}") for p in self.plans])
        yield ("Checks", ("", "check", "found", "fix"),
               [(c.status, c.name, c.detail, c.fix and f"fix: {c.fix}") for c in self.checks])
        yield ("Other packages", ("", "package", "version", "imports", "patch"),
               [(p.status, p.name, p.version, p.imports, p.patch) for p in self.packages])
        yield ("Functions that their files are bound to", ("", "where", "package", "kernels", "why"),
               [(b.status, b.where, b.implementation, b.kernels, b.why) for b in self.bindings])
        yield ("Their known flaws", ("", "flaw", "where", "effect", "fix", "source"),
               [(f.status, f.id, f.where, f.effect, f"fix: {f.remedy}", f.source) for f in self.flaws])
        yield ("Known issues of this machine", ("", "issue", *["where"] * many, "effect", "here", "source"),
               [(i.status, i.id, *[i.where] * many, i.effect, i.detail, i.url) for i in self.issues])
        yield ("Ran here, against the float64 reference", ("", "case", "where", "dtype", "found", "time"),
               [(r.status, r.case, r.where, r.dtype, r.detail, f"{r.seconds:.1f} s") for r in self.ran])

    def text(self, verbose: bool = False, colour: bool = False) -> str:
        """Return the report as text.

        verbose: show every op, check and known issue, in wide tables. Otherwise show what matters, in 80
            columns.
        colour: use the colours of a terminal.
        """
        if not verbose:
            return "\n".join(self._short(colour))
        lines = [f"flashlin {self.version}: {self.verdict}", ""]
        lines += [f"  {device}" for device in self.devices]
        for title, _, rows in self._tables():
            if rows:
                lines += ["", title, *_aligned(rows)]
        return "\n".join(lines)

    def _short(self, colour: bool) -> Iterator[str]:
        """Yield the lines of the short text, worst first.

        The advice comes last, next to the prompt of a terminal. The ops fill the lines of the screen that are
        left.
        """
        first = _wrapped(f"flashlin {self.version}: {self.verdict}")
        head = [_painted(first[0], self.grade, self.grade, colour), *first[1:], ""]
        for device in self.devices:
            head += _wrapped(str(device), "  ", "    ")
        rest = list(self._beside_ops(" ".join(first), colour))
        yield from [*head, "", *self._ops(LINES - len(head) - len(rest) - 1, colour), *rest]

    def _beside_ops(self, said: str, colour: bool) -> Iterator[str]:
        """Yield the lines that follow the ops, without texts that the verdict already contains (``said``)."""
        for title, entries in self._entries():
            quiet = [entry.status for entry in entries].count("ok")
            told = [entry for entry in entries if entry.status != "ok" and entry.detail not in said]
            if title == "Checks" or told or (entries and title.startswith("Ran")):
                yield f"{title}{f' ({quiet} ok)' if quiet else ''}{':' if told else ''}"
            told.sort(key=lambda entry: STATUSES.index(entry.status))
            for entry in told[:SHOWN]:
                [first, *rest] = _wrapped(f"{entry.status}  {entry.name}: {entry.detail}", "  ", "    ")
                yield from [_painted(first, entry.status, entry.status, colour), *rest]
                yield from _wrapped(f"fix: {entry.fix}", "    ", "    ") if entry.fix else ()
            if len(told) > SHOWN:
                yield f"  and {len(told) - SHOWN} more"
        if self.advice is not None:
            yield from ["", *_wrapped(f"To do: {self.advice.why}", "", "  ")]
            if self.advice.command:  # a long command continues after a backslash, as a shell reads it
                yield " \\\n    ".join(textwrap.wrap(self.advice.command, WIDTH - 6, initial_indent="  ",
                                                     break_long_words=False, break_on_hyphens=False))
        yield from ["", "More: flashlin doctor --verbose, or text(verbose=True)"]

    def _ops(self, room: int, colour: bool) -> list[str]:
        """Return the lines on ops, grouped by how their calls run, on which device and why, worst first.

        room: the number of lines to fill.
        """
        if not self.plans:
            return []
        every, every_op = ", ".join(one.where for one in self.devices), len({plan.op for plan in self.plans})
        groups: dict[tuple[Status, str, str, str], list[OpPlan]] = {}
        for plan in self.plans:
            on = "" if plan.where == every or plan.verdict == "ok" else f" on {plan.where}"
            groups.setdefault((plan.verdict, plan.way, on, plan.because), []).append(plan)
        ordered = sorted(groups.items(), key=lambda group: (
            STATUSES.index(group[0][0]), [*PRICES, group[0][1]].index(group[0][1]), -len(group[1])))
        lines = [f"Ops, by the worst of their calls ({', '.join(USES)}):"]
        for number, ((status, way, on, because), plans) in enumerate(ordered):
            ops = list(dict.fromkeys(plan.op for plan in plans))
            why = f": {self._told(because)}" if because and status != "ok" else ""
            # With several GPUs, print no number: an op that runs well on one GPU may already be counted above
            # for another GPU.
            count = "else" if status == "ok" and number and len(self.devices) > 1 else len(ops)
            [line, *more] = _wrapped(f"{count}  {way}{on}{why}", "  ", "    ")
            block = [_painted(line, way, status, colour), *more]
            if count != "else" and len(ordered) > 1 and len(ops) <= every_op // 2:
                block += _wrapped(", ".join(ops), "    ", "    ", lines=1)
            worst = plans[0].cost.rpartition("; ")[2]  # of the last call with another cost
            cost = _wrapped(f"cost: {worst}", "    ", "    ") if worst else []
            block += [] if cost and cost[0] in lines else cost
            last = number == len(ordered) - 1  # if not, keep a line free that lists the groups left
            if number == SHOWN or (number and len(lines) + len(block) + (not last) > room):
                left = dict.fromkeys(f"{way}{on}" for (_, way, on, _), _ in ordered[number:])
                return [*lines, *_wrapped(f"and {', '.join(left)}", "  ", "    ", lines=1)]
            lines += block
        return lines

    def _told(self, because: str) -> str:
        """Return ``because`` as text. If it is the id of a known issue, the effect of the issue follows."""
        return because + next((f" ({issue.effect})" for issue in self.issues if issue.id == because), "")

    def _entries(self) -> Iterator[tuple[str, list[Check]]]:
        """Yield (title, entries) of everything except the ops. Each entry has the form of a check."""
        yield ("The model", [line(one.layers, one.verdict, f"calls {one.function}, from {one.implementation}"
                                  + (f": {one.path}" if one.path else "")
                                  + (f"; {one.because}" if one.because else "")) for one in self.layers])
        # the advice has the commands of problems and of what is degraded
        yield "Checks", [line(one.name, one.status, one.detail,
                              "" if one.status in ("problem", "degraded") else one.fix)
                         for one in self.checks]
        yield ("Other packages",
               [*(line(f"{one.name} {one.version}", one.status, one.imports) for one in self.packages),
                *(line(one.where, one.status, f"{one.kernels} from {one.implementation}, {one.why}")
                  for one in self.bindings),
                *(line(one.where, one.status, one.effect, one.remedy) for one in self.flaws)])
        yield ("Ran, against the float64 reference",
               [line(f"{one.case} {one.dtype}", one.status, one.detail) for one in self.ran])

    def markdown(self) -> str:
        """Return the report as Markdown for an issue on GitHub, with tables in collapsed sections."""
        lines = [f"**flashlin {self.version}: {_cell(self.verdict)}**", "",
                 *(f"- {_cell(str(device))}" for device in self.devices)]
        for title, columns, rows in self._tables():
            if rows:
                lines += ["", f"<details><summary>{title} ({len(rows)})</summary>", "", _row(columns),
                          _row("---" for _ in columns), *(_row(map(_cell, row)) for row in rows),
                          "", "</details>"]
        return "\n".join(lines)

    _repr_markdown_ = markdown

    def __repr__(self) -> str:
        return f"<flashlin.Report {self.grade}: {len(self.plans)} ops on {'; '.join(map(str, self.devices))}>"

    def __str__(self) -> str:
        return self.text()


SHOWN = 4  # maximum number of groups of ops, and of entries of a list


def _few(texts: list[str]) -> list[str]:
    return texts[:2] + ([f"{len(texts) - 2} more"] if len(texts) > 2 else [])


def _painted(text: str, part: str, status: str, colour: bool) -> str:
    """Return a text whose first occurrence of ``part`` has the colour of a status."""
    painted = f"\x1b[{COLOURS[status]}m{part}\x1b[0m" if colour and status in COLOURS else part
    return text.replace(part, painted, 1)


def _wrapped(text: str, first: str = "", then: str = "", lines: int | None = None) -> list[str]:
    """Wrap a text into lines of the short report. With ``lines`` it is cut; only lists of names may be."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=then, max_lines=lines,
                         placeholder=" ...", break_on_hyphens=False) or [first]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as lines, with columns as wide as their widest cell, but at most 64.

    A longer cell moves the rest of its line to the right.
    """
    widths = [min(max(len(cell) for cell in column), 64) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    """Return text as a cell of a Markdown table: on one line, with special characters escaped."""
    return re.sub(r"([|*_<>`\\])", r"\\\1", " ".join(text.split()))
