"""The figures of the main kernels, registers, spilled bytes and the instructions of the longest loop, for
five cards under one release: tests/matrix/test_figures.py holds kernels to them, without a GPU.

    python -m matrix figures    compiles what has changed since, a quarter of an hour for everything, and
                                writes them anew, for the diff to be read
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
# The shapes that most models train with; of sizes besides them SUPPORT.md tells what spills.
SHAPES = {"bfloat16 D=128", "float16 D=64", "bfloat16 P=64 N=128", "float16 P=64 N=128", "bfloat16 N=16",
          "float16 N=16"}
# A figure has grown that is more than a tenth larger; of a small one so much does not count.
SLACK = Figures(spills=64, registers=8, instructions=16, local=8)


class Measured(NamedTuple):
    """id: of what was compiled (``matrix.run.identity``): as long as that is the same, so are the figures."""
    id: str
    figures: Figures


Record = dict[str, dict[str, Measured]]  # card -> kernel, with op and shape


def planned(sm: int) -> dict[str, Recorded]:
    """The main kernels that are planned for a card, by op, shape and name."""
    launches: dict[str, Recorded] = {}
    for call in calls():
        if is_main(call.op, call.label) and call.label in SHAPES:
            for launch in seen(call, parse(f"triton={TRITON},sm={sm}")).launches:
                name = f"{call.op} {call.label} {launch.kernel}"
                # what multiplies no matrices is bound by memory, but for Mamba's scan
                if "dot" in launch.traits or launch.kernel.startswith("selective"):
                    # forward's and backward's are two
                    launches[f"{name} again" if name in launches else name] = launch
    return launches


def measure(sm: int, launches: dict[str, Recorded], *, jobs: int = 0) -> Iterator[tuple[str, Measured]]:
    """Compile them, each once. Raises RuntimeError where one does not compile."""
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
    """The kernels planned for a card that are not those whose figures are kept."""
    kept = record.get(f"sm{sm}", {})
    return {name: launch for name, launch in planned(sm).items()
            if name not in kept or kept[name].id != identity(launch)}


def grown(then: Figures, now: Figures) -> list[str]:
    """Which figures are more than a tenth larger, in words."""
    return [f"{name} {old} -> {new}"
            for name, old, new, slack in zip(Figures._fields, then, now, SLACK, strict=True)
            if new > old + max(old / 10, slack)]


def load(path: Path = RECORD) -> Record:
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {card: {name: Measured(one[0], Figures(*one[1:])) for name, one in kernels.items()}
            for card, kernels in kept.items()}


def write(path: Path = RECORD, cards: Sequence[int] = CARDS, *, jobs: int = 0) -> int:
    """Measure what has changed and keep it; 0, as exit code."""
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
