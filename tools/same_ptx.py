"""Confirm on a sample of launches that two checkouts compile to the same PTX.

Usage:
    python -m tools.same_ptx OLD [--seed 0] [--count 60] [--triton RELEASE ...]
"""
from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any, NamedTuple

from flashlin.compat.releases import RELEASES
from flashlin.testing.environments import triton_environment
from tools.carry_records import Kernel, kernels
from tools.kernel_facts import ROOT, ask, checkout_of

ABOUT = """Chooses launches that the matrix's calls make of kernels that were renamed or moved since OLD. It
compiles each in both checkouts under each Triton release, and compares the PTX. Line information is off, and
names of entries and functions are masked. The same seed chooses the same launches. A launch that both
checkouts refuse in the same way counts as not compiled. Exits with 1 if any PTX differs, if no launch
compiles under a release, or if the sample is too small.

Releases are downloaded into $FLASHLIN_CACHE, as for `python -m matrix run`. No GPU is needed.
"""
EXAMPLES = """examples:
  python -m tools.same_ptx HEAD~1
  python -m tools.same_ptx ../before --count 6 --triton 3.7.1 --json
  python -m tools.same_ptx 812ea30 --every      includes kernels that kept their names and source
"""
GATES = [one.version for one in RELEASES if one.gate]
TRITONS = [GATES[at * (len(GATES) - 1) // 4] for at in range(5)]  # the oldest, the newest and three between
STATUSES = ("same", "differs", "not compiled")
CARDS = ("sm80", "sm90")
FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)")
Fields = dict[str, Any]


class Chosen(NamedTuple):
    """One launch of the sample.

    card: the GPU to compile for, such as ``sm90``.
    old, new: fields of the launch in each checkout.
    """
    card: str
    old: Fields
    new: Fields

    @property
    def sm(self) -> int:
        return int(self.card[2:])


def masked(ptx: str) -> str:
    """Return PTX without comments, and with functions renamed by their order."""
    lines = [line for line in re.sub(r"//.*", "", ptx).splitlines() if line.strip()]
    text = "\n".join(line.rstrip() for line in lines)
    for number, name in enumerate(dict.fromkeys(FUNCTION.findall(text))):
        whole = rf"(?<![\w$]){re.escape(name)}(?=_param_\d|_retval|[^\w$]|$)"
        text = re.sub(whole, f"function{number}", text)
    return text


def chosen(found: Sequence[tuple[Sequence[str], Fields]], partners: Mapping[str, Kernel], seed: int,
           count: int) -> list[Chosen]:
    """Return a random sample of ``count`` launches, with about as many of each kernel.

    found: ((release, GPU), fields of the launch) in the old checkout.
    partners: the corresponding kernels, by ``module.kernel`` of the old checkout.
    """
    groups = dict[str, list[Chosen]]()
    for (_, card), fields in found:
        kernel = partners.get(f"{fields['module']}.{fields['kernel']}")
        if kernel is not None:
            groups.setdefault(kernel.old, []).append(Chosen(card, fields, kernel.launch(fields)))
    order = random.Random(seed)
    for _, group in sorted(groups.items()):
        group.sort(key=lambda one: json.dumps(one))
        order.shuffle(group)
    names = sorted(groups)
    order.shuffle(names)
    sample = list[Chosen]()
    while len(sample) < count and any(groups.values()):
        sample += [groups[name].pop() for name in names if groups[name]]
    return sample[:count]


def partners_of(old: Path, root: Path, mapping: Mapping[str, str], every: bool) -> dict[str, Kernel]:
    """Return the kernels whose source is the same except for names, by old ``module.kernel``.

    every: include kernels whose names also stayed the same.
    mapping: given new names of old kernels.
    """
    was, now = (ask(place, "kernels", package="flashlin.kernels") for place in (old, root))
    sources = [(one["name"], one["source"]) for one in was.values()]
    same = {key: Kernel(key, one["source"], key, one["source"], parameters={})
            for key, one in was.items() if key in now and now[key]["source"] == one["source"]}
    renamed = {one.old: one for one in kernels(sources, was, now, mapping) if one.new}
    return {**(same if every else {}), **renamed}


def compared(sample: Sequence[Chosen], triton: str, old: Path, root: Path, jobs: int,
             timeout: float) -> list[Fields]:
    """Compile the sample in both checkouts under a release, and return one row per launch.

    timeout: seconds for each kernel.
    """
    variables = {**triton_environment(triton), "TRITON_DISABLE_LINE_INFO": "1"}
    answers, texts = [], list[dict[int, str]]()
    for checkout, side in ((old, "old"), (root, "new")):
        with tempfile.TemporaryDirectory() as folder:
            answers.append(ask(checkout, "compiled", environment=variables, folder=folder, at_once=jobs,
                               timeout=timeout, jobs=[{"sm": one.sm, "launch": getattr(one, side)}
                                                      for one in sample]))
            texts.append({int(path.stem): masked(path.read_text(encoding="utf-8"))
                          for path in Path(folder).glob("*.ptx")})
    rows = []
    for number, one in enumerate(sample):
        (was, why), (now, reason) = answers[0][number], answers[1][number]
        before, after = texts[0].get(number, ""), texts[1].get(number, "")
        status = "not compiled" if not before and not after and was == now else (
            "same" if before and before == after else "differs")
        diff = [line for line in unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
                if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        rows.append({"triton": triton, "card": one.card, "old": f"{one.old['module']}.{one.old['kernel']}",
                     "new": f"{one.new['module']}.{one.new['kernel']}", "config": one.old["config"],
                     "status": status, "lines": before.count("\n") + 1, "different lines": len(diff),
                     "first": diff[:4], "said": [f"{was}: {why}"[:200], f"{now}: {reason}"[:200]]})
    return rows


def table(rows: Sequence[Fields]) -> str:
    lines = [f"{row['status']:<13}{row['triton']:<7}{row['card']:<6}{row['old']} -> "
             f"{row['new'].rpartition('.')[2]} ({row['config'].partition(' ')[2]}), {row['lines']} lines"
             for row in rows]
    for row in rows:
        if row["status"] != "same":
            lines += [f"  {row['status']} {row['triton']} {row['new']}: {'; '.join(row['said'])}",
                      *(f"    {line}" for line in row["first"])]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.same_ptx", description=ABOUT, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a checkout or a git revision")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (default 0)")
    parser.add_argument("--count", type=int, default=60, help="number of launches (default 60)")
    parser.add_argument("--triton", nargs="+", default=TRITONS, metavar="RELEASE",
                        help=f"releases; each compiles the whole sample (default {' '.join(TRITONS)})")
    parser.add_argument("--card", nargs="+", default=CARDS,
                        help=f"GPUs to plan for (default {' '.join(CARDS)})")
    parser.add_argument("--every", action="store_true", help="include kernels that kept name and source")
    parser.add_argument("--map", type=Path, metavar="FILE", help="see tools.carry_records")
    parser.add_argument("--unchecked", action="store_true",
                        help="include kernels of --map even if their source differs")
    parser.add_argument("--jobs", type=int, default=2, help="number of compilers at a time (default 2)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each kernel (default 300)")
    parser.add_argument("--json", action="store_true", help="JSON on stdout instead of a table")
    given = parser.parse_args()
    began, mapping = time.monotonic(), json.loads(given.map.read_text(encoding="utf-8")) if given.map else {}
    with checkout_of(given.old) as old:
        partners = partners_of(old, ROOT, mapping, given.every)
        if given.unchecked:
            partners |= {one: Kernel(one, "", to) for one, to in mapping.items()}
        names = sorted({key.rpartition(".")[2] for key in partners})
        places = [(given.triton[0], card) for card in given.card]
        found = [(place, fields) for place, _, fields in ask(
            old, "planned", names=names, wanted=[], places=places)]
        sample = chosen(found, partners, given.seed, given.count)
        rows = [row for triton in given.triton
                for row in compared(sample, triton, old, ROOT, given.jobs, given.timeout)]
    counts = {status: sum(row["status"] == status for row in rows) for status in STATUSES}
    if given.json:
        print(json.dumps({"seed": given.seed, "launches": len(sample), "releases": list(given.triton),
                          "counts": counts, "rows": rows}, indent=2))
    else:
        print(table(rows))
        print(f"{len(sample)} of {given.count} launches, seed {given.seed}, {len(given.triton)} releases: "
              + ", ".join(f"{number} {status}" for status, number in counts.items())
              + f"; {time.monotonic() - began:.0f} s")
    compiled = {row["triton"] for row in rows if row["status"] == "same"}
    enough = len(sample) == given.count and compiled == set(given.triton)
    return 0 if enough and counts["differs"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
