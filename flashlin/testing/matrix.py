"""Run the matrix: every Triton release against every card, without a GPU. Behind ``python -m matrix``, which says what its options are.

A cell's layers: ``import`` (every module and public name, under that release), ``plan`` (every call of workload.py on every card), ``compile``
(what those calls would start, to machine code, a child process each), ``interpret`` (the kernels' numbers on the CPU), ``torch`` (the same
without kernels). Results are kept after each step, by what was compiled: a run that was killed goes on where it was, and a change of one
kernel repeats only what it touches.
"""
from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from flashlin.policy import Policy, settings
from flashlin.testing.compile import Job, Result, compiling
from flashlin.testing.environments import torch_environment, triton_environment
from flashlin.testing.quick import watch
from flashlin.testing.record import Recorded, is_current, source_hash, source_of
from flashlin.testing.results import Card, Cell, CellResult, Compiled, Described, Layer, Outcome, Verdict, load_result

RUNNING: tuple[Layer, ...] = ("interpret", "torch")
SAVED_EVERY = 5.0  # seconds
LIMIT = 300.0  # seconds for an import
Progress = Callable[[str, int, int, str], None]  # layer, done, of, what was last


def run(cell: Cell, cards: tuple[Card, ...], folder: Path, layers: tuple[str, ...] = (), *, jobs: int = 0, timeout: float = 180,
        progress: Progress = lambda *_: None) -> CellResult:
    """Run a cell's layers (those named, or all), keep what was found in ``folder`` and return it.

    jobs: compilers at a time, 0 for one per core; timeout: seconds for each kernel. Raises NotInstallable, which quotes pip.
    """
    import torch
    result = load_result(folder, cell)
    result = result.model_copy(update={"date": datetime.date.today().isoformat(), "torch": cell.torch or torch.__version__,
                                       "python": platform.python_version()})

    def wanted(layer: Layer) -> bool:
        return layer in cell.layers and (not layers or layer in layers)

    began = time.monotonic()
    if wanted("import"):
        progress("import", 0, 1, "")
        result.verdicts["import"] = (imports(cell),)
        result.layers["import"] = round(time.monotonic() - began, 1)
    began = time.monotonic()
    if wanted("plan") or wanted("compile"):
        outcomes, launches, estimates = plans(cell, cards, progress)
        kept = tuple(outcome for outcome in result.outcomes if outcome.card not in {card.name for card in cards})
        needed = {launch for outcome in (*kept, *outcomes) for launch in outcome.launches}
        # what was refused is planned otherwise, and stays so only as long as it is remembered
        needed |= {launch for place, one in result.compiled.items() if one.refused and is_current(
            result.launches[launch := place.partition("@")[0]].source, launch.rpartition("-")[0])}
        result = result.model_copy(update={
            "outcomes": kept + outcomes,
            "launches": {name: one for name, one in {**result.launches, **{name: _described(one) for name, one in launches.items()}}.items()
                         if name in needed},
            "compiled": {place: one.model_copy(update={"planned_shared": estimates.get(place, one.planned_shared)})
                         for place, one in result.compiled.items() if place.partition("@")[0] in needed}})
        result.layers["plan"] = round(time.monotonic() - began, 1)
        result.save(folder)
        if wanted("compile"):
            compile_all(result, cards, launches, estimates, folder, jobs, timeout, progress)
    for layer in RUNNING:
        if wanted(layer):
            began = time.monotonic()
            result.verdicts[layer] = tuple(cases(cell, layer, progress))
            result.layers[layer] = round(time.monotonic() - began, 1)
    result.save(folder)
    return result


def plans(cell: Cell, cards: tuple[Card, ...], progress: Progress) -> tuple[tuple[Outcome, ...], dict[str, Recorded], dict[str, int]]:
    """Of every call on every card; the launches they come to, by id; and the shared memory planned for each, by ``id@card``."""
    import torch

    from flashlin.testing.workload import calls, seen
    launches: dict[str, Recorded] = {}
    estimates: dict[str, int] = {}
    outcomes = []
    for n, card in enumerate(cards):
        progress("plan", n, len(cards), card.name)
        target = card.target(cell.triton, torch.__version__)
        for call in calls():
            found, failed = None, ""
            try:
                found = seen(call, target)
            except Exception as error:  # a call that breaks while it is planned is this row's result
                failed = f"{type(error).__name__}: {str(error)[:300]}"
            own = [plan for plan in found.plans if plan.asked.op == call.op] if found else []
            if target.backend == "hip" and target.triton:  # what is refused there can be compiled nevertheless
                with settings(policy="off"):
                    found = seen(call, target)
            ids = [identity(launch) for launch in found.launches] if found else []
            launches.update(zip(ids, found.launches if found else (), strict=True))
            estimates.update({f"{name}@{card.name}": launches[name].shared for name in ids})
            steps = [(reason, remedy) for plan in own for reason, remedy in plan.steps if reason.forced]
            refused = [str(reason) for plan in own for reason in plan.refused]
            outcomes.append(Outcome(
                op=call.op, call=call.label, card=card.name, path=own[-1].path if own else "", failed=failed, launches=tuple(ids),
                remedies=tuple(dict.fromkeys(remedy for _, remedy in steps)),
                because=tuple(dict.fromkeys([*(f"{reason.code}: {reason.got}" for reason, _ in steps), *refused]))))
    return tuple(outcomes), launches, estimates


