"""Run the cells of the matrix: every Triton release for every GPU. No GPU is needed.

This module does the work of ``python -m matrix run``, and its ``--help`` lists the options. A cell has these
layers:

  import      import every module and public name under the release of the cell
  plan        plan every call of workload.py on every GPU
  compile     compile the launches of these plans to machine code, each in a child process
  interpret   run the quick cases with the kernels in Triton's interpreter on the CPU
  torch       run the quick cases on the torch path, without kernels

Results are saved while a layer runs, with the identity of the compiled code. A run that was killed continues
at the same point, and a change of one kernel repeats only its own compilations.
"""
from __future__ import annotations

import datetime
import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from flashlin import dispatch
from flashlin.compat.subprocesses import python, run_to_end
from flashlin.diagnostics.self_test import watch
from flashlin.guards import launch_table
from flashlin.kernels.configs import is_hopper
from flashlin.policy import Policy, settings
from flashlin.testing.compile import NOT_TRIED, Job, Result, compiling
from flashlin.testing.environments import triton_environment
from flashlin.testing.record import Recorded, source_of
from matrix.environments import torch_environment
from matrix.results import (
    Card,
    Cell,
    CellResult,
    Compiled,
    Figures,
    Layer,
    Verdict,
    load_result,
    slow_by_config,
)
from matrix.status import CellState, Outcome, Planned

RUNNING: tuple[Layer, ...] = ("interpret", "torch")
SAVED_EVERY = 5.0  # seconds between two saves of a result
LIMIT = 300.0  # time limit of the layer "import", in seconds
Progress = Callable[[str, int, int, str], None]  # layer, number done, total, text about the last step


def run(cell: Cell, cards: tuple[Card, ...], folder: Path, layers: tuple[str, ...] = (), *, main: bool = False,
        jobs: int = 0, timeout: float = 180, progress: Progress = lambda *_: None) -> CellState:
    """Run the layers of a cell, save their results in ``folder`` and return the state of the cell.

    layers: the layers to run. Empty means all layers of the cell.
    main: plan and compile only the main calls. docs/support/spills.md counts the spills of these calls.
    jobs: number of compilers that run at the same time. 0 means one for each CPU core.
    timeout: time limit of the compilation of one kernel, in seconds.

    Raise NotInstallable, with the output of pip, if the release cannot be installed.
    """
    import torch

    from matrix.workload import is_main
    result = load_result(folder, cell)
    result.date, result.torch = datetime.date.today().isoformat(), cell.torch or torch.__version__
    result.python = platform.python_version()
    planned, first, untried = Planned(), Planned(), dict[str, str]()
    plan_all = partial(plans, cell, cards, progress, *([is_main] if main else []))

    def wanted(layer: Layer) -> bool:
        return layer in cell.layers and (not layers or layer in layers)

    def enter(layer: Layer, verdicts: Callable[[], Iterable[Verdict]]) -> None:
        began = time.monotonic()
        result.verdicts = (*(one for one in result.verdicts if one.layer != layer), *verdicts())
        result.layers[layer] = round(time.monotonic() - began, 1)

    if wanted("import"):
        progress("import", 0, 1, "")
        enter("import", lambda: [imports(cell)])
    if wanted("plan") or wanted("compile"):
        began = time.monotonic()
        plan_by(result)
        planned, first = plan_all(), plain(result, cards)
        result.layers["plan"] = round(time.monotonic() - began, 1)
        if not main:  # else it would drop the results of all other calls
            forget(result, planned.beside(first), cards)
        result.save(folder)
        if wanted("compile"):
            untried = compile_all(result, planned.beside(first), cards, folder, jobs, timeout, progress)
            while plan_by(result):  # a new plan may have slow launches again
                planned = plan_all()
                untried = compile_all(result, planned, cards, folder, jobs, timeout, progress)
            if not main:
                forget(result, planned.beside(first), cards)
    for layer in RUNNING:
        if wanted(layer):
            enter(layer, partial(cases, cell, layer, progress))
    result.save(folder)
    return CellState(result, planned, untried, first)


