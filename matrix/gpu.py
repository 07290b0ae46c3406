"""Run every case on the GPUs of this machine, in worker processes, and record the verdicts in one JSON file.

    python -m matrix.gpu --out matrix/results/ [--op chunk_simple_gla] [--missing] [--jobs 8]

Each case runs forward and backward twice in every dtype. Its results are compared with the float64 reference,
and the second run must give bitwise the same results as the first. If a worker dies, for example of an abort
or an illegal address, the record gets a row about it, and the other workers continue.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flashlin
from flashlin.compat import failure_kind
from flashlin.compat import launch as door
from flashlin.testing import cases, compare
from flashlin.testing.compare import Case
from flashlin.testing.record import is_current, recording, source_hash
from matrix import record
from matrix.results import by_case, by_source, load_gpu
from matrix.workload import as_in_a_case

DTYPES = ("bfloat16", "float16", "float32")


def row_of_case(case: Case, dtype_name: str) -> dict[str, Any]:
    """Run a case twice in one dtype and return its row for the record.

    The row has the verdict, the worst tensor with its errors, and the configurations that ran.
    """
    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype_name)
    row: dict[str, Any] = {"op": case.op, "case": case.id, "dtype": dtype_name, "configs": {}}

    def noting(launch: Any, kernel: Any, *rest: Any) -> None:
        row["configs"][launch.config] = source_hash(kernel.fn.__module__, kernel.fn.__name__)
        door._start(launch, kernel, *rest)
    door.replace_starter(noting)
    try:
        verdicts, again = (compare.check(case, device, dtype) for _ in range(2))
    except Exception as error:  # any error is the result of the case, except those of a full GPU or disk
        return {**row, "ok": False,
                failure(failure_kind.of_error(error)): f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        door.replace_starter(None)
    worst = max(verdicts, key=lambda one: (not one.ok, math.isnan(one.rms), one.rms / one.allowed))
    return {**row, "ok": all(verdict.ok for verdict in verdicts) and verdicts == again,
            "bitwise": verdicts == again, "worst": worst.tensor, "rms": worst.rms, "row": worst.row,
            "allowed": worst.allowed}


def failure(kind: failure_kind.Kind) -> str:
    """Return the key under which a row keeps the text of a failure.

    It is "error" if the kernel failed. It is "not tried" if the machine failed, for example with a full disk;
    such rows are printed but not recorded.
    """
    return "error" if kind == "kernel" else "not tried"


def planned(case: Case, dtype_name: str) -> dict[str, str]:
    """Return the configurations that a case would launch on this GPU, each with its source hash.

    It only plans and launches nothing. The result has the same form as ``configs`` in a row of
    ``row_of_case``.
    """
    with recording(record.this_card()) as launches:
        as_in_a_case(case, getattr(torch, dtype_name), gradients=True)
    return {launch.config: source_hash(launch.module, launch.kernel) for launch in launches}


def work(part: int, of: int, ops: list[str], known: dict[str, Any]) -> None:
    """Run the cases of worker number ``part`` out of ``of``, and print one JSON line for each.

    Each case is announced in a line before it runs, so that the case is known if the worker dies. A case is
    skipped if the record ``known`` says that it was right and has all configurations that it would launch.
    """
    flashlin.settings(canary="trial")
    torch.set_num_threads(1)  # the references run on the CPU, with one worker for each core
    # Neighboring cases share kernels. A worker gets consecutive cases, so that it compiles each kernel once.
    # If most cases are known, it gets every of-th case instead, so that all workers have something to do.
    todo = [(case, dtype) for dtype in DTYPES for case in cases.CASES if not ops or case.op in ops]
    right = {key(row) for row in known.get("rows", ()) if row["ok"]}
    for case, dtype in todo[part::of] if known else todo[len(todo) * part // of:len(todo) * (part + 1) // of]:
        if (case.op, case.id, dtype) in right and planned(case, dtype).items() <= known["configs"].items():
            continue
        print(json.dumps({"starting": [case.op, case.id, dtype]}), flush=True)
        print(json.dumps(row_of_case(case, dtype)), flush=True)


def gpus() -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES entry of each GPU of the same model as the current GPU."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(index) for index in range(torch.cuda.device_count())]
    first = torch.cuda.get_device_name()
    return [name for index, name in enumerate(names) if torch.cuda.get_device_name(index) == first]


def collect(jobs: int, ops: list[str], seconds: float, known: Path | None = None) -> list[dict[str, Any]]:
    """Run the cases in ``jobs`` worker processes and return the rows of all workers.

    A worker that ended early adds a row that says how it ended. A row with the key ``not tried`` does not
    count against a kernel.

    ops: names of the ops to run. Empty means all.
    seconds: time limit of each worker.
    known: a record. Cases that were right there are not run again.
    """
    options = [*(f"--op={op}" for op in ops), *([f"--known={known}"] if known else [])]
    with ThreadPoolExecutor(jobs) as pool:
        shares = pool.map(partial(rows_of_worker, jobs, options, seconds, gpus()), range(jobs))
        return [row for rows in shares for row in rows]


def rows_of_worker(of: int, options: list[str], seconds: float, cards: list[str],
                   part: int) -> list[dict[str, Any]]:
    child = record.child("matrix.gpu", "--part", f"{part}/{of}", *options, seconds=seconds,
                         CUDA_VISIBLE_DEVICES=cards[part % len(cards)])
    rows = [line for line in child.messages if "op" in line]
    if not child.failure:
        return rows
    last = child.messages[-1] if child.messages else {}
    early = dict(zip(("op", "case", "dtype"), last.get("starting", ["?"] * 3), strict=True), ok=False)
    if child.code is None:
        how, why = "not tried", f"{child.how}, and what its worker had still to do is not run either"
    else:
        how, why = failure(child.kind), f"worker {child.how}: {child.stderr[-300:]}"
    return [*rows, {**early, how: why}]


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["op"], row["case"], row["dtype"]


def merged(before: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of a record in which new rows replace the older rows of the same cases.

    A configuration is listed as right unless one of the new rows that use it failed.
    """
    configs, broken = dict[str, str](before.get("configs", {})), set[str]()
    for row in rows:
        used = row.pop("configs", {})
        configs.update(used)
        broken.update(used if not row["ok"] else ())
    there = {(case.op, case.id) for case in cases.CASES}
    every = {key(row): row for row in (*before.get("rows", ()), *rows) if key(row)[:2] in there}
    passed = sum(row["ok"] for row in every.values())
    return {"passed": passed, "failed": len(every) - passed,
            "configs": {config: source for config, source in sorted(configs.items()) if config not in broken},
            "rows": [row for _, row in sorted(every.items())]}


