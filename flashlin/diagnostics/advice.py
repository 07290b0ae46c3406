"""The advice of a doctor report: one command that repairs the machine, and the reason for it.

There is no fixed list of recommended releases. For each pair of torch and Triton in ``compat/releases.py``
that this machine can install, the typical calls of all ops are planned on its GPUs. The advice names the pair
with the best plans. A torch wheel requires one Triton release, so a different Triton means a different torch.
The command also sets or unsets the variables that checks report, so one step repairs everything. The
functions are pure: they read a ``Machine`` and examine nothing themselves.
"""
from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement

from flashlin.compat import releases
from flashlin.compat.releases import Pair
from flashlin.compat.target import Target, bundled_ptxas, overriding
from flashlin.compat.versions import release
from flashlin.diagnostics.machine import TRITON_NAMES, Machine, shadowed
from flashlin.diagnostics.report import Advice, Check, Package
from flashlin.diagnostics.typical_plans import WAYS, price, typical, way_of
from flashlin.policy import Policy

# For each way to run, worst first: the improvement for an op that no longer runs in this way.
MENDED = {"cannot run": "run", "plain torch": "run as Triton kernels", "fp32 copies": "run without fp32 copies",
          "batch in parts": "run their batch at once", "fewer warps": "run with their usual number of warps"}
NO_CODE = "its wheels have no code for"
INDEX = "https://download.pytorch.org/whl/"


def advise(machine: Machine, ops: Sequence[str], checks: Iterable[Check | Package]) -> Advice | None:
    """Return the advice for a machine, or None if nothing needs to be done."""
    steps = [check.fix for check in checks if check.fix and check.status in ("problem", "degraded")]
    install, why = _install(machine, tuple(ops))
    steps = list(dict.fromkeys([*steps, *install]))
    return Advice(command=" && ".join(steps), why=why) if steps or why else None


class Judged(NamedTuple):
    """The rating of one pair of torch and Triton on the GPUs of this machine.

    prices: the price of each op (``typical_plans.price``); 0 if the op's calls can run the kernels unchanged.
    strange: True if torch was built with another Triton release.
    steps: number of releases between this torch and the installed torch.
    """
    prices: tuple[int, ...]
    strange: bool
    steps: int

    @property
    def order(self) -> tuple[int, bool, int]:
        """Return the sort key of this rating; less is better."""
        return sum(self.prices), self.strange, self.steps


def _install(machine: Machine, ops: tuple[str, ...]) -> tuple[list[str], str]:
    """Return the commands that install the best pair, and a text that says what they change."""
    if machine.triton_error and machine.foreign:
        return [], f"{machine.triton_state}; it comes from {machine.foreign}, take that off the path"
    if shadowed(machine) or any(target.backend == "hip" for target in machine.targets.values()):
        return [], ""  # pip cannot repair a search path, and on AMD no pair runs kernels
    if machine.old_libstdcxx or machine.numpy_on_path:
        return [], ""  # every torch and Triton would load this library
    cards, here = machine.known_cards, Pair(machine.torch_version, machine.triton)
    # True if torch or Triton cannot be used, so that the present pair is not an option. The checks report the
    # reason.
    broken = bool(machine.torch is None or machine.mixed or machine.uncovered or machine.other_build
                  or (machine.triton_error and (cards or machine.triton_error != "not installed"))
                  or (machine.unseen and (machine.driver_too_old or machine.without_code(cards))))
    stay = _judge(here, here, cards, machine.policy, ops)
    if not broken and not any(stay.prices) and not stay.strange:
        return [], ""  # nothing is better
    against = {pair: _against(pair, machine, cards) for pair in _candidates(here, machine)}
    judge = partial(_judge, here=here, cards=cards, policy=machine.policy, ops=ops)
    reachable = sorted((pair for pair in against if not against[pair]), key=lambda pair: _steps(pair, here))
    # If torch or Triton is broken, compare with the nearest pair that can be installed. The repair installs a
    # pair anyway, so it can also install a better one.
    start = stay if not broken or not reachable else judge(reachable[0])
    best = _best(reachable, judge, start)
    if best is not None and not broken and judge(best).order[:2] >= start.order[:2]:
        best = None
    before = None if broken else here
    gain = "" if best is None else _gain(before, best, cards, machine.policy, ops)
    if not (gain or broken or stay.strange):
        best = None  # some calls would run better, but no op as a whole
    now = best or before
    words: list[str] = []
    if best is not None:
        strange = (f"torch {here.torch} was made with Triton {releases.triton_for(here.torch)}, not "
                   f"{here.triton}")
        words.append(f"this makes {gain}" if gain else "" if broken else strange)
    # also name a better pair that this machine cannot install, with the obstacles
    limit = stay if now is None else judge(now)
    blocked = [pair for pair, no in against.items() if no and not any(one.startswith(NO_CODE) for one in no)]
    held = _best(blocked, judge, limit) if any(limit.prices) or (cards and now is None) else None
    if held is not None and (now is None or sum(judge(held).prices) < sum(limit.prices)):
        words.append(f"with torch {held.torch}, {_gain(now, held, cards, machine.policy, ops, 'would ')}; in "
                     f"its way: {', '.join(against[held])}")
    elif broken and best is None:
        words.append("no torch for this card and driver is known to mend that")
    return _commands(best, here, machine) if best is not None else [], "; ".join(filter(None, words))


