"""Write the tables of docs/support/spills.md about register spills of the main kernels.

The first table counts spilling kernels for plans without and with knowledge of the spills. The second table
lists the configurations that planning uses although they spill, because every alternative spills also.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flashlin.compat.versions import release
from flashlin.guards.launch_table import GIVEN_UP, MANY, SPILLS
from matrix import markdown
from matrix.results import Figures
from matrix.status import CellState, Planned
from matrix.workload import is_main

WORST = 40  # rows of the second table


class Count(NamedTuple):
    """The spilling main kernels on one GPU under one Triton release.

    triton: the Triton release.
    card: name of the GPU.
    kernels: number of planned launches of main calls.
    counted: True if all these launches have been compiled.
    before: metrics of the slow launches if planning knew of no spills.
    after: metrics of the slow launches of the current plans.
    """
    triton: str
    card: str
    kernels: int
    counted: bool
    before: list[Figures]
    after: list[Figures]


def table(every: Iterable[CellState]) -> list[str]:
    states = [state for state in every if state.plain.outcomes]
    return ["## Counts", "",
            "Main kernels belong to one op of each family, forward and backward, in 16 bits, with "
            f"heads of 64, 128 and 256. The table counts kernels with {GIVEN_UP} registers a thread, "
            "for which the assembler fails to allocate registers. It also counts kernels that spill "
            f"more than {SPILLS:,} and more than {MANY:,} bytes a thread. Each cell shows two "
            "counts: if plans ignored spills → with the current plans.", "",
            *markdown.table(("Triton", "card", "kernels", f"{GIVEN_UP} registers", f"over {SPILLS:,}",
                             f"over {MANY:,}"), ()), *lines(states),
            "", "## Configurations that are slow", "",
            "These configurations spill with every allowed number of warps and stages, "
            f"so planning uses the best one. Planning shortens chunks only to avoid {GIVEN_UP} "
            f"registers or more than {MANY:,} bytes, because shorter chunks need twice the steps and "
            "twice the memory for states. On sm90, where configurations were timed, planning avoids a "
            f"configuration only if it has {GIVEN_UP} registers. The table shows the {WORST} that spill "
            "most. *other tiles* are the other configurations of the same kernel and operands, with their "
            "spills; some of them belong to other head sizes or releases.", "",
            *markdown.table(("configuration", "where", "bytes", "registers", "instructions of the loop",
                             "of them local", "other tiles, bytes"), _worst(states))]


def _main(planned: Planned, card: str) -> list[str]:
    """Return the ids of the launches of all main calls (``matrix.workload.is_main``) on a GPU.

    Calls that plain torch computes there are left out.
    """
    return list(dict.fromkeys(
        launch for one in planned.outcomes if one.card == card and one.path == "triton"
        and is_main(one.op, one.call) for launch in one.launches))


def counts(states: Iterable[CellState]) -> Iterator[Count]:
    """Yield the counts of every NVIDIA GPU and Triton release on which kernels compute main calls."""
    for state in states:
        for card in dict.fromkeys(one.card for one in state.planned.outcomes):
            launches = tuple(_main(planned, card) for planned in (state.plain, state.planned))
            verdicts = [[state.verdict(launch, card) for launch in some] for some in launches]
            if card.startswith("sm") and launches[1]:
                counted = all(one for some in verdicts for one in some)
                before, after = ([one.slow for one in some if one and one.slow] for some in verdicts)
                yield Count(state.result.cell.triton, card, len(launches[1]), counted, before, after)


def _cells(one: Count) -> list[str]:
    if not one.counted:
        return [one.triton, one.card, str(one.kernels), *["not counted"] * 3]
    bounds: tuple[Callable[[Figures], bool], ...] = (lambda figures: 0 < figures.registers <= GIVEN_UP,
                                                     lambda figures: figures.spills > SPILLS,
                                                     lambda figures: figures.spills > MANY)
    return [one.triton, one.card, str(one.kernels),
            *(f"{sum(map(worse, one.before))} → {sum(map(worse, one.after))}" for worse in bounds)]


def lines(states: Iterable[CellState]) -> list[str]:
    """Return the rows of the first table as lines of markdown."""
    return [markdown.line(*_cells(one)) for one in counts(states)]


def _worst(states: Iterable[CellState]) -> list[list[str]]:
    """Return the rows of the second table, worst first."""
    return sorted(_slow(states), key=lambda row: -int(row[2].replace(",", "")))[:WORST]


def _slow(states: Iterable[CellState]) -> Iterator[list[str]]:
    """Yield one row of the second table for each slow configuration, with the metrics of its worst launch."""
    rows: dict[str, list[tuple[str, str, Figures]]] = {}
    tried: dict[str, dict[str, int]] = {}
    for state in states:
        triton = state.result.cell.triton
        for card in dict.fromkeys(one.card for one in state.planned.outcomes):
            for launch in _main(state.planned, card):
                if figures := state.slow(launch, card):
                    config = state.planned.places[launch, card].config
                    rows.setdefault(config, []).append((card, triton, figures))
                    for other in state.result.launches.values():
                        if (other.config != config and _same(other.config, config) and card in other.cards
                                and (worse := other.cards[card].slow)):
                            most = tried.setdefault(config, {})
                            most[other.config] = max(worse.spills, most.get(other.config, 0))
    for config, places in sorted(rows.items()):
        worst = max((figures for _, _, figures in places), key=lambda figures: figures.spills)
        by_card: dict[str, list[str]] = {}
        for card, triton, _ in places:
            by_card.setdefault(card, []).append(triton)
        where = "; ".join(f"{card}: {', '.join(sorted(dict.fromkeys(tritons), key=release))}"
                          for card, tritons in sorted(by_card.items(), key=lambda one: int(one[0][2:])))
        others = "; ".join(f"{_tile(other)}: {spills:,}"
                           for other, spills in sorted(tried.get(config, {}).items(), key=lambda one: one[1]))
        yield [config, where, f"{worst.spills:,}", *(f"{figure:,}" if figure else "-" for figure in worst[1:]),
               others or "none"]


def _same(one: str, other: str) -> bool:
    """Return True if two configurations are of the same kernel on the same operands."""
    return _parts(one)[::2] == _parts(other)[::2]


def _tile(config: str) -> str:
    return _parts(config)[1]


def _parts(config: str) -> tuple[str, str, frozenset[str]]:
    """Return the kernel, the tile with warps and stages, and the traits of a configuration.

    Traits that follow from the tile are left out.
    """
    kernel, *words = config.split()
    return (kernel, " ".join(word for word in words if "=" in word),
            frozenset(word for word in words if "=" not in word) - {"tall_state", "narrow_state"})