def of_today(configs: dict[str, str]) -> dict[str, str]:
    """Return the configurations whose kernel source has not changed since they were recorded.

    configs: configuration -> source hash.
    """
    return {config: source for config, source in configs.items() if is_current(source, config.partition(" ")[0])}


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--op", action="append", default=[],
                        help="only this op (repeatable); the record in --out, if made by these versions, "
                        "keeps the others")
    parser.add_argument("--jobs", type=int, default=8,
                        help="worker processes (default 8; most of the time is compilation)")
    parser.add_argument("--seconds", type=float, default=540, help="time limit of the run (default 540)")
    parser.add_argument("--missing", action="store_true",
                        help="only cases that failed, or that launch a configuration that is not recorded as "
                        "right in the record in --out, if made by these versions")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--known", type=Path,
                        help="as --missing, with this record instead, which must be from a GPU like this one")
    arguments = parser.parse_args()
    if arguments.part:
        part, of = arguments.part.split("/")
        work(int(part), int(of), arguments.op,
             load_gpu(arguments.known) if arguments.known else {})
        sys.stdout.flush()
        # Some pairs of torch and Triton abort while the interpreter shuts down, after all work is done.
        os._exit(0)
    card = record.this_card()
    if arguments.known:
        like = {name: fact for name, fact in record.made_by(card).items() if name != "device"}
        if not arguments.known.is_file() or not like.items() <= load_gpu(arguments.known).items():
            parser.error(f"--known: got {arguments.known}, need a record of a card with {like}")
    before: dict[str, Any] = {}
    place = record.place(arguments.out or Path(), "gpu", card)
    if arguments.out and place.exists() and (arguments.op or arguments.missing):
        before = load_gpu(place)
    if not record.made_by(card).items() <= before.items():
        before = {}
    if before:
        before["configs"] = of_today(before["configs"])
    tried = collect(arguments.jobs, arguments.op, arguments.seconds,
                    arguments.known or (place if before and arguments.missing else None))
    rows, untried = [[row for row in tried if ("not tried" in row) == aside] for aside in (False, True)]
    failed = [row for row in rows if not row["ok"]]
    facts = merged(before, rows)
    if arguments.out:
        record.write(arguments.out, "gpu", card, **{**facts, "configs": by_source(facts["configs"]),
                                                    "rows": by_case(facts["rows"])})
    for row in failed:
        print(f"FAILED {row['op']} {row['case']} {row['dtype']}: "
              f"{row.get('error') or '{worst} rms {rms:.1e} row {row:.1e} bitwise {bitwise}'.format(**row)}")
    for row in untried:
        print(f"NOT TRIED {row['op']} {row['case']} {row['dtype']}: {row['not tried']}")
    print(f"{card}: {len(rows)} run, {len(failed)} failed, {len(untried)} not tried; "
          f"{facts['passed']} right of {len(facts['rows'])} in the record")
    return 1 if failed or untried else 0


if __name__ == "__main__":
    sys.exit(main())
