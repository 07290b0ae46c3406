"""Run the matrix: every Triton release against every card, without a GPU. Behind ``python -m matrix``, which
says what its options are.

A cell's layers: ``import`` (every module and public name, under that release), ``plan`` (every call of
workload.py on every card), ``compile`` (what those calls would start, to machine code, a child process each),
``interpret`` (the kernels' numbers on the CPU), ``torch`` (the same without kernels). Results are kept after
each step, by what was compiled: a run that was killed goes on where it was, and a change of one kernel
repeats only what it touches.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from flashlin.diagnostics.quick import watch
from flashlin.policy import Policy, settings
from flashlin.testing.compile import NOT_TRIED, Job, compiling
from flashlin.testing.environments import torch_environment, triton_environment
from flashlin.testing.record import Recorded, source_of
from matrix.results import Card, Cell, CellResult, Compiled, Layer, Verdict, load_result
from matrix.squares import Found, Outcome, Planned

RUNNING: tuple[Layer, ...] = ("interpret", "torch")
SAVED_EVERY = 5.0  # seconds
LIMIT = 300.0  # seconds for an import
Progress = Callable[[str, int, int, str], None]  # layer, done, of, what was last


def run(cell: Cell, cards: tuple[Card, ...], folder: Path, layers: tuple[str, ...] = (), *, jobs: int = 0,
        timeout: float = 180, progress: Progress = lambda *_: None) -> Found:
    """Run a cell's layers (those named, or all), keep what was found in ``folder`` and return it.

    jobs: compilers at a time, 0 for one per core; timeout: seconds for each kernel. Raises NotInstallable,
    which quotes pip.
    """
    import torch
    result = load_result(folder,
                         cell).model_copy(update={"date": datetime.date.today().isoformat(),
                                                  "torch": cell.torch or torch.__version__,
                                                  "python": platform.python_version()})
    planned, untried = Planned(), dict[str, str]()

    def wanted(layer: Layer) -> bool:
        return layer in cell.layers and (not layers or layer in layers)

    def enter(layer: Layer, found: Callable[[], Iterable[Verdict]]) -> None:
        began = time.monotonic()
        result.verdicts = (*(one for one in result.verdicts if one.layer != layer), *found())
        result.layers[layer] = round(time.monotonic() - began, 1)

    if wanted("import"):
        progress("import", 0, 1, "")
        enter("import", lambda: [imports(cell)])
    if wanted("plan") or wanted("compile"):
        began = time.monotonic()
        planned = plans(cell, cards, progress)
        result.layers["plan"] = round(time.monotonic() - began, 1)
        forget(result, planned, cards)
        result.save(folder)
        if wanted("compile"):
            untried = compile_all(result, planned, cards, folder, jobs, timeout, progress)
    for layer in RUNNING:
        if wanted(layer):
            enter(layer, partial(cases, cell, layer, progress))
    result.save(folder)
    return Found(result, planned, untried)


def plans(cell: Cell, cards: Sequence[Card], progress: Progress = lambda *_: None) -> Planned:
    """Of every call on every card, which takes half a second for each card."""
    import torch

    from matrix.workload import calls, seen
    launches: dict[str, Recorded] = {}
    shared: dict[tuple[str, str], int] = {}
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
            # what is refused there can be compiled nevertheless
            if target.backend == "hip" and target.triton:
                with settings(policy="off"):
                    found = seen(call, target)
            ids = {identity(launch): launch for launch in found.launches} if found else {}
            launches.update(ids)
            shared.update({(name, card.name): launch.shared for name, launch in ids.items()})
            steps = [(reason, remedy) for plan in own for reason, remedy in plan.steps if reason.forced]
            refused = [str(reason) for plan in own for reason in plan.refused]
            outcomes.append(Outcome(
                op=call.op, call=call.label, card=card.name, path=own[-1].path if own else "", failed=failed,
                launches=tuple(ids), remedies=tuple(dict.fromkeys(remedy for _, remedy in steps)),
                because=tuple(dict.fromkeys([*(f"{reason.code}: {reason.got}" for reason, _ in steps),
                                             *refused]))))
    return Planned(tuple(outcomes), launches, shared)


def identity(launch: Recorded) -> str:
    """Of what is compiled: the kernel's source and all it was specialised for. (The plan's estimates are no
    part of it.)"""
    facts = launch.fields()
    for name in ("shared", "traits", "config"):
        del facts[name]
    return (
        f"{launch.kernel}-{hashlib.sha256((source_of(launch.module, launch.kernel) + json.dumps(facts)).encode()).hexdigest()[:10]}")


def forget(result: CellResult, planned: Planned, cards: Sequence[Card]) -> None:
    """Of these cards what is planned no more, except refusals: what was refused is planned otherwise only as
    long as that is remembered."""
    names, places = {card.name for card in cards}, set(planned.places)
    for launch, tried in list(result.launches.items()):
        for card in names & set(tried.cards):
            if (launch, card) not in places and not tried.cards[card].refused:
                del tried.cards[card]
        if not tried.cards:
            del result.launches[launch]


def compile_all(result: CellResult, planned: Planned, cards: Sequence[Card], folder: Path, jobs: int,
                timeout: float, progress: Progress) -> dict[str, str]:
    """What has no verdict yet; each verdict is in ``result`` at once, and in its file soon. Returns card ->
    how many launches could not be tried, and why. A first launch for each card goes ahead: where it cannot be
    tried (no linker for AMD, say), neither can the others."""
    names = {card.name: card for card in cards}
    waiting = [(launch, card) for launch, card in planned.places
               # a busy machine's, perhaps
               if (known := result.verdict(launch, card)) is None or known.status == "timeout"]
    done, of = len(planned.places) - len(waiting), len(planned.places)
    progress("compile", done, of, "")
    began = saved = time.monotonic()
    before = result.layers.get("compile", 0.0)
    untried: dict[str, list[str]] = {}
    first = list({card: (launch, card) for launch, card in reversed(waiting)}.values())
    try:
        for ahead, batch in ((True, first), (False, waiting)):
            todo = [(launch, card)
                    for launch, card in batch if ahead
                    or ((launch, card) not in first and card not in untried)]
            if not todo:
                continue
            for number, found in compiling([Job(names[card].arch, planned.launches[launch])
                                            for launch, card in todo],
                                           triton_environment(result.cell.triton), at_once=jobs,
                                           timeout=timeout):
                launch, card = todo[number]
                done += 1
                if found.status == NOT_TRIED:
                    untried.setdefault(card, []).append(found.message)
                    why = f"{NOT_TRIED}: {found.message}"
                else:
                    verdict = Compiled(status=found.status, message=found.message[:500],
                                       cause=found.cause[:300], shared=found.shared)
                    result.enter(planned.launches[launch], launch, card, verdict)
                    why = verdict.why(planned.shared[launch, card])
                progress("compile", done, of, f"{launch} {card} {why or 'ok'}")
                if time.monotonic() - saved > SAVED_EVERY:
                    result.save(folder)
                    saved = time.monotonic()
    finally:
        if waiting:
            result.layers["compile"] = round(before + time.monotonic() - began, 1)
            result.save(folder)
    every = Counter(card for _, card in planned.places)
    left = Counter(card for launch, card in planned.places if result.verdict(launch, card) is None)
    return {card: f"{left[card]} of {every[card]} kernels not tried: {'; '.join(dict.fromkeys(why))}"
            for card, why in untried.items()}


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
    """Whether every module and public name is there under that release, and the import leaves the process
    alone."""
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False,
                         timeout=LIMIT, env={**os.environ, **environment(cell)})
    if ran.returncode:
        wrong, detail = [ran.stderr.strip()[-500:]], ""
    else:
        told = json.loads(ran.stdout.splitlines()[-1])
        wrong, detail = list(told["wrong"]), f"{told['modules']} modules"
        wrong += [f"{name} {got} was imported"
                  for name, got, need in (("Triton", told["triton"], cell.triton),
                                          ("torch", told["torch"], cell.torch))
                  if need and got != need]
    return Verdict(layer="import", name="import", ok=not wrong, detail="; ".join(wrong) or detail)


def environment(cell: Cell, interpreter: bool = False) -> dict[str, str]:
    return torch_environment(cell.torch, cell.triton) if cell.torch else triton_environment(cell.triton,
                                                                                            interpreter=interpreter)


def cases(cell: Cell, layer: Layer, progress: Progress) -> Iterator[Verdict]:
    """The quick cases of every op on the CPU, in children of that release: kernels in the interpreter, or the
    torch path."""
    interpreted = layer == "interpret"
    variables = {**environment(cell, interpreted), "TRITON_INTERPRET": str(int(interpreted))}
    for found in watch("cpu", None, Policy(), environment=variables, progress=partial(progress, layer)):
        yield Verdict(layer=layer, name=f"{found.case} {found.dtype}", ok=found.status == "ok",
                      detail=found.detail[:300])
