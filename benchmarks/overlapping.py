"""Compare overlapping scans (``kernels/*/overlapping.py``) with those of plain Triton.

    python -m benchmarks.overlapping [--family delta] --out benchmarks/results

The metrics are milliseconds of GPU time, forward and with backward; microseconds of the forward scan alone
and of the reverse scan alone; and the distance of the outputs. Each row runs in a child process with a time
limit, because a wrong barrier hangs.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

import flashlin
from benchmarks import timing
from benchmarks.calls import Shape, find, output, runs
from flashlin import dispatch
from flashlin.compat import launch as door
from flashlin.compat.subprocesses import channel
from flashlin.kernels import scans
from matrix import record

D, ROUNDS, STARTS = 128, 9, 20
SINCE, NEVER = scans.OVERLAPS, (99, 0)
SECONDS = 150  # per row; most of it is compiling
MAIN, LONG, SMALL = Shape(4, 4096, 32, D), Shape(1, 32768, 8, D), Shape(8, 1024, 8, 64)
SCALAR = (MAIN, Shape(1, 8192, 32, D), Shape(16, 4096, 16, D), LONG)
# Ops and shapes, by the end of the record's name.
FAMILIES: dict[str, dict[str, tuple[Shape, ...]]] = {
    "scan": {"chunk_simple_gla": SCALAR, "chunk_retention": SCALAR,
             "mamba_chunk_scan_combined": find("mamba_chunk_scan_combined").shapes},
    "delta": {"chunk_delta_rule": (MAIN, SMALL, LONG), "chunk_gated_delta_rule": (MAIN, SMALL, LONG)},
    "dplr": {"chunk_kda": (MAIN, SMALL, LONG), "chunk_gdn2": (MAIN,), "chunk_rwkv7": (MAIN, SMALL)}}
COLUMNS = {"forward": "ms forward", "both": "ms with backward", "scan_us": "us of the scan",
           "reverse_us": "us of the reverse"}
NAMED = {"forward": ("scan_us", ("_scan", "_overlapped")),
         "both": ("reverse_us", ("_reverse", "_dv", "_back"))}
HEAD = " ".join([f"{'op':24}", f"{'shape':14}", *(f"{title:>20}" for title in COLUMNS.values()), " distance"])


def planned(call: Callable[[], Any], since: tuple[int, int]) -> Any:
    """Run a call as if overlapping kernels were available since this Triton release."""
    scans.OVERLAPS = since
    dispatch.plan.cache_clear()
    return call()


def scan_us(call: Callable[[], Any], ends: tuple[str, ...]) -> float | None:
    """Return the GPU time of a call's last kernel with one of these name endings, in microseconds.

    Return None if the call has no such kernel.
    """
    marks: list[list[tuple[Any, Any]]] = []

    def start(launch: Any, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
                      for _ in range(2))
        begin.record()
        kernel[(programs,)](*door.in_order(launch, kernel, arguments), num_warps=launch.num_warps,
                            num_stages=launch.num_stages)
        end.record()
        if launch.kernel.endswith(ends):
            marks[-1].append((begin, end))
    door.replace_starter(start)
    for _ in range(STARTS):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # so that the host is ahead of the GPU
        marks.append([])
        call()
    door.replace_starter(None)
    torch.cuda.synchronize()
    taken = [begin.elapsed_time(end) for *_, (begin, end) in filter(None, marks)]
    return float(round(1e3 * median(taken), 1)) if taken else None


def row(name: str, shape: Shape) -> dict[str, Any]:
    """Return the times of plain and overlapping kernels, and the relative distance of their outputs."""
    found: dict[str, Any] = {}
    for what, call in runs(getattr(flashlin, name), find(name), shape, "cuda").items():
        ways: dict[str, Callable[[], Any]] = {"plain": partial(planned, call, NEVER),
                                              "overlapped": partial(planned, call, SINCE)}
        if what == "forward":
            right, other = (output(way()).float() for way in ways.values())
            found["distance"] = float(f"{float((other - right).norm() / right.norm()):.2g}")
        column, ends = NAMED[what]
        found[column] = {way: scan_us(one, ends) for way, one in ways.items()}
        taken = timing.compared(ways, ROUNDS)
        found[what] = {way: one.get("failed") or one["device_ms"]["median"] for way, one in taken.items()}
    return found


def tried(name: str, number: int, shape: Shape) -> dict[str, Any]:
    """Measure a row in a child process, and return it, or the reason why there is none.

    number: index of the shape in the op's list.
    """
    done = record.child("benchmarks.overlapping", "--row", name, str(number), seconds=SECONDS)
    found = done.messages[-1] if done.messages else {"failed": done.ending}
    return {"op": name, "shape": str(shape), **found}


def text(found: dict[str, Any]) -> str:
    """Return a row as a line of the table."""
    if "failed" in found:
        return f"{found['op']:24} {found['shape']:14} {found['failed']}"
    cells = [f"{found[column]['plain']} -> {found[column]['overlapped']}" for column in COLUMNS]
    return f"{found['op']:24} {found['shape']:14} " + " ".join(f"{cell:>20}" for cell in cells) + (
        f" {found['distance']:>9}")


def main() -> int:
    options = record.parser(__doc__)
    options.add_argument("--family", choices=FAMILIES, action="append", help="(repeatable; default: all)")
    options.add_argument("--row", nargs=2, metavar=("OP", "NUMBER"), help="in a child: one row")
    given = options.parse_args()
    if given.row:
        say, (name, number) = channel(), given.row
        flashlin.settings(canary="trial")  # launch the kernels even if they have no record
        [shapes] = [ops[name] for ops in FAMILIES.values() if name in ops]
        say(**row(name, shapes[int(number)]))
        return 0
    print(HEAD)
    for family in given.family or FAMILIES:
        rows = []
        for name, shapes in FAMILIES[family].items():
            for number, shape in enumerate(shapes):
                rows.append(tried(name, number, shape))
                print(text(rows[-1]), flush=True)
                if given.out:
                    record.write(given.out, f"overlapping-{family}", record.this_card(), dtype="bfloat16",
                                 rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
