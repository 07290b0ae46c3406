"""Carry GPU and compile records over to kernels that were renamed or moved.

Usage:
    python -m tools.carry_records OLD [--map FILE] [--write] [--drop]
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from matrix.results import (
    Ledger,
    by_source,
    of_cards,
    one_a_line,
    proven_text,
    read_ledger,
    source_of_each,
    write_ledger,
)
from tools.kernel_facts import ROOT, Function, ask, canonical, checkout_of

ABOUT = """A record of a kernel is valid for one version of its source. matrix/results stores the module of
the kernel and a hash of its normalised source. launches.json also stores a hash of each launch. A kernel that
is renamed or moved loses its records, although its machine code stays the same. This tool carries them over.

A record is carried if the source of the kernel and of every function it calls is the same after names are
mapped one to one. Names are those of functions, module-level constants, parameters and local variables.
Values of constants must be equal. A kernel may have new parameters, if its code is the same where they are
None: then ``if NAME is not None`` keeps all other code away. A record is not carried if
  - code differs beyond names: an operator, a number, the body of a helper, the order of arguments
  - one name would map to two names, or two names to one
  - a parameter has the old name of another parameter, because host code passes arguments by name
  - it was already stale in the old checkout
  - several kernels of this checkout have that source, and neither the name nor --map selects one

The tool updates these files of this checkout: matrix/results/launches.json, gpu-*.json, figures-*.json, and
flashlin/kernels/proven.json, whose configurations begin with names of kernels. The records do not contain the
arguments of launches. So the old checkout plans its calls again for each release and GPU until all launches
are found, which takes minutes. A refused or slow launch that no plan contains any more is kept by its
configuration. Other files that name kernels are records of one day without a source; they are only listed.

Without --write the tool only prints the changes that it would make. Afterwards:
  python -m matrix report             writes docs/support and the launch table again
  python -m matrix run                compiles the other launches; on a GPU: python -m matrix.gpu --missing
  python -m tools.same_ptx OLD        compares machine code of both checkouts on a sample
"""
EXAMPLES = """examples:
  python -m tools.carry_records HEAD~1                    show the changes since the last commit
  python -m tools.carry_records ../before --map map.json --write
  python -m tools.carry_records 812ea30 --json | jq '.kernels[] | select(.reason != "")'

map.json maps old module.kernel to new module.kernel, where equal source does not decide:
  {"flashlin.kernels.tile_ops.gate_cumsum": "flashlin.kernels.tile_ops.gate_sums"}
