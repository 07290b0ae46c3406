"""Find the best number of segments per sequence: time and memory of an op with each number.

    python -m benchmarks.parts [--op gla] [--shape 1x32768x8x128] --out benchmarks/results

Times are milliseconds of GPU time. Memory is the peak in MiB above the memory in use before the call. The
numbers include 1, for no split. * marks the number that planning chooses for the shape. The calls are the
chunk ops of benchmarks/calls.py, at shapes that leave most of a GPU idle.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

import flashlin
from benchmarks import timing
from benchmarks.calls import OPS, Shape, runs
from flashlin import dispatch
from flashlin.guards.plan_types import Plan
from flashlin.kernels import scans
from matrix import record

SHAPES = {Shape(1, 32768, 8, 128): (1, 4, 8, 16, 24, 32), Shape(1, 8192, 32, 128): (1, 2, 4, 6),
          Shape(1, 8192, 2, 128): (1, 8, 16, 32), Shape(8, 1024, 8, 64): (1, 2, 4, 8),
          Shape(1, 32768, 8, 128, packed=32): (1, 4, 8, 16, 32, 64)}
ROUNDS = 5


def in_parts(call: Callable[[], Any], parts: int) -> Any:
    """Run a call with every sequence split into `parts` segments; 0 means as many as planning chooses."""
    scans.forced_parts = parts
    dispatch.plan.cache_clear()
    return call()


def chosen(call: Callable[[], Any], T: int) -> int:
    """Return the number of segments that planning chooses."""
    plans: list[Plan] = []
    with dispatch.watching(plans.append):
        in_parts(call, 0)
    return -(-T // plans[-1].part) if plans[-1].part else 1


def main() -> int:
    options = record.parser(__doc__)
    options.add_argument("--op", choices=[family for family in OPS if OPS[family][0].name.startswith("chunk_")],
                         help="a family of benchmarks/calls.py (default: all chunk ops)")
    options.add_argument("--shape", choices=[str(shape) for shape in SHAPES])
    given = options.parse_args()
    flashlin.settings(canary="off")  # no trials, because these kernels have run before
    rows: dict[str, Any] = {}
    for family, ops in OPS.items():
        if not ops[0].name.startswith("chunk_") or given.op not in (None, family):
            continue
        for shape, numbers in SHAPES.items():
            if given.shape not in (None, str(shape)):
                continue
            row: dict[str, Any] = {}
            for what, call in runs(getattr(flashlin, ops[0].name), ops[0], shape, "cuda").items():
                row["chosen"] = chosen(call, shape.T)
                timed = timing.compared({str(parts): functools.partial(in_parts, call, parts)
                                         for parts in sorted({*numbers, row["chosen"]})}, ROUNDS)
                row[what] = {parts: found.get("failed") or found["device_ms"]["median"]
                             for parts, found in timed.items()}
                row[f"{what}_mb"] = {parts: found.get("peak_mb") for parts, found in timed.items()}
                print(f"{ops[0].name} {shape} {what}: " + "  ".join(
                    f"{parts}{'*' if int(parts) == row['chosen'] else ''}: {taken} ms "
                    f"{row[f'{what}_mb'][parts]} MB" for parts, taken in row[what].items()), flush=True)
            rows[f"{ops[0].name} {shape}"] = row
            if given.out:  # after each row, because the GPU may be available only for a limited time
                record.write(given.out, "parts", record.this_card(), rows=rows)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