def _best(pairs: Iterable[Pair], judge: Callable[[Pair], Judged], start: Judged) -> Pair | None:
    """Return the best pair that makes no op worse than ``start``; among equal pairs, the nearest."""
    best: tuple[Judged, Pair] | None = None
    for pair in pairs:
        its = judge(pair)
        # a lower sum of prices is no improvement if some op gets slower
        no_worse = all(new <= old for new, old in zip(its.prices, start.prices, strict=True))
        if no_worse and (best is None or its.order < best[0].order):
            best = its, pair
        if best is not None and not any(best[0].order[:2]):
            break  # planning a pair takes a second, and the pairs are sorted by distance
    return best and best[1]


def _candidates(here: Pair, machine: Machine) -> list[Pair]:
    """Return the pairs of torch and Triton to compare.

    They are the last patch release of each minor version of torch, and the installed torch with its Triton.
    For an installed torch that is not in the table, the Triton is the release that pip reports, or else the
    newest one.
    """
    known = releases.pairs()
    last = {release(pair.torch)[:2]: pair for pair in known}
    mine = [pair for pair in known if release(pair.torch) == (*release(here.torch), 0)[:3]]
    if machine.torch is not None and here.torch and not mine:
        mine = [Pair(here.torch, next((one.version for one in machine.dists if one.name == "triton"),
                                      releases.RELEASES[-1].version))]
    return list(dict.fromkeys([*mine, *last.values()]))


def _judge(pair: Pair, here: Pair, cards: Sequence[Target], policy: Policy, ops: tuple[str, ...]) -> Judged:
    made_with = releases.triton_for(pair.torch)
    strange = bool(made_with and pair.triton) and not releases.is_that(pair.triton, made_with)
    each = [_prices(_with(card, pair), policy, ops) for card in cards]
    return Judged(tuple(map(sum, zip(*each, strict=True))) or (0,) * len(ops), strange, _steps(pair, here))


def _with(card: Target, pair: Pair) -> Target:
    if card.other_build:
        card = card._replace(torch=pair.torch)
    if release(pair.triton) == release(card.triton):
        return card
    named = overriding(pair.triton, card.capability)
    return card._replace(triton=pair.triton,
                         ptxas=card.ptxas if named else bundled_ptxas(pair.triton, card.capability))


def _steps(pair: Pair, here: Pair) -> int:
    """Return the number of torch releases between a pair and the installed torch.

    Every older release counts as farther than all newer releases.
    """
    order = [release(one.torch) for one in releases.pairs()]
    mine = (*release(here.torch), 0)[:3]
    if not here.torch:  # without torch, count from the release for the installed Triton, else the newest
        mine = next((release(one.torch) for one in reversed(releases.pairs())
                     if release(one.triton) == release(here.triton)), order[-1])
    place, its = bisect_left(order, mine), bisect_left(order, release(pair.torch)[:3])
    return its - place if its >= place else len(order) + place - its


