"""Time tiles, warps and stages of the scalar-decay scans on this GPU, with decays of heads: what
flashlin/kernels/configs.py is picked from.

    python -m benchmarks.sweep --out benchmarks/results/ [--head-dim 128] [--dtype bfloat16] [--jobs 14]

First every configuration is compiled in parallel processes, then timed one by one, each kernel in a process
of its own: one that faults ends that process only, and the next one goes on behind it. Each must repeat
itself to the bit and agree with the default.
"""
from __future__ import annotations

import argparse
import datetime
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

KERNELS = ("simple_gla_scan", "simple_gla_dq", "simple_gla_dk", "simple_gla_dv")


def grid(kernel: str, head_dim: int) -> list[tuple[int, int, int, int]]:
    """(BT, strip, warps, stages)"""
    if head_dim > 256:
        return list(itertools.product((16, 32, 64), (16, 32), (2, 4, 8), (1, 2)))
    strips = [size for size in (16, 32, 64, 128) if 2048 <= size * head_dim <= 16384]
    return list(itertools.product((32, 64) if head_dim > 128 else (32, 64, 128), strips, (4, 8), (1, 2, 3)))


def captured(head_dim: int, dtype: str, B: int, T: int, H: int) -> dict[str, Any]:
    """Arguments of each kernel as the op starts it, by name."""
    import torch

    import flashlin
    from flashlin.compat import launch
    found: dict[str, Any] = {}

    def keep(facts: Any, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        found[facts.kernel] = (kernel, arguments)
        launch._start(facts, kernel, programs, arguments)
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, head_dim, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
               for _ in range(3))
    launch.replace_starter(keep)
    o, _ = flashlin.chunk_retention(q, k, v)
    o.backward(torch.randn_like(o))
    launch.replace_starter(None)
    return found


def output(kernel: str, arguments: dict[str, Any]) -> Any:
    return arguments["o" if kernel == "simple_gla_scan" else kernel.removeprefix("simple_gla_")]


def run(kernel: str, found: dict[str, Any], config: tuple[int, int, int, int], head_dim: int) -> Any:
    """A function that starts that configuration once."""
    function, arguments = found[kernel]
    BT, strip, warps, stages = config
    over_v = kernel in ("simple_gla_scan", "simple_gla_dv")
    N, H = arguments["N"], arguments["H"]
    full = 1 << (head_dim - 1).bit_length()
    tile = dict(BT=BT, BK=full if over_v else strip, BV=strip if over_v else full)
    strips = -(-head_dim // strip)
    return lambda: function[(N * H * strips,)](**arguments, **tile, num_warps=warps, num_stages=stages)


def worker(options: argparse.Namespace) -> None:
    import torch
    from triton.testing import do_bench
    torch.set_num_threads(1)
    found = captured(options.head_dim, options.dtype, options.batch, options.length, options.heads)
    configs = grid(options.kernel, options.head_dim)
    wanted = [output(options.kernel, found[options.kernel][1])]
    truth = [x.clone() for x in wanted]
    part, of = options.compile.split("/") if options.compile else ("0", "1")
    for index in range(int(part) + options.skip, len(configs), int(of)):
        print(json.dumps({"starting": index}), flush=True)
        row: dict[str, Any] = {"kernel": options.kernel, "config": configs[index]}
        try:
            start = run(options.kernel, found, configs[index], options.head_dim)
            start()
            torch.cuda.synchronize()
            if not options.compile:
                once = [x.clone() for x in wanted]
                start()
                error = max(((a.float() - b.float()).norm() / b.float().norm()).item()
                            for a, b in zip(once, truth, strict=True))
                same = all(torch.equal(a, b) for a, b in zip(once, wanted, strict=True))
                row |= {"ms": do_bench(start, warmup=5, rep=30, return_mode="median"), "error": error,
                        "bitwise": same}
        except Exception as error:  # out of resources, a failing compile: this configuration's result
            row["failed"] = f"{type(error).__name__}: {str(error)[:120]}"
            if "illegal" in str(error) or "launch failure" in str(error):
                print(json.dumps(row), flush=True)
                sys.exit(3)
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=14)
    for hidden in ("--kernel", "--compile"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kernel:
        return worker(options)
    facts = ["--out", str(options.out), "--head-dim", str(options.head_dim), "--dtype", options.dtype]
    small = ["--batch", "1", "--length", "256", "--heads", "16"]
    compiling = [subprocess.Popen([sys.executable, __file__, *facts, *small, "--kernel", kernel, "--compile",
                                   f"{part}/{max(1, options.jobs // 4)}"],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                 for kernel in KERNELS for part in range(max(1, options.jobs // 4))]
    for process in compiling:
        process.wait()
    rows: list[dict[str, Any]] = []
    real = ["--batch", str(options.batch), "--length", str(options.length), "--heads", str(options.heads)]
    for kernel in KERNELS:
        skip = 0
        while True:
            ran = subprocess.run([sys.executable, __file__, *facts, *real, "--kernel", kernel, "--skip",
                                  str(skip)], capture_output=True, text=True,
                                 check=False)
            lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
            rows += [line for line in lines if "kernel" in line]
            reached = max((line["starting"] for line in lines if "starting" in line), default=skip)
            if ran.returncode == 0:
                break
            if not any("starting" in line for line in lines):
                rows.append({"kernel": kernel, "failed": ran.stderr[-300:]})
                break
            if "starting" in lines[-1]:
                rows.append({"kernel": kernel, "config": grid(kernel, options.head_dim)[reached],
                             "failed": f"process ended with {ran.returncode}"})
            skip = reached + 1
    import torch
    import triton
    record = {"device": torch.cuda.get_device_name(), "triton": triton.__version__,
              "torch": torch.__version__, "date": datetime.date.today().isoformat(),
              "head_dim": options.head_dim, "dtype": options.dtype, "B": options.batch, "T": options.length,
              "H": options.heads, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"sweep-D{options.head_dim}-{options.dtype}-triton-{triton.__version__}.json").write_text(
        json.dumps(record) + "\n")
    for kernel in KERNELS:
        timed = sorted((row for row in rows if row["kernel"] == kernel and "ms" in row),
                       key=lambda row: row["ms"])
        broken = [row for row in rows if row["kernel"] == kernel and "ms" not in row]
        print(f"{kernel}: {len(timed)} timed, {len(broken)} failed")
        for row in timed[:8]:
            print(f"   {row['ms']:.3f} ms  BT, strip, warps, stages = {row['config']}  error "
                  f"{row['error']:.1e} bitwise {row['bitwise']}")
        for row in broken[:3]:
            print("  ", row.get("config"), row["failed"])
        wrong = [row for row in timed if not row["error"] <= 0.02 or not row["bitwise"]]
        print("   wrong:", [(row["config"], round(row["error"], 3), row["bitwise"]) for row in wrong][:10])


if __name__ == "__main__":
    main()
