"""Compile kernels for datacenter Blackwell with 4 and 8 warps, where known issues limit scans to 2 warps.

    python -m matrix.blackwell_warps [--cell 3.6.0] [--card sm100]     writes blackwell-warps-<card>.json

No GPU is needed. Each kernel of the chunked families is compiled as planned, and also with 4 and 8 warps as
if these issues did not exist. The record says whether the kernel compiles, how many bytes it spills, and
whether it multiplies with tcgen05 instructions, which the issues are about. Compilation does not show whether
results are right. If you have such a GPU, run

    FLASHLIN_IGNORE=<ids> python -m matrix.gpu --out FOLDER

It runs every case twice with 4 warps and compares the results with float64. The record lists the ids by
release. If all cases are right, set FLASHLIN_IGNORE=<ids> to use more warps on your GPU. Please send the
record: with it, the known issue can end at that release.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import flashlin
from flashlin.compat.known_issues import issues_here
from flashlin.compat.target import Target
from flashlin.testing.compile import Job, compile_launches
from flashlin.testing.environments import triton_environment
from flashlin.testing.record import Recorded, recording
from matrix import cells
from matrix.results import one_a_line

D, T = 128, 128  # size of a head, and number of tokens
WARPS = (4, 8)
# Columns of the record. spills: bytes of a thread. why: the reason of a failed compilation, or empty.
COLUMNS = ("kernel", "BT", "warps", "status", "tcgen05", "spills", "why")


def limiting(target: Target) -> list[str]:
    """Return the ids of the known issues that limit the number of warps on a target."""
    return [issue.id for issue in issues_here(target) if "limit_num_warps" in issue.remedies]


def started(target: Target, ignore: list[str]) -> list[Recorded]:
    """Return the launches with matrix products that training makes on a target.

    ignore: ids of known issues that planning ignores.
    """
    def new(*size: int) -> torch.Tensor:
        return torch.zeros(1, T, 2, *size, dtype=torch.bfloat16, requires_grad=True)
    q, of_heads, of_channels, beta = new(D), torch.zeros(1, T, 2), torch.zeros(1, T, 2, D), new()
    with flashlin.settings(ignore=ignore), recording(target) as launches:
        for op, rest in (("simple_gla", [of_heads]), ("gated_delta_rule", [of_heads, beta]),
                         ("gla", [of_channels]), ("kda", [of_channels, beta])):
            getattr(flashlin, f"chunk_{op}")(q, q, q, *rest)[0].sum().backward()
    return [launch for launch in launches if "dot" in launch.traits]


def of_release(triton: str, card: str) -> list[list[Any]]:
    """Return one row of ``COLUMNS`` for each kernel and number of warps, under one Triton release."""
    target = next(one for one in cells.CARDS if one.name == card).target(triton, torch.__version__)
    without = started(target, limiting(target))
    tried = [*started(target, []),
             *(launch._replace(num_warps=warps) for warps in WARPS for launch in without
               if launch.num_warps > 1)]
    jobs = [Job(int(card[2:]), launch) for launch in dict.fromkeys(tried)]
    return [[job.launch.kernel, dict(job.launch.constants)["BT"], job.launch.num_warps, result.status,
             "tcgen05.mma" in result.matrix, result.spills,
             "" if result.ok else result.cause or result.message]
            for job, result in zip(jobs, compile_launches(jobs, triton_environment(triton)), strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m matrix.blackwell_warps", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", default=[],
                        help="a Triton release (repeatable; default: all that compile for the card)")
    parser.add_argument("--card", default="sm100", choices=("sm100", "sm103", "sm110"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)  # fail now, not after all compilations
    place = given.out / f"blackwell-warps-{given.card}.json"
    known = json.loads(place.read_text()) if place.exists() else {"ignore": {}, "releases": {}}
    for cell in cells.whole().tritons:
        triton = cell.triton
        target = next(one for one in cells.CARDS if one.name == given.card).target(triton, torch.__version__)
        ids = limiting(target)
        if not ids or (given.cell and triton not in given.cell):
            continue
        rows = of_release(triton, given.card)
        if not rows:  # planned as plain torch, because the ptxas of this release does not support the GPU
            continue
        known["ignore"][triton] = ids
        known["releases"][triton] = rows
        place.write_text(one_a_line({"card": given.card, "dtype": "bfloat16", "head_dim": D,
                                     "columns": COLUMNS, "ignore": known["ignore"],
                                     "releases": known["releases"]}))
        told = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        for warps in sorted({row["warps"] for row in told}):
            some = [row for row in told if row["warps"] == warps]
            good, by_tcgen05 = (sum(map(one, some)) for one in (lambda row: row["status"] == "ok",
                                                                lambda row: row["tcgen05"]))
            print(f"{triton} {warps} warps: {good} of {len(some)} compile, {by_tcgen05} by tcgen05, at most "
                  f"{max(row['spills'] for row in some)} bytes spilled a thread", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
