"""Record the metrics of the main kernels on five GPU architectures under one Triton release.

The metrics are the registers, the spilled bytes, and the instructions of the longest loop. They come from the
compiler, so no GPU is needed. tests/matrix/test_figures.py fails if a kernel becomes worse than its record.

    python -m matrix figures

compiles the kernels that changed since the record, and writes the new metrics. It takes a quarter of an hour
if all kernels changed. Read the diff of the record afterwards.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flashlin.compat.target import parse
from flashlin.testing.compile import Job, compiling
from flashlin.testing.environments import triton_environment
from flashlin.testing.record import Recorded
from matrix.results import Figures, one_a_line
from matrix.run import identity
from matrix.workload import calls, is_main, seen

RECORD = Path(__file__).with_name("results") / "figures-triton-3.6.0.json"
TRITON = RECORD.stem.rpartition("-")[2]
CARDS = (80, 89, 90, 100, 120)
# The shapes that most models train with. docs/support/spills.md lists the spills of other sizes.
SHAPES = {"bfloat16 D=128", "float16 D=64", "bfloat16 P=64 N=128", "float16 P=64 N=128", "bfloat16 N=16",
          "float16 N=16"}
# A metric has grown if it is larger by more than a tenth and by more than this amount.
SLACK = Figures(spills=64, registers=8, instructions=16, local=8)


class Measured(NamedTuple):
    """The metrics of one compiled kernel.

    id: the id of the compiled code (``matrix.run.identity``). The metrics hold while the id stays the same.
    figures: the metrics.
    """
    id: str
    figures: Figures


Record = dict[str, dict[str, Measured]]  # GPU -> "op label kernel" -> metrics


def planned(sm: int) -> dict[str, Recorded]:
    """Return "op label kernel" -> launch, for the main kernels that are planned on a GPU architecture.

    sm: the architecture as a number, such as 90.
    """
    launches: dict[str, Recorded] = {}
    for call in calls():
        if is_main(call.op, call.label) and call.label in SHAPES:
            for launch in seen(call, parse(f"triton={TRITON},sm={sm}")).launches:
                name = f"{call.op} {call.label} {launch.kernel}"
                # Kernels without matrix products are limited by memory, except Mamba's selective scan.
                if "dot" in launch.traits or launch.kernel.startswith("selective"):
                    # The forward and the backward pass may use the same kernel.
                    launches[f"{name} again" if name in launches else name] = launch
    return launches


def measure(sm: int, launches: dict[str, Recorded], *, jobs: int = 0) -> Iterator[tuple[str, Measured]]:
    """Compile launches for a GPU architecture, and yield the name and the metrics of each.

    Launches with the same code are compiled once. Raise RuntimeError if a launch does not compile.
    """
    distinct = {identity(launch): launch for launch in launches.values()}
    todo = [Job(sm, launch, loop=True) for launch in distinct.values()]
    found: dict[str, Figures] = {}
    for number, one in compiling(todo, triton_environment(TRITON), at_once=jobs):
        if not one.ok:
            raise RuntimeError(f"{todo[number].launch} on sm{sm}: {one.status}: {one.message} {one.cause}")
        found[list(distinct)[number]] = Figures(one.spills, one.registers, one.instructions, one.local)
    for name, launch in launches.items():
        yield name, Measured(identity(launch), found[identity(launch)])


def changed(sm: int, record: Record) -> dict[str, Recorded]:
    """Return the main kernels of a GPU architecture that are new or changed since the record."""
    kept = record.get(f"sm{sm}", {})
    return {name: launch for name, launch in planned(sm).items()
            if name not in kept or kept[name].id != identity(launch)}


def grown(then: Figures, now: Figures) -> list[str]:
    """Return one text for each metric that has grown by more than a tenth and more than its ``SLACK``."""
    return [f"{name} {old} -> {new}"
            for name, old, new, slack in zip(Figures._fields, then, now, SLACK, strict=True)
            if new > old + max(old / 10, slack)]


def load(path: Path = RECORD) -> Record:
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {card: {name: Measured(one[0], Figures(*one[1:])) for name, one in kernels.items()}
            for card, kernels in kept.items()}


def write(path: Path = RECORD, cards: Sequence[int] = CARDS, *, jobs: int = 0) -> int:
    """Measure the kernels that changed, write the record, and return the exit code 0."""
    record = load(path)
    for sm in cards:
        card, kept = f"sm{sm}", record.get(f"sm{sm}", {})
        fresh = dict(measure(sm, changed(sm, record), jobs=jobs))
        for name, one in fresh.items():
            for said in grown(kept[name].figures, one.figures) if name in kept else ():
                print(f"{card} {name}: {said}")
        record[card] = {name: fresh.get(name) or kept[name] for name in sorted(planned(sm))}
        path.write_text(one_a_line({card: {name: (one.id, *one.figures) for name, one in kernels.items()}
                                    for card, kernels in record.items()}), encoding="utf-8")
        print(f"{card}: {len(fresh)} of {len(record[card])} compiled", flush=True)
    return 0