def _described(launch: Recorded) -> Described:
    return Described(text=str(launch), config=launch.config, source=source_hash(launch.module, launch.kernel))


def identity(launch: Recorded) -> str:
    """Of what is compiled: the kernel's source and all it was specialised for. (The plan's estimates are no part of it.)"""
    facts = json.loads(launch.to_json())
    for name in ("shared", "traits", "config"):
        del facts[name]
    return f"{launch.kernel}-{hashlib.sha256((source_of(launch.module, launch.kernel) + json.dumps(facts)).encode()).hexdigest()[:10]}"


def compile_all(result: CellResult, cards: tuple[Card, ...], launches: dict[str, Recorded], estimates: dict[str, int], folder: Path, jobs: int,
                timeout: float, progress: Progress) -> None:
    """What has no verdict yet; each verdict is in ``result`` at once, and in its file soon."""
    names = {card.name: card for card in cards}
    places = dict.fromkeys((launch, outcome.card) for outcome in result.outcomes if outcome.card in names for launch in outcome.launches)
    known = {place for place, one in result.compiled.items() if one.status != "timeout"}  # a busy machine's, perhaps
    todo = [(launch, names[card]) for launch, card in places if f"{launch}@{card}" not in known]
    progress("compile", len(places) - len(todo), len(places), "")
    if not todo:
        return
    began = saved = time.monotonic()
    before = result.layers.get("compile", 0.0)
    try:
        for done, (number, found) in enumerate(compiling([Job(card.arch, launches[launch]) for launch, card in todo],
                                                         triton_environment(result.cell.triton), at_once=jobs, timeout=timeout), 1):
            launch, card = todo[number]
            result.compiled[f"{launch}@{card.name}"] = verdict = _compiled(found, estimates[f"{launch}@{card.name}"])
            progress("compile", len(places) - len(todo) + done, len(places), f"{launch} {card.name} {verdict.why or 'ok'}")
            if time.monotonic() - saved > SAVED_EVERY:
                result.save(folder)
                saved = time.monotonic()
    finally:
        result.layers["compile"] = round(before + time.monotonic() - began, 1)
        result.save(folder)


def _compiled(found: Result, planned_shared: int) -> Compiled:
    return Compiled(status=found.status, message=found.message[:500], cause=found.cause[:300], registers=found.registers, spills=found.spills,
                    shared=found.shared, planned_shared=planned_shared, seconds=found.seconds)


IMPORTS = """
import importlib, json, os, pkgutil, sys
before = dict(os.environ)
import torch
import flashlin
names = [name for _, name, _ in pkgutil.walk_packages(flashlin.__path__, "flashlin.") if name != "flashlin.__main__" and ".testing" not in name]
for name in names:
    importlib.import_module(name)
missing = [name for name in flashlin.__all__ if not hasattr(flashlin, name)]
import triton
changed = sorted(name for name in set(before) | set(os.environ) if before.get(name) != os.environ.get(name))
wrong = [text for text in (missing and f"no {missing}", changed and f"environment changed: {changed}",
                           torch.cuda.is_initialized() and "a CUDA context was made") if text]
print(json.dumps({"triton": triton.__version__, "torch": torch.__version__.partition("+")[0], "modules": len(names), "wrong": wrong}))
"""


def imports(cell: Cell) -> Verdict:
    """Whether every module and public name is there under that release, and the import leaves the process alone."""
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False, timeout=LIMIT,
                         env={**os.environ, **environment(cell)})
    if ran.returncode:
        wrong, detail = [ran.stderr.strip()[-500:]], ""
    else:
        told = json.loads(ran.stdout.splitlines()[-1])
        wrong, detail = list(told["wrong"]), f"{told['modules']} modules"
        wrong += [f"{name} {got} was imported" for name, got, need in (("Triton", told["triton"], cell.triton), ("torch", told["torch"], cell.torch))
                  if need and got != need]
    return Verdict(name="import", ok=not wrong, detail="; ".join(wrong) or detail, seconds=round(time.monotonic() - began, 1))


def environment(cell: Cell, interpreter: bool = False) -> dict[str, str]:
    return torch_environment(cell.torch, cell.triton) if cell.torch else triton_environment(cell.triton, interpreter=interpreter)


def cases(cell: Cell, layer: Layer, progress: Progress) -> Iterator[Verdict]:
    """The quick cases of every op on the CPU, in children of that release: kernels in the interpreter, or the torch path."""
    interpreted = layer == "interpret"
    variables = {**environment(cell, interpreted), "TRITON_INTERPRET": str(int(interpreted))}
    for found in watch("cpu", None, Policy(), environment=variables, progress=partial(progress, layer)):
        yield Verdict(name=f"{found.case} {found.dtype}", ok=found.status == "ok", detail=found.detail[:300], seconds=round(found.seconds, 2))
