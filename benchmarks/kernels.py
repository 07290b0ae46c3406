"""Time each kernel in a forward and backward of an op, with the planned or a given configuration.

    python -m benchmarks.kernels --op chunk_gated_delta_rule                       the planned configuration
    python -m benchmarks.kernels --op chunk_gated_delta_rule --tile 64,64,4,2      BT, BV, warps, stages
    python -m benchmarks.kernels --op chunk_gated_delta_rule --set delta_grads=4,2
    python -m benchmarks.kernels --op chunk_rwkv7 --set dplr_grads=8,1,BK=64,BV=64

--tile sets the configuration of the scans. --set sets num_warps, num_stages and the tile of one kernel.
The result is one line for results/kernels-GPU-triton-RELEASE.jsonl, whose name tells the GPU and the release.
A line without tile and set is of the planned configuration.
"""
from __future__ import annotations

import argparse
import datetime
import json
from statistics import median
from typing import Any

import torch

import flashlin
from benchmarks.calls import Shape, find, inputs, output
from flashlin.compat import launch as door
from flashlin.kernels.configs import Config, padded
from flashlin.kernels.delta import recipe as delta
from flashlin.kernels.dplr import recipe as dplr
from flashlin.kernels.gla import recipe as gla


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", default="chunk_gated_delta_rule")
    parser.add_argument("--shape", default="4,4096,32,128", help="B, T, H, D")
    parser.add_argument("--tile", default="", help="BT,BV,num_warps,num_stages (default: as planned)")
    parser.add_argument("--set", action="append", default=[],
                        help="kernel=num_warps,num_stages[,registers][,BK=64] (repeatable)")
    parser.add_argument("--decay", type=float, default=1.0,
                        help="factor of the log decays g; with 20, no chunk fits a single decay reference")
    parser.add_argument("--only-compile", action="store_true")
    options = parser.parse_args()
    B, T, H, D = (int(size) for size in options.shape.split(","))
    changes = {kernel: values.split(",")
               for kernel, _, values in (change.partition("=") for change in options.set)}
    tile = [int(size) for size in options.tile.split(",")] if options.tile else []
    if tile:
        for recipe in (dplr, gla, delta):
            vars(recipe)["over_v"] = lambda K, V, *rest: iter([Config(tile[0], padded(K), tile[1], tile[2],
                                                                      tile[3])])
    given = inputs(find(options.op), Shape(B, T, H, D))
    if options.decay != 1:
        given["g"] = (given["g"].detach() * options.decay).requires_grad_()
    events: list[tuple[str, Any, Any]] = []

    def timing(launch: Any, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        options = {}
        if launch.kernel in changes:
            num_warps, num_stages, *registers = (int(value)
                                                 for value in changes[launch.kernel] if "=" not in value)
            blocks = {name: int(size)
                      for name, size in (value.split("=")
                                         for value in changes[launch.kernel] if "=" in value)}
            launch = launch._replace(num_warps=num_warps, num_stages=num_stages,
                                     tile=tuple({**dict(launch.tile), **blocks}.items()))
            options = {"maxnreg": registers[0]} if registers else {}
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        kernel[(programs,)](*door.in_order(launch, kernel, arguments), **options,
                            num_warps=launch.num_warps, num_stages=launch.num_stages)
        marks[1].record()
        events.append((launch.kernel, *marks))
    door.replace_starter(timing)
    for repeat in range(1 if options.only_compile else 23):
        if repeat == 3:
            torch.cuda.synchronize()
            events.clear()
        o = output(getattr(flashlin, options.op)(**given))
        o.backward(torch.randn_like(o))
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for kernel, begin, end in events:
        times.setdefault(kernel, []).append(begin.elapsed_time(end))
    if changes.keys() - times.keys():
        parser.error(f"--set: got {', '.join(changes.keys() - times.keys())}, "
                     f"need some of {', '.join(times)}")
    chosen = {"tile": options.tile, "set": options.set}
    print(json.dumps({"op": options.op, "shape": options.shape,
                      **{name: one for name, one in chosen.items() if one},
                      "decay": options.decay, "torch": torch.__version__,
                      "date": datetime.date.today().isoformat(),
                      **{kernel: round(median(found), 4) for kernel, found in times.items()}},
                     separators=(",", ":")))


if __name__ == "__main__":
    main()