def plans(cell: Cell, cards: Sequence[Card], progress: Progress = lambda *_: None,
          wanted: Callable[[str, str], bool] = lambda op, label: True) -> Planned:
    """Return the plans of all wanted calls on every GPU.

    Planning takes half a second for each GPU. ``wanted`` gets the name of the op and the label of the call.
    """
    import torch

    from matrix.workload import Seen, calls, seen
    places: dict[tuple[str, str], Recorded] = {}
    outcomes = []
    for n, card in enumerate(cards):
        progress("plan", n, len(cards), card.name)
        target = card.target(cell.triton, torch.__version__)
        for call in calls():
            if not wanted(call.op, call.label):
                continue
            made, failed = Seen((), ()), ""
            try:
                made = seen(call, target)
            except Exception as error:  # an error while planning is the result of this call
                failed = f"{type(error).__name__}: {str(error)[:300]}"
            own = [plan for plan in made.plans if plan.asked.op == call.op]
            # Also compile kernels that plans avoid because they have not been run there: all kernels on AMD,
            # where plans use plain torch, and some on Hopper, where plans use other kernels.
            tried = made
            if target.triton and (target.backend == "hip" or is_hopper(target)):
                with settings(canary="trial"):
                    tried = seen(call, target)
            every = {identity(launch): launch for one in (made, tried) for launch in one.launches}
            ids = [identity(launch) for launch in (tried if target.backend == "hip" else made).launches]
            places.update({(name, card.name): launch for name, launch in every.items()})
            steps = [(reason, remedy) for plan in own for reason, remedy in plan.steps if reason.forced]
            refused = [str(reason) for plan in own for reason in plan.refused]
            outcomes.append(Outcome(
                op=call.op, call=call.label, card=card.name, path=own[-1].path if own else "", failed=failed,
                launches=tuple(ids), remedies=tuple(dict.fromkeys(remedy for _, remedy in steps)),
                because=tuple(dict.fromkeys([*(f"{reason.code}: {reason.got}" for reason, _ in steps),
                                             *refused]))))
    return Planned(tuple(outcomes), places)


def plan_by(result: CellResult) -> bool:
    """Make plans in this process use the slow launches of ``result`` instead of those in the launch table.

    Return True if this changes the launch table, so that new plans may differ from earlier ones.
    """
    triton, slow = result.cell.triton, slow_by_config(result)
    before = {config: releases[triton].pop("slow", {})
              for config, releases in launch_table.table().items() if triton in releases}
    for config, cards in slow.items():
        launch_table.table().setdefault(config, {}).setdefault(triton, {})["slow"] = cards
    if {config: cards for config, cards in before.items() if cards} == slow:
        return False
    for cached in (launch_table.slow_on, launch_table._shipped, dispatch.plan):
        cached.cache_clear()
    return True


def plain(result: CellResult, cards: Sequence[Card]) -> Planned:
    """Return the plans that the main calls would get if no launch were known to be slow."""
    from matrix.workload import is_main
    plan_by(CellResult(cell=result.cell))
    try:
        return plans(result.cell, cards, wanted=is_main)
    finally:
        plan_by(result)


def identity(launch: Recorded) -> str:
    """Return an id for the compiled code of a launch.

    It is the name of the kernel and a hash of its source and specialization. Estimates of the plan, such as
    shared memory, are not included.
    """
    facts = launch.fields()
    for name in ("shared", "traits", "config"):
        del facts[name]
    code = source_of(launch.module, launch.kernel) + json.dumps(facts)
    return f"{launch.kernel}-{hashlib.sha256(code.encode()).hexdigest()[:6]}"


def forget(result: CellResult, planned: Planned, cards: Sequence[Card]) -> None:
    """Drop the results of launches that are not planned on these GPUs.

    Results of launches that failed or are slow stay, because planning avoids such launches only while their
    results exist.
    """
    names, places = {card.name for card in cards}, set(planned.places)
    for launch, tried in list(result.launches.items()):
        for card in names & set(tried.cards):
            if (launch, card) not in places and not tried.cards[card].remembered:
                del tried.cards[card]
        if not tried.cards:
            del result.launches[launch]