"""
RESULTS = Path("matrix") / "results"
PROVEN = Path("flashlin") / "kernels" / "proven.json"
STALE = "already stale in the old checkout"
UNKNOWN = "the old checkout has no such kernel"
Functions = Mapping[str, Function]
Fields = dict[str, Any]


class Difference(Exception):
    """Two kernels differ in more than names. The message describes the difference."""


class Names:
    """Names of one kind, mapped one to one."""

    def __init__(self, kind: str) -> None:
        self.kind, self.new, self.old = kind, dict[Any, Any](), dict[Any, Any]()

    def bind(self, old: Any, new: Any) -> None:
        """Map ``old`` to ``new``. Raises Difference if either has another partner."""
        if self.new.setdefault(old, new) != new:
            raise Difference(f"{self.kind} {said(old)} would become both {said(self.new[old])} and "
                             f"{said(new)}")
        if self.old.setdefault(new, old) != old:
            raise Difference(f"{self.kind}s {said(self.old[new])} and {said(old)} would both become "
                             f"{said(new)}")


def said(name: Any) -> str:
    return " = ".join(name) if isinstance(name, tuple) else str(name)


def renamed(old: Functions, old_key: str, new: Functions, new_key: str) -> dict[str, str]:
    """Return the new name of each parameter of a kernel. Raise Difference if more than names differs.

    old, new: the functions of both checkouts, by key.
    old_key, new_key: keys of the kernel.
    """
    functions, constants, hosts = Names("function"), Names("constant"), Names("decorator")
    functions.bind(old_key, new_key)
    done = set[str]()
    while waiting := [key for key in functions.new if key not in done]:
        key = waiting[0]
        done.add(key)
        was: Any
        now: Any
        pair = old[key], new[functions.new[key]]
        check_parameters(key, *pair)
        names = Names(f"{key}: name")
        for was, now in zip(pair[0].parameters, pair[1].parameters, strict=True):
            names.bind(was, now)
        ours, theirs = pair[0].tokens, pair[1].tokens
        # Every node ends with a closing token. So if one source is longer, it differs before the shorter one
        # ends.
        for number, (was, now) in enumerate(zip(ours, theirs, strict=False)):
            if was[0] != now[0] or was[0] == "unknown":
                raise Difference(f"{key}: {told(ours, number)}, now {told(theirs, number)}")
            if was[0] == "local":
                names.bind(was[1], now[1])
            elif was[0] == "function":
                functions.bind(was[1], now[1])
            elif was[0] == "host":
                hosts.bind(was[1], now[1])
            elif was[0] == "constant":
                if was[2] != now[2]:
                    raise Difference(f"{key}: {was[1]} is {was[2]}, now {now[1]} is {now[2]}")
                constants.bind(tuple(was[1:]), tuple(now[1:]))
            elif was[0] == "parameter":
                functions.bind(was[1], now[1])
                if was[2] != now[2]:
                    raise Difference(f"{key}: other arguments of {was[1]}")
            elif was != now:
                raise Difference(f"{key}: {told(ours, number)}, now {told(theirs, number)}")
    return dict(zip(old[old_key].parameters, new[new_key].parameters, strict=True))


def check_parameters(key: str, old: Function, new: Function) -> None:
    if len(old.parameters) != len(new.parameters):
        raise Difference(f"{key}: {len(old.parameters)} parameters, now {len(new.parameters)}")
    for was, now in zip(old.parameters, new.parameters, strict=True):
        if was != now and (was in new.parameters or now in old.parameters):
            raise Difference(f"{key}: parameter {was} is now {now}, and both versions have one of these "
                             "names elsewhere: their order has changed")


def told(tokens: list[Any], at: int) -> str:
    """Return the tokens up to position ``at``, at most four, as text for a message."""
    return "..." + " ".join(said(tuple(map(str, one[1:]))) for one in tokens[max(0, at - 3):at + 1])


class Kernel(NamedTuple):
    """A kernel whose records are carried over, or the reason why they are not.

    old, new: ``module.kernel`` in each checkout; `new` is "" if no kernel corresponds.
    source, new_source: their source hashes.
    reason: why the records are not carried.
    parameters: new name of each old parameter.
    order: names of all new parameters. Those that are new are None in carried launches.
    """
    old: str
    source: str
    new: str = ""
    new_source: str = ""
    reason: str = ""
    parameters: Mapping[str, str] = MappingProxyType({})
    order: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.old.rpartition(".")[2]

    @property
    def new_name(self) -> str:
        return self.new.rpartition(".")[2]

    def config(self, config: str) -> str:
        """Return a configuration (``Launch.config``) with the new names of the kernel and its tile."""
        words = [self.new_name]
        for word in config.split(" ")[1:]:
            name, equals, size = word.partition("=")
            words.append(f"{self.parameters.get(name, name)}={size}" if equals else word)
        return " ".join(words)

    def launch(self, fields: Fields) -> Fields:
        """Return the fields of a launch with the new names."""
        def each(given: Mapping[str, Any]) -> Fields:
            return {self.parameters.get(name, name): one for name, one in given.items()}
        arguments, old = each(fields["arguments"]), set(self.parameters.values())
        arguments = {name: arguments.get(name) for name in self.order or arguments
                     if name in arguments or name not in old}
        return {**fields, "module": self.new.rpartition(".")[0], "kernel": self.new_name,
                "arguments": arguments, "constants": each(fields["constants"]),
                "config": self.config(fields["config"])}


def functions(kernel: Fields) -> Functions:
    return {key: Function(*one) for key, one in kernel["functions"].items()}


def kernels(sources: Iterable[tuple[str, str]], old: Fields, new: Fields,
            mapping: Mapping[str, str]) -> list[Kernel]:
    """Find the new name of each kernel whose records are not valid as they are.

    sources: (kernel, source hash) of the records.
    old, new: ``kernel_facts.kernels`` of both checkouts.
    mapping: given new names of old kernels.
    """
    found = []
    for name, source in sorted(set(sources)):
        key = f"{source.partition(':')[0]}.{name}"
        if key in new and new[key]["source"] == source:
            continue
        if key not in old or old[key]["source"] != source:
            found.append(Kernel(key, source, reason=STALE if key in old else UNKNOWN))
            continue
        candidates = [mapping[key]] if key in mapping else [key] if key in new else [
            one for one in new if one not in old]
        same, reasons = dict[str, dict[str, str]](), dict[str, str]()
        for one in candidates:
            try:
                if one not in new:
                    raise Difference(f"this checkout has no {one}")
                same[one] = renamed(functions(old[key]), key, functions(new[one]), one)
            except Difference as difference:
                reasons[one] = str(difference)
        by_name = [one for one in same if one.rpartition(".")[2] == name]
        same = {by_name[0]: same[by_name[0]]} if len(by_name) == 1 else same
        if len(same) == 1:
            [(one, parameters)] = same.items()
            found.append(Kernel(key, source, one, new[one]["source"], parameters=parameters,
                                order=tuple(new[one]["parameters"])))
            continue
        near = [one for one in reasons if one.rpartition(".")[2] == name or len(reasons) == 1]
        reason = f"several kernels have its source: {', '.join(same)}" if same else (
            reasons[near[0]] if near else "no new kernel has its source")
        found.append(Kernel(key, source, reason=reason))
    taken = Counter(one.new for one in found if one.new)
    return [Kernel(one.old, one.source, reason=f"another kernel also became {one.new}")
            if one.new and taken[one.new] > 1 else one for one in found]


class Compile(NamedTuple):
    """A carried launch of launches.json.

    config: its new configuration.
    name: its new hash, or "" if its arguments are unknown. Without a new hash, only the refusals and the slow
        compilations of the launch are kept, under the old hash.
    """
    config: str
    name: str


def by_tile(missing: Iterable[tuple[str, str]], known: Iterable[Fields]) -> list[Fields]:
    """Return candidates for launches that no plan contains any more.

    They are the known launches of the same kernels, with the tiles, warps and stages of the missing ones.

    missing: (configuration, hash) of the launches.
    known: fields of the launches that were found.
    """
    configs, tried = sorted({config for config, _ in missing}), dict[str, Fields]()
    for fields in known:
        for config in configs:
            if config.partition(" ")[0] != fields["kernel"]:
                continue
            sizes = dict(word.split("=") for word in config.split(" ")[1:] if "=" in word)
            warps, stages = int(sizes.pop("warps")), int(sizes.pop("stages"))
            if sizes.keys() <= fields["constants"].keys():
                constants = {**fields["constants"], **{name: int(size) for name, size in sizes.items()}}
                one = {**fields, "constants": constants, "num_warps": warps, "num_stages": stages,
                       "config": config}
                tried[json.dumps(one)] = one
    return list(tried.values())


def launches(ledger: Ledger, carried: Mapping[str, Kernel], old: Path,
             new: Path) -> dict[tuple[str, str], Compile]:
    """Return the new identities of the launches of carried kernels. Plans calls in both checkouts."""
    wanted = {place: known for place, known in ledger.items() if place[0].partition(" ")[0] in carried}
    if not wanted:
        return {}
    count = Counter((triton, card) for known in wanted.values() for triton, of in known.items()
                    for card in of_cards(of) if not any(letter in triton for letter in "-+"))
    places = [place for place, _ in count.most_common()]
    ids = sorted({f"{config.partition(' ')[0]}-{name}" for config, name in wanted})
    known = dict[str, Fields]()
    visited = list[tuple[str, str]]()
    for place, one, fields in ask(old, "planned", names=sorted(carried), wanted=ids, places=places):
        known[one] = fields
        visited += [tuple(place)] if tuple(place) not in visited else []
    missing = [place for place in wanted if f"{place[0].partition(' ')[0]}-{place[1]}" not in known]
    tried = by_tile(missing, list(known.values()))
    known |= {one: fields for one, fields in zip(ask(old, "identities", launches=tried), tried, strict=True)
              if one in ids and one not in known}
    # The host code of this checkout may pass constants in another order, which is part of an identity.
    orders = dict[str, set[str]]()
    names = sorted({kernel.new_name for kernel in carried.values()})
    for _, one, fields in ask(new, "planned", names=names, wanted=[], places=visited):
        orders.setdefault(canonical(fields), set()).add(one)
    there = {one: carried[fields["kernel"]].launch(fields) for one, fields in known.items()}
    own = dict(zip(there, ask(new, "identities", launches=list(there.values())), strict=True))
    found = dict[tuple[str, str], Compile]()
    for config, name in wanted:
        kernel = carried[config.partition(" ")[0]]
        one = f"{kernel.name}-{name}"
        planned = orders.get(canonical(there[one]), set()) if one in there else set()
        new_id = own.get(one, "") if own.get(one) in planned or not planned else min(planned)
        found[config, name] = Compile(kernel.config(config), new_id.rpartition("-")[2])
    return found


def remembered(known: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the refusals and slow compilations of a launch, by release and GPUs."""
    kept = {triton: {cards: one for cards, one in of.items() if isinstance(one, (dict, list))}
            for triton, of in known.items()}
    return {triton: of for triton, of in kept.items() if of}


