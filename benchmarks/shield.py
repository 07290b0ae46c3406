"""Measure the time that shield adds to a repeated call, on the CPU with an empty launch. It needs no GPU.

    python -m benchmarks.shield [--out benchmarks/results/shield.json]

Each row is in microseconds: the time of a shielded call, minus the time of the same call without shield,
whose launch is also empty. Each time is the best of many runs, because the machine may be shared. The row
excludes the query of CUDA's current device, because there is no CUDA here.
"""
from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import flashlin
from benchmarks.planning import cpu
from flashlin.compat.target import parse, pretend

LIMIT = 10.0  # microseconds that shield may add to a call
RUNS, CALLS = 101, 500


@triton.jit
def one(x, o, T, BT: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    tl.store(o + t, tl.load(x + t, mask=t < T), mask=t < T)


@triton.jit
def many(
    q,
    k,
    v,
    g,
    h,
    o,
    h0,
    ht,
    cu_seqlens,
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    tl.store(o + t, tl.dot(tl.load(q + t[:, None] * K + t[None, :]),
                           tl.load(k + t[:, None] * K + t[None, :])))


def nothing(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Replace a launch. Only call a callable grid, as Triton does."""
    if callable(grid):
        grid(kwargs)


def microseconds(call: Callable[[], Any]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def added(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **declared: Any) -> float:
    shielded = flashlin.shield(kernel, **declared)
    shielded._start = kernel.run = nothing
    shielded[grid](*args, **kwargs)
    return microseconds(lambda: shielded[grid](*args, **kwargs)) - microseconds(lambda: kernel[grid](*args,
                                                                                                     **kwargs))


def rows() -> dict[str, float]:
    x = torch.zeros(4, 256, 8, 64, dtype=torch.bfloat16)
    few, eight = (x, x, 256), (*[x] * 8, None, 0.125, 256)
    constants: dict[str, Any] = dict(H=8, K=64, V=64, BT=64, num_warps=4, num_stages=2)
    pretend(parse("triton=3.6.0,sm=90"))
    return {"2 tensors": added(one, (4,), few, dict(BT=64)),
            "2 tensors, callable grid": added(one, lambda meta: (4,), few, dict(BT=64)),
            "8 tensors, 6 options": added(many, (4, 32), eight, constants),
            "8 tensors, 6 options, batch declared": added(many, (4, 32), eight, constants,
                                                          batch={"q": 0, "o": 0}, batch_axis=1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "shield.json")
    out = parser.parse_args().out
    found = rows()
    for name, value in found.items():
        print(f"{name:40} {value:8.2f} us")
    worst = max(found.values())
    print(f"at most {LIMIT:g} us may be added to a call: {'kept' if worst <= LIMIT else 'NOT kept'}, "
          f"{worst:.2f} us")
    record = {"what": "microseconds that shield adds to a call seen before, best of the runs", "runs": RUNS,
              "calls": CALLS, "date": datetime.date.today().isoformat(), "cpu": cpu(),
              "versions": {"flashlin": flashlin.__version__, "python": platform.python_version(),
                           "torch": torch.__version__, "triton": triton.__version__},
              "limit": LIMIT, "microseconds": {name: round(value, 3) for name, value in found.items()}}
    out.write_text(json.dumps(record, indent=1) + "\n")
    return worst > LIMIT


if __name__ == "__main__":
    sys.exit(main())
