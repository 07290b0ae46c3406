"""Measure the cost of ``settings(invariant=True)``: the GPU time with it and without it.

    python -m benchmarks.invariant [--op gla] --out benchmarks/results
    python -m benchmarks.invariant --device cpu --small        try the script itself

It times the chunk ops of benchmarks/calls.py. One shape fills a GPU. There, on Hopper, the setting turns off
the overlapping kernels and the kernels with one decay reference. The other shapes have few heads, so their
sequences are split into segments without the setting.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import flashlin
from benchmarks import timing
from benchmarks.calls import OPS, Shape, runs
from flashlin.compat import target
from matrix import record

SHAPES = (Shape(4, 4096, 32, 128), Shape(1, 32768, 8, 128), Shape(1, 8192, 2, 128))
CHUNKED = [family for family, ops in OPS.items() if ops[0].name.startswith("chunk_")]


def ways(call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    def reproducible() -> Any:
        with flashlin.settings(invariant=True):
            return call()
    return {"default": call, "invariant": reproducible}


def main() -> int:
    options = record.parser(__doc__)
    options.add_argument("--op", action="append", choices=CHUNKED, help="(repeatable; default: all)")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--small", action="store_true", help="use small sizes, to try the script itself")
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    flashlin.settings(canary="off")  # no trials, because these kernels have run before
    card = record.this_card() if given.device == "cuda" else target.probe(torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    for family in given.op or CHUNKED:
        op = OPS[family][0]
        for shape in [op.small] if given.small else SHAPES:
            row: dict[str, Any] = {"op": op.name, "shape": str(shape)}
            for what, call in runs(getattr(flashlin, op.name), op, shape, given.device).items():
                row[what] = {way: found.get("failed") or found["device_ms"]["median"]
                             for way, found in timing.compared(ways(call), given.rounds).items()}
            rows.append(row)
            print(row, flush=True)
            if given.out:  # after each row, because the GPU may be available only for a limited time
                record.write(given.out, "invariant", card, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