def carry_ledger(sources: Mapping[str, str], ledger: Ledger, found: list[Kernel],
                 identities: Mapping[tuple[str, str], Compile],
                 drop: bool) -> tuple[dict[str, str], Ledger, Counter[tuple[str, str]]]:
    """Return the contents of launches.json with carried kernels under their new names, and counts.

    The counts say how many launches of each kernel were ``carried`` with all results, were ``kept`` with only
    their refusals and slow compilations, or are ``gone``.

    sources: source hash of each kernel.
    found: results of `kernels`.
    identities: results of `launches`.
    drop: remove records that are not carried.
    """
    concerned = {one.name: one for one in found if sources.get(one.name) == one.source}
    renewed = {one.new_name for one in concerned.values() if one.new}
    kept_sources = {name: source for name, source in sources.items()
                    if name not in renewed and (name not in concerned or not (concerned[name].new or drop))}
    kept_sources |= {one.new_name: one.new_source for one in concerned.values() if one.new}
    fresh, counts = Ledger(), Counter[tuple[str, str]]()
    for (config, name), known in ledger.items():
        kernel = concerned.get(config.partition(" ")[0])
        if kernel is None or not kernel.new:
            if config.partition(" ")[0] in kept_sources and config.partition(" ")[0] not in renewed:
                fresh.setdefault((config, name), {}).update(known)
            continue
        to = identities[config, name]
        what = "carried" if to.name else "kept" if remembered(known) else "gone"
        counts[kernel.old, what] += 1
        if what != "gone":
            place = fresh.setdefault((to.config, to.name or name), {})
            place |= known if to.name else remembered(known)
    return kept_sources, fresh, counts