def compile_all(result: CellResult, planned: Planned, cards: Sequence[Card], folder: Path, jobs: int,
                timeout: float, progress: Progress) -> dict[str, str]:
    """Compile all planned launches that have no verdict yet, and enter their verdicts in ``result``.

    The file of the result is saved every few seconds. Return GPU name -> a text with the number of launches
    that could not be tried, and the reason. One launch for each GPU is compiled first. If it cannot be tried,
    for example because the linker for AMD is missing, the other launches for this GPU are skipped.
    """
    names = {card.name: card for card in cards}
    waiting = [place for place in planned.places
               # A busy machine may have caused a timeout, so try again.
               if (known := result.verdict(*place)) is None or known.status == "timeout"]
    done, of = len(planned.places) - len(waiting), len(planned.places)
    progress("compile", done, of, "")
    began = saved = time.monotonic()
    before = result.layers.get("compile", 0.0)
    untried: dict[str, list[str]] = {}
    first = {card: (launch, card) for launch, card in reversed(waiting)}
    try:
        for ahead in (True, False):
            todo = [(launch, card) for launch, card in waiting
                    if (first[card] == (launch, card)) == ahead and card not in untried]
            if not todo:
                continue
            wanted = [Job(names[card].arch, planned.places[launch, card]) for launch, card in todo]
            for number, answer in compiling(wanted, triton_environment(result.cell.triton), at_once=jobs,
                                            timeout=timeout):
                launch, card = todo[number]
                done += 1
                if answer.status == NOT_TRIED:
                    untried.setdefault(card, []).append(answer.message)
                    why = f"{NOT_TRIED}: {answer.message}"
                else:
                    verdict = compiled(answer)
                    result.enter(planned.places[launch, card], launch, card, verdict)
                    why = verdict.why(planned.places[launch, card].shared)
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


def compiled(answer: Result) -> Compiled:
    slow = launch_table.slow_of(answer.registers, answer.spills) if answer.ok else None
    figures = Figures(answer.spills, answer.registers, answer.instructions, answer.local)
    if slow and not slow.very:
        figures = Figures(slow.spills)
    return Compiled(status=answer.status, message=answer.message[:500], cause=answer.cause[:300],
                    shared=answer.shared, slow=figures if slow else None)


def imports(cell: Cell) -> Verdict:
    """Return a verdict on the import of all modules and public names under the release of a cell.

    The import runs in a child process, so it does not change this process.
    """
    variables = environment(cell)
    ran = run_to_end(python("matrix.importing", first=variables["PYTHONPATH"]), variables, limit=LIMIT)
    if ran.code is None:
        raise RuntimeError(f"importing flashlin under {cell.name}: {ran.failure}")
    if ran.code:
        wrong, detail = [f"{ran.how}: {ran.stderr.strip()[-500:]}"], ""
    else:
        told = json.loads(ran.stdout.splitlines()[-1])
        wrong, detail = list(told["wrong"]), f"{told['modules']} modules"
        wrong += [f"{name} {got} was imported"
                  for name, got, need in (("Triton", told["triton"], cell.triton),
                                          ("torch", told["torch"], cell.torch))
                  if need and got != need]
    return Verdict(layer="import", name="import", ok=not wrong, detail="; ".join(wrong) or detail)


def environment(cell: Cell, interpreter: bool = False) -> dict[str, str]:
    if cell.torch:
        return torch_environment(cell.torch, cell.triton)
    return triton_environment(cell.triton, interpreter=interpreter)


def cases(cell: Cell, layer: Layer, progress: Progress) -> Iterator[Verdict]:
    """Run the quick cases of every op on the CPU, and yield one verdict for each case and dtype.

    The cases run in child processes with the release of the cell. The layer ``interpret`` runs kernels in
    Triton's interpreter, and the layer ``torch`` runs the torch path.
    """
    interpreted = layer == "interpret"
    variables = {**environment(cell, interpreted), "TRITON_INTERPRET": str(int(interpreted))}
    for case in watch("cpu", None, Policy(), environment=variables, progress=partial(progress, layer)):
        yield Verdict(layer=layer, name=f"{case.case} {case.dtype}", ok=case.status == "ok",
                      detail=case.detail[:300])
