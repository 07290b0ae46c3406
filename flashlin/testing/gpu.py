"""Run every case on this machine's GPUs, in worker processes, and record the verdicts as one JSON file.

    python -m flashlin.testing.gpu --out matrix/results/ [--op chunk_simple_gla] [--jobs 8]

Each case runs forward and backward twice in every dtype, against the float64 reference; the second run must repeat the first to the
bit. A worker that dies (an abort, an illegal address) is a row, and the others go on.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float16", "float32")


def rows_of_case(case: Any, dtype_name: str) -> dict[str, Any]:
    """One case in one dtype: the worst tensor, whether it passes, whether a second run is bitwise the same."""
    import torch

    from flashlin.compat import launch as door
    from flashlin.testing.compare import check
    from flashlin.testing.record import source_hash
    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype_name)
    row: dict[str, Any] = {"op": case.op, "case": case.id, "dtype": dtype_name, "configs": {}}

    def noting(launch: Any, kernel: Any, *rest: Any) -> None:
        row["configs"][launch.config] = source_hash(kernel.fn.__module__, kernel.fn.__name__)
        door._start(launch, kernel, *rest)
    door.replace_starter(noting)
    try:
        verdicts, again = check(case, device, dtype), check(case, device, dtype)
    except Exception as error:  # a failure of any kind is this row's result
        return {**row, "ok": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        door.replace_starter(None)
    worst = max(verdicts, key=lambda verdict: verdict.rms / verdict.allowed if verdict.rms == verdict.rms else float("inf"))
    return {**row, "ok": all(verdict.ok for verdict in verdicts) and verdicts == again, "bitwise": verdicts == again, "worst": worst.tensor,
            "rms": worst.rms, "row": worst.row, "allowed": worst.allowed}


def work(part: int, of: int, ops: list[str]) -> None:
    """A worker: its share of the cases, one JSON line each, announced before it starts so that a death names its case."""
    import torch

    import flashlin
    from flashlin.testing.cases import CASES
    flashlin.settings(canary="off")  # this is the trial
    torch.set_num_threads(1)  # the references run on the CPU, one worker a core
    # neighbours share kernels, so a worker takes a run of them and compiles each kernel once
    todo = [(case, dtype) for dtype in DTYPES for case in CASES if not ops or case.op in ops]
    for case, dtype in todo[len(todo) * part // of:len(todo) * (part + 1) // of]:
        print(json.dumps({"starting": [case.op, case.id, dtype]}), flush=True)
        print(json.dumps(rows_of_case(case, dtype)), flush=True)


def gpus() -> list[str]:
    """What to put into CUDA_VISIBLE_DEVICES for each GPU like the current one."""
    import torch
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(index) for index in range(torch.cuda.device_count())]
    first = torch.cuda.get_device_name()
    return [name for index, name in enumerate(names) if torch.cuda.get_device_name(index) == first]


def collect(jobs: int, ops: list[str], seconds: float) -> list[dict[str, Any]]:
    """Rows of all workers; a worker that ended early leaves a row that says how."""
    cards = gpus()
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.jsonl" for part in range(jobs)]
        running = []
        for part, file in enumerate(files):
            command = [sys.executable, "-m", "flashlin.testing.gpu", "--part", f"{part}/{jobs}", *(f"--op={op}" for op in ops)]
            running.append(subprocess.Popen(command, stdout=file.open("w"), stderr=(Path(folder) / f"{part}.err").open("w"),
                                            env={**os.environ, "CUDA_VISIBLE_DEVICES": cards[part % len(cards)]}))
        for part, (process, file) in enumerate(zip(running, files, strict=True)):
            try:
                code = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = -9
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            rows += [line for line in lines if "op" in line]
            if code != 0:
                op, case, dtype = lines[-1]["starting"] if lines and "starting" in lines[-1] else ("?", "?", "?")
                said = (Path(folder) / f"{part}.err").read_text()[-300:]
                rows.append({"op": op, "case": case, "dtype": dtype, "ok": False, "error": f"worker ended with {code}: {said}"})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for gpu-<card>-triton-<version>.json")
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument("--jobs", type=int, default=8, help="worker processes (default 8; compiling is what takes the time)")
    parser.add_argument("--seconds", type=float, default=540, help="time limit for all of it (default 540)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part, of = arguments.part.split("/")
        work(int(part), int(of), arguments.op)
        sys.stdout.flush()
        os._exit(0)  # some pairs of torch and Triton abort while the interpreter is torn down, after all work is done
    import torch

    from flashlin.compat.target import probe
    target = probe(torch.device("cuda", torch.cuda.current_device()))
    rows = collect(arguments.jobs, arguments.op, arguments.seconds)
    failed = [row for row in rows if not row["ok"]]
    configs, broken = dict[str, str](), set[str]()
    for row in rows:
        used = row.pop("configs", {})
        configs.update(used)
        broken.update(used if not row["ok"] else ())
    record = {"device": target.name, "capability": list(target.capability), "triton": target.triton, "ptxas": target.ptxas,
              "torch": target.torch, "date": datetime.date.today().isoformat(), "passed": len(rows) - len(failed), "failed": len(failed),
              "configs": {config: source for config, source in sorted(configs.items()) if config not in broken},
              "rows": sorted(rows, key=lambda row: (row["op"], row["case"], row["dtype"]))}
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = f"gpu-{target.name.replace(' ', '-')}-triton-{target.triton}.json"
        (arguments.out / name).write_text(json.dumps(record, indent=1) + "\n")
    for row in failed:
        print(f"FAILED {row['op']} {row['case']} {row['dtype']}: "
              f"{row.get('error') or '{worst} rms {rms:.1e} row {row:.1e} bitwise {bitwise}'.format(**row)}")
    print(f"{target}: {record['passed']} passed, {record['failed']} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