def carry_gpu(record: Fields, found: list[Kernel], drop: bool) -> tuple[Fields, Counter[tuple[str, str]]]:
    """Return a GPU's record with carried configurations under their new names, and counts per kernel.

    drop: remove configurations that are not carried.
    """
    carried = {(one.source, one.name): one for one in found}
    configs, counts = dict[str, str](), Counter[tuple[str, str]]()
    for config, source in source_of_each(record["configs"]).items():
        kernel = carried.get((source, config.partition(" ")[0]))
        counts[kernel.old if kernel else "", "carried" if kernel and kernel.new else "gone"] += 1
        if kernel is None or not kernel.new:
            if kernel is None or not drop:
                configs.setdefault(config, source)
        else:
            configs[kernel.config(config)] = kernel.new_source
    return {**record, "configs": by_source(configs)}, counts


def carry_figures(record: Fields, found: list[Kernel],
                  ids: Mapping[str, str]) -> tuple[Fields, Counter[tuple[str, str]]]:
    """Return figures-*.json with renamed kernels, and counts per kernel.

    ids: new id of each old launch id.
    """
    carried, counts = {one.name: one for one in found if one.new}, Counter[tuple[str, str]]()
    fresh = dict[str, Any]()
    for card, kept in record.items():
        fresh[card] = {}
        for label, (one, *figures) in kept.items():
            if one in ids:
                kernel = carried[one.rpartition("-")[0]]
                counts[kernel.old, "carried"] += 1
                words = [kernel.new_name if word == kernel.name else word for word in label.split(" ")]
                label, one = " ".join(words), ids[one]
            fresh[card][label] = [one, *figures]
    return fresh, counts


def carry_proven(table: Fields, found: list[Kernel]) -> Fields:
    carried = {one.name: one for one in found if one.new}
    taken = {one.new_name for one in carried.values()}
    return {carried[name].config(config) if (name := config.partition(" ")[0]) in carried else config: known
            for config, known in table.items()
            if config.partition(" ")[0] in carried or config.partition(" ")[0] not in taken}


def mentions(root: Path, found: list[Kernel], known: Iterable[Path]) -> dict[str, int]:
    """Return how often other records name a kernel whose name no longer exists, by file."""
    names = {one.name for one in found if one.new_name != one.name}
    skipped, counted = set(known), dict[str, int]()
    for path in sorted((*(root / RESULTS).glob("*"), *(root / "benchmarks" / "results").glob("*"))):
        if path not in skipped and path.suffix in (".json", ".jsonl"):
            words = path.read_text(encoding="utf-8").replace('"', " ").replace(",", " ").split()
            if number := sum(word in names for word in words):
                counted[path.relative_to(root).as_posix()] = number
    return counted


