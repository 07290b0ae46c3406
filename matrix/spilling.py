"""What main kernels keep in memory for want of registers, as tables of SUPPORT.md: before and after plans
knew of it, and what is slow in every configuration."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flashlin.compat.versions import release
from flashlin.guards.launch_table import GIVEN_UP, MANY, SPILLS
from matrix import markdown
from matrix.results import Figures
from matrix.status import CellState, Planned
from matrix.workload import is_main


class Count(NamedTuple):
    """Of main kernels on a card under a release. kernels: how many are planned; counted: whether the figures of
    all are known; before, after: those of slow ones, as they would be planned and as they are."""
    triton: str
    card: str
    kernels: int
    counted: bool
    before: list[Figures]
    after: list[Figures]


def table(every: Iterable[CellState]) -> list[str]:
    states = [state for state in every if state.plain.outcomes]
    return ["## What spills", "",
            f"Of the main kernels (16 bits, heads of 64, 128 and 256, forward and backward, one op of each "
            f"family): how many are compiled to {GIVEN_UP} registers a thread, where the assembler finds no way "
            f"to hand them out; and how many load and store more than {SPILLS:,} and more than {MANY:,} bytes a "
            "thread for want of registers. Before: as they would be planned if nobody knew of it.", "",
            *markdown.table(("Triton", "card", "kernels", f"{GIVEN_UP} registers", f"over {SPILLS:,}",
                             f"over {MANY:,}"), ()), *lines(states),
            "", "### compiled, slow", "",
            f"What spills that much with every number of warps and stages there is for it, of which the best is "
            f"taken. Chunks are shorter only instead of {GIVEN_UP} registers or more than {MANY:,} bytes: they "
            "take twice the steps, and twice the memory for states. On sm90, where configurations were timed, "
            f"one goes only for its {GIVEN_UP} registers.", "",
            *markdown.table(("configuration", "where", "bytes", "registers", "instructions of the loop",
                             "of them local", "others tried, bytes"), _slow(states))]


def _main(planned: Planned, card: str) -> list[str]:
    """The launches of the main calls that kernels run."""
    return list(dict.fromkeys(
        launch for one in planned.outcomes if one.card == card and one.path == "triton"
        and is_main(one.op, one.call) for launch in one.launches))


def counts(states: Iterable[CellState]) -> Iterator[Count]:
    """Of each card on which a cell's main calls are run by kernels."""
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
    """The rows of the first table."""
    return [markdown.line(*_cells(one)) for one in counts(states)]


def _slow(states: Iterable[CellState]) -> Iterator[list[str]]:
    """A row for each configuration, with the figures of its worst use."""
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
    """Whether two configurations are of the same kernel on the same operands."""
    return _parts(one)[::2] == _parts(other)[::2]


def _tile(config: str) -> str:
    return _parts(config)[1]


def _parts(config: str) -> tuple[str, str, frozenset[str]]:
    """The kernel, how it is started, and its traits, without those that follow from the tile."""
    kernel, *words = config.split()
    return (kernel, " ".join(word for word in words if "=" in word),
            frozenset(word for word in words if "=" not in word) - {"tall_state", "narrow_state"})
