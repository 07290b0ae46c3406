"""Test kernels with chunks of 64 tokens in narrow tiles on a Hopper GPU.

    python -m matrix.narrow_tiles --out matrix/results      writes narrow-tiles-<card>-triton-<version>.json

The known issues hopper-narrow-* are results of this script. Each tile runs in a process of its own, because
an illegal access ends the process. The script runs forward and backward of an op, in which one kernel is
launched with another tile. It does so twice, and compares the results with those of the planned tile:
  right            equal up to rounding, and bitwise equal in both runs
  wrong            not equal
  varies           equal up to rounding, but not bitwise equal in both runs
  illegal access   the process ended with an illegal memory access
"""
from __future__ import annotations

import argparse
import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid, normalize

import flashlin
from flashlin.compat import launch as door
from matrix import record

D = 128  # size of the heads: planned tiles are 64 wide
ROUNDING = 1e-3  # other tiles sum in another order
IN_STRIPS = ("dplr_prepare", "dplr_grads")  # a program of these kernels loops over all channels and columns
AT_ONCE = 14  # number of processes, which spend most of their time in the compiler


class Tried(NamedTuple):
    """One changed configuration to test.

    op: name of the op without ``chunk_``.
    kernel: the kernel whose configuration changes.
    tile: the changed sizes of its tile.
    num_warps: its number of warps.
    num_stages: its number of stages.
    """
    op: str
    kernel: str
    tile: dict[str, int]
    num_warps: int
    num_stages: int


def everything() -> list[Tried]:
    columns = (("simple_gla", "simple_gla_scan"), ("simple_gla", "simple_gla_dv"), ("gla", "gla_scan"),
               ("delta_rule", "delta_scan"), ("delta_rule", "delta_states"),
               ("kda", "dplr_scan"), ("kda", "dplr_reverse"))
    tried = []
    for stages, warps, strip in itertools.product((1, 2), (4, 8), (16, 32)):
        tried += [Tried(op, kernel, {"BV": strip}, warps, stages) for op, kernel in columns]
        # Use an op without a gate, because the scratch memory for a gate fits only the planned tile.
        tried += [Tried("linear_attn", kernel, {"BK": strip}, warps, stages)
                  for kernel in ("simple_gla_dq", "simple_gla_dk")]
    for strip, warps in itertools.product((16, 32, 64), (1, 2, 4, 8)):
        tried.append(Tried("kda", "dplr_prepare", {"BK": strip}, warps, 1))
        tried += [Tried("kda", "dplr_grads", {"BK": strip, "BV": of_v}, warps, 1) for of_v in (32, 64, 128)]
    return tried


def process(tried: Tried) -> dict[str, Any]:
    """Run one configuration in this process, and return its tile, its verdict and its error."""
    torch.manual_seed(0)
    flashlin.settings(invariant=True)  # otherwise other kernels than the tested ones do most of the work

    def new(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(2, 2048, 8, *size, device="cuda", dtype=dtype)
    of_heads, of_channels = logsigmoid(new(dtype=torch.float32)), logsigmoid(new(D, dtype=torch.float32))
    rest = {"simple_gla": [of_heads], "linear_attn": [], "delta_rule": [new().sigmoid()],
            "gla": [of_channels], "kda": [of_channels, new().sigmoid()]}[tried.op]
    inputs = [x.requires_grad_() for x in (new(D), normalize(new(D), dim=-1), new(D), *rest)]
    do = new(D)
    options: dict[str, Any] = {"normalize": False} if tried.op == "linear_attn" else {}

    def run() -> list[torch.Tensor]:
        o = getattr(flashlin, f"chunk_{tried.op}")(*inputs, **options)[0]
        return [o.detach(), *torch.autograd.grad(o, inputs, do)]
    tiles: list[dict[str, int]] = []

    def starter(launch: Any, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        if launch.kernel == tried.kernel:
            tile = {**dict(launch.tile), **tried.tile}
            if tried.kernel not in IN_STRIPS:
                for name, size in tried.tile.items():
                    programs = programs * dict(launch.tile)[name] // size
            tiles.append(tile)
            launch = launch._replace(tile=tuple(tile.items()), num_warps=tried.num_warps,
                                     num_stages=tried.num_stages)
        door._start(launch, kernel, programs, arguments)
    planned = run()
    door.replace_starter(starter)
    once, again = run(), run()
    torch.cuda.synchronize()
    error = max(float((mine.float() - right.float()).norm() / right.float().norm())
                for mine, right in zip(once, planned, strict=True))
    same = all(torch.equal(mine, other) for mine, other in zip(once, again, strict=True))
    verdict = "wrong" if not error < ROUNDING else "right" if same else "varies"  # NaN is wrong
    return {"tile": tiles[0], "found": verdict, "error": error}


def row(number: int) -> dict[str, Any]:
    """Run configuration ``number`` of ``everything()`` in a child process, and return its record row."""
    tried = everything()[number]
    child = record.child("matrix.narrow_tiles", "--process", str(number))
    if not child.failure:
        facts = child.messages[-1]
    elif "illegal memory access" in child.stderr:
        whole = {} if tried.kernel in IN_STRIPS else {"BK": D, "BV": D}
        facts = {"tile": {"BT": 64, **whole, **tried.tile}, "found": "illegal access"}
    else:
        raise RuntimeError(f"{tried}: {child.stderr[-2000:]}")
    made = {**tried._asdict(), **facts}
    print(json.dumps(made), flush=True)
    return made


def main() -> int:
    parser = record.parser(__doc__, default=Path(__file__).with_name("results"))
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process is not None:
        print(json.dumps(process(everything()[given.process])))
        return 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(row, range(len(everything()))))
    record.write(given.out, "narrow-tiles", record.this_card(), head_dim=D, dtype="bfloat16", rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