def carry(old: Path, root: Path, mapping: Mapping[str, str], write: bool, drop: bool) -> Fields:
    """Carry the records of ``root`` over, and return the changes as a dict for JSON.

    Without ``write``, nothing is changed.
    """
    results = root / RESULTS
    sources, ledger = read_ledger(results)
    gpus = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("gpu-*.json"))}
    figures = {path: json.loads(path.read_text(encoding="utf-8"))
               for path in sorted(results.glob("figures-*.json"))}
    every = {*sources.items(), *((config.partition(" ")[0], source) for record in gpus.values()
                                 for config, source in source_of_each(record["configs"]).items())}
    was = ask(old, "kernels", package="flashlin.kernels")
    before = {key: one["functions"][key][0] for key, one in was.items()}
    now = ask(root, "kernels", package="flashlin.kernels", before=before)
    found = kernels(every, was, now, mapping)
    carried = {one.name: one for one in found if one.new and sources.get(one.name) == one.source}
    identities = launches(ledger, carried, old, root)
    new_sources, fresh, counted = carry_ledger(sources, ledger, found, identities, drop)
    new_gpus = {path: carry_gpu(record, found, drop) for path, record in gpus.items()}
    ids = {f"{config.partition(' ')[0]}-{name}": f"{to.config.partition(' ')[0]}-{to.name}"
           for (config, name), to in identities.items() if to.name}
    new_figures = {path: carry_figures(record, found, ids) for path, record in figures.items()}
    of_gpus = Counter[tuple[str, str]]()
    for _, some in (*new_gpus.values(), *new_figures.values()):
        of_gpus += some
    lost = {one.old: sum(1 for config, _ in ledger if config.partition(" ")[0] == one.name
                         and sources.get(one.name) == one.source) for one in found if not one.new}
    if write:
        write_ledger(results, new_sources, fresh)
        for path, (record, _) in (*new_gpus.items(), *new_figures.items()):
            path.write_text(one_a_line(record), encoding="utf-8")
        lines = json.loads((root / PROVEN).read_text(encoding="utf-8"))
        table = {config: known for configs, known in lines.items() for config in configs.split("; ")}
        (root / PROVEN).write_text(proven_text(carry_proven(table, found)), encoding="utf-8")
    return {"written": write, "kernels": [
        {"old": one.old, "new": one.new, "reason": one.reason, "launches": counted[one.old, "carried"],
         "kept by configuration": counted[one.old, "kept"],
         "not carried": counted[one.old, "gone"] + lost.get(one.old, 0),
         "gpu": of_gpus[one.old, "carried"], "gpu not carried": of_gpus[one.old, "gone"]} for one in found],
        "names without a source": mentions(root, found, (*gpus, *figures, results / "launches.json"))}


def table(done: Fields) -> str:
    lines = [f"{'launches':>9}{'kept':>6}{'lost':>6}{'gpu':>6}{'lost':>6}  kernel"]
    for one in done["kernels"]:
        numbers = [one[name] for name in ("launches", "kept by configuration", "not carried", "gpu",
                                          "gpu not carried")]
        cells = [f"{number:>{wide}}" for number, wide in zip(numbers, (9, 6, 6, 6, 6), strict=True)]
        lines.append("".join(cells) + f"  {one['old']} -> {one['new'] or 'not carried: ' + one['reason']}")
    lines += [f"not changed: {path} has {number} old names without a source"
              for path, number in done["names without a source"].items()]
    carried = sum(1 for one in done["kernels"] if one["new"])
    return "\n".join([*lines, f"{carried} kernels carried, {len(done['kernels']) - carried} not; "
                      + ("written" if done["written"] else "nothing written (--write)")])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.carry_records", description=ABOUT, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a checkout or a git revision for which the records are valid")
    parser.add_argument("--map", type=Path, metavar="FILE",
                        help="JSON, old module.kernel -> new module.kernel")
    parser.add_argument("--write", action="store_true", help="change the records in place")
    parser.add_argument("--drop", action="store_true",
                        help="with --write: remove records that are not carried")
    parser.add_argument("--json", action="store_true", help="JSON on stdout instead of a table")
    given = parser.parse_args()
    mapping = json.loads(given.map.read_text(encoding="utf-8")) if given.map else {}
    with checkout_of(given.old) as old:
        done = carry(old, ROOT, mapping, given.write, given.drop)
    print(json.dumps(done, indent=2) if given.json else table(done))
    return 0 if all(one["new"] or one["reason"] == STALE for one in done["kernels"]) else 1


if __name__ == "__main__":
    sys.exit(main())
