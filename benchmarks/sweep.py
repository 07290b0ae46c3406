"""Time several numbers of warps and stages for every kernel of an op, to choose configurations.

    python -m benchmarks.sweep --op kda --out benchmarks/results [--shape 4x4096x32x128] [--jobs 14]

Several processes first compile all configurations. Then each kernel is timed in its own process, so that a
crash of one configuration loses only the times of one kernel. A configuration counts if two runs give the
same bits, and if every tensor differs from that of the planned configuration by at most 0.01 of the tensor's
norm.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

import flashlin
from benchmarks import timing
from benchmarks.calls import OPS, Op, Shape, cases, runs
from flashlin.compat import launch as door
from matrix import record, warming

WARPS, STAGES, ROUNDS, FAR = (2, 4, 8), (1, 2, 3), 5, 1e-2


class Start(NamedTuple):
    """One launch of a kernel in an op, with the tensors of that call."""
    launch: Any
    kernel: Any
    programs: int
    arguments: dict[str, Any]

    def run(self, warps: int, stages: int) -> None:
        launch = self.launch._replace(num_warps=warps, num_stages=stages)
        door._starter(launch, self.kernel, self.programs, self.arguments)


def captured(op: Op, shape: Shape, device: str = "cuda") -> dict[str, Start]:
    """Return the first launch of each kernel in a forward with backward, by the kernel's name."""
    found: dict[str, Start] = {}
    before = door._starter

    def keep(launch: Any, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        found.setdefault(launch.kernel, Start(launch, kernel, programs, arguments))
        before(launch, kernel, programs, arguments)
    door.replace_starter(keep)
    try:
        runs(getattr(flashlin, op.name), op, shape, device)["both"]()
    finally:
        door.replace_starter(before)
    return found


def configurations(start: Start) -> Iterator[tuple[int, int]]:
    """Yield (warps, stages), beginning with the planned ones."""
    planned = start.launch.num_warps, start.launch.num_stages
    yield planned
    for warps in WARPS:
        for stages in STAGES:
            if (warps, stages) != planned:
                yield warps, stages


def timed(start: Start) -> Iterator[dict[str, Any]]:
    """Yield one row for each configuration."""
    tensors = {name: x for name, x in start.arguments.items() if isinstance(x, torch.Tensor)}
    before = {name: x.clone() for name, x in tensors.items()}

    def left(warps: int, stages: int) -> dict[str, torch.Tensor]:
        for name, x in tensors.items():
            x.copy_(before[name])
        start.run(warps, stages)
        return {name: x.clone() for name, x in tensors.items()}
    right: dict[str, torch.Tensor] = {}
    for warps, stages in configurations(start):
        row: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        try:
            once, again = left(warps, stages), left(warps, stages)
        # It does not compile, or memory is full. Its row shows the error.
        except Exception as error:
            yield {**row, "failed": record.raised(error)}
            continue
        right = right or once
        wrong = [name for name, x in once.items() if not same(x, again[name])]
        wrong += [name for name, x in once.items() if far(x, right[name])]
        taken = timing.compared({"it": partial(start.run, warps, stages)}, ROUNDS)["it"]
        yield {**row, **({"wrong": sorted(set(wrong))} if wrong else {}),
               **({"failed": taken["failed"]} if "failed" in taken else
                  {"us": round(1e3 * taken["device_ms"]["median"], 1)})}


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool((x.view(torch.uint8) == y.view(torch.uint8)).all())


def far(x: torch.Tensor, right: torch.Tensor) -> bool:
    if not x.is_floating_point():
        return not torch.equal(x, right)
    kept = torch.isfinite(right)
    x, right = x[kept].float(), right[kept].float()
    return not bool((x - right).norm() <= FAR * right.norm())


def main() -> None:
    options = record.parser(__doc__)
    options.add_argument("--op", required=True, choices=OPS)
    options.add_argument("--shape", default="4x4096x32x128")
    options.add_argument("--jobs", type=int, default=14, help="number of processes that compile")
    options.add_argument("--seconds", type=float, default=120, help="limit for compiling, and per kernel")
    options.add_argument("--kernel", help=argparse.SUPPRESS)
    options.add_argument("--fill", type=warming.Share.parse, help=argparse.SUPPRESS)
    given = options.parse_args()
    flashlin.settings(canary="off")
    op, shape = next(iter(cases(given.op, shapes=[given.shape]).values()))
    if given.fill:
        def compile_one(item: str) -> None:
            name, warps, stages = item.split()
            starts[name].run(int(warps), int(stages))
        with warming.claiming(given.fill):
            starts = captured(op, shape)
        warming.walk([f"{name} {warps} {stages}" for name, start in starts.items()
                      for warps, stages in configurations(start)], given.fill, compile_one)
        return
    starts = captured(op, shape)
    if given.kernel:
        for row in timed(starts[given.kernel]):
            print(json.dumps(row), flush=True)
        return
    same_call = ["--op", given.op, "--shape", given.shape]
    print(warming.fill("benchmarks.sweep", *same_call, processes=given.jobs, seconds=given.seconds),
          flush=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in starts:
        child = record.child("benchmarks.sweep", *same_call, "--kernel", name, seconds=given.seconds)
        rows[name] = child.messages + ([{"failed": child.failure}] if child.failure else [])
        best = min((row for row in rows[name] if "us" in row and "wrong" not in row), key=lambda row: row["us"],
                   default=None)
        print(f"{name:24} planned {rows[name][0]}  best {best}", flush=True)
        if given.out:
            record.write(given.out, f"sweep-{given.op}-{given.shape}", record.this_card(), op=op.name,
                         shape=given.shape, dtype="bfloat16", kernels=rows)


if __name__ == "__main__":
    main()