@lru_cache(maxsize=256)
def _prices(target: Target, policy: Policy, ops: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(price(typical(op, target, policy)) for op in ops)


def _against(pair: Pair, machine: Machine, cards: Sequence[Target]) -> list[str]:
    """Return the reasons that prevent this machine from installing a pair."""
    here = release(pair.torch) == (*release(machine.torch_version), 0)[:3] and machine.torch is not None
    made = releases.wheels(pair.torch)
    said = []
    python = next((one.python for one in releases.RELEASES if one.version == pair.triton), "")
    first, _, last = python.partition(" to ")
    if python and machine.python and not release(first)[:2] <= machine.python <= release(last)[:2]:
        said.append(f"it needs Python {first} to {last}")
    if not here or machine.unseen or machine.uncovered or machine.other_build:
        said += [f"{NO_CODE} {card.sm}" for card in cards
                 if not made.oldest <= card.capability <= made.newest]
        driver = release(machine.driver.version)[:1]
        if cards and driver and driver[0] < releases.oldest_driver(made.cuda):
            said.append(f"it needs driver {releases.oldest_driver(made.cuda)} or newer")
    return said + [f"{dist.name} {dist.version} needs {need}" for dist in machine.dists
                   for need in dist.needs if dist.name not in ("torch", "flashlin")
                   and _violated(need, pair) and not _violated(need, Pair(machine.torch_version,
                                                                        machine.triton))]


def _violated(need: str, pair: Pair) -> bool:
    try:
        wanted = Requirement(need)
    except InvalidRequirement:
        return False
    version = {"torch": pair.torch, "triton": pair.triton}.get(wanted.name, "")
    if not release(version) or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
        return False
    return not wanted.specifier.contains(".".join(map(str, release(version))), prereleases=True)


def _gain(here: Pair | None, then: Pair, cards: Sequence[Target], policy: Policy, ops: tuple[str, ...],
          would: str = "") -> str:
    """Return the improvement as text, such as ``24 of 66 ops run without fp32 copies``.

    here: the installed releases of torch and Triton; None if no kernels run now.
    then: the releases that are suggested.
    would: ``"would "`` if the suggested releases cannot be installed here.
    """
    better: Counter[str] = Counter()
    for op in ops:
        before = ["plain torch" if here is None else way_of(typical(op, _with(card, here), policy))
                  for card in cards]
        after = [way_of(typical(op, _with(card, then), policy)) for card in cards]
        gained = [old for old, new in zip(before, after, strict=True) if WAYS.index(new) < WAYS.index(old)]
        if gained:
            better[max(gained, key=WAYS.index)] += 1
    counts = {len(ops): f"all {len(ops)}"}
    return " and ".join(f"{counts.get(better[way], f'{better[way]} of {len(ops)}')} ops {would}{then_run}"
                        for way, then_run in MENDED.items() if better[way])


def _commands(pair: Pair, here: Pair, machine: Machine) -> list[str]:
    install = partial(_installing, machine)
    gone = machine.mixed or [one.name for one in machine.dists
                             if one.name == "triton-windows" and sys.platform != "win32"]
    commands = [f"pip uninstall -y {' '.join(gone)}"] if gone else []
    same = machine.torch is not None and release(pair.torch) == (*release(here.torch), 0)[:3]
    wanted = releases.triton_for(pair.torch) or pair.triton
    exact = f"triton~={wanted}.0" if wanted.count(".") == 1 else f"triton=={wanted}" if wanted else "triton"
    broken = machine.triton_error not in ("", "not installed")
    installed = next((one.version for one in machine.dists if one.name == "triton"), "")
    again = install(exact, again=broken or bool(machine.mixed), alone=broken or bool(machine.mixed))
    if same and not machine.other_build:
        return [*commands, again]
    how: dict[str, Any] = {"again": True}
    if machine.other_build:
        how["index"], left = _index(pair), broken
    elif machine.torch is None and release(pair.torch) == release(here.torch):
        # the missing file belongs to torch or to a package that is installed with torch
        missing = "cannot open shared object file" in machine.torch_error
        local = here.torch.partition("+")[2]
        other = local == "cpu" and bool(machine.known_cards)  # torch is the CPU build, but there is a GPU
        how["index"] = _index(pair) if other else INDEX + local if local else ""
        how["alone"] = not (missing or other)
        left = broken or (not missing and not other and not releases.is_that(installed, wanted)
                          and bool(installed or machine.known_cards))
    else:
        how["again"] = machine.torch is None and bool(here.torch)
        # pip would keep a broken Triton of the wanted version
        left = broken and releases.is_that(installed, wanted)
    return [*commands, install(f"torch=={pair.torch}", **how), *[again] * left]


def _index(pair: Pair) -> str:
    """Return the URL of the package index with the torch build for the CUDA release of this pair."""
    return INDEX + "cu" + "".join(map(str, release(releases.wheels(pair.torch).cuda)[:2]))


def _installing(machine: Machine, what: str, again: bool = False, alone: bool = False, index: str = "") -> str:
    """Return the command that installs a package with the tool that installed torch or Triton."""
    tools = {one.installer for one in machine.dists if one.name in ("torch", *TRITON_NAMES)}
    if "conda" in tools:
        flag = " --force-reinstall" if again else ""
        return f'conda install{flag} "{what.replace("torch==", "pytorch==")}"'
    start, flag = (("uv pip install", "--reinstall") if "uv" in tools else
                   ("pip install", "--force-reinstall"))
    return " ".join([start, *[flag] * again, *["--no-deps"] * alone, f'"{what}"',
                     *[f"--index-url {index}"] * bool(index)])
