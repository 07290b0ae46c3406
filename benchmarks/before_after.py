"""Compare the speed of two checkouts of flashlin, to find out whether a change made anything slower.

    git worktree add ../before COMMIT
    python -m benchmarks.before_after ../before --out benchmarks/results

calls.py lists the calls, and timing.py describes the timing. Each checkout runs in its own processes. Two
processes per checkout run in alternation, so that a GPU that slows down does so for both. Each metric is
the smaller of the two measurements. A ratio is this checkout / the other; above 1 means slower.
"""
from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import timing
from benchmarks.calls import OPS, Op, Shape, cases, runs

HERE = Path(__file__).resolve().parents[1]
NOISE = 1.05  # two runs of the same checkout may differ by this factor
# The summary counts only metrics with this ending. All others depend on the host, whose cores may be shared.
OF_THE_CARD = "device_ms"
ROUNDS = 5
Rows = dict[str, dict[str, float]]  # call -> metric -> milliseconds or microseconds


def figures(op: Op, shape: Shape) -> dict[str, float]:
    """Return the medians of a call's metrics, by name. Call this in a process that imports the checkout."""
    import flashlin
    calls = runs(getattr(flashlin, op.name), op, shape, "cuda")
    found: dict[str, float] = {}
    for what, taken in timing.compared(calls, ROUNDS).items():
        if "failed" in taken:
            raise SystemExit(f"before_after: {op.name} {shape} {what}: {taken['failed']}")
        found |= {f"{what} {name}": taken[name]["median"] for name in ("device_ms", "wall_ms", "host_us")
                  if name in taken}
    return found


def calls(having: str) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """Return (name, function that measures the metrics) of the selected calls.

    having: comma-separated texts; a call is selected if its name contains one of them.
    """
    chosen = {name: (op, shape) for family in OPS for name, (op, shape) in cases(family).items()
              if shape in op.shapes[:2] and any(part in name for part in having.split(","))}
    return [(name, partial(figures, op, shape)) for name, (op, shape) in chosen.items()]


def ratio(row: dict[str, Any]) -> float:
    """Return a metric of this checkout divided by that of the other one."""
    return float(row["after"] / row["before"])


def measured(checkout: Path, having: str) -> Rows:
    """Measure the selected calls in a new process of that checkout."""
    # Imported here and not at the top, because the child must import the other checkout's flashlin.
    from flashlin.compat.subprocesses import python, run_to_end
    command = python("benchmarks.before_after", "--child", str(checkout), "--call", having)
    done = run_to_end(command)
    if done.failure:
        raise SystemExit(f"before_after: {checkout}: {done.how}: {done.stderr[-2000:]}")
    rows: Rows = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--commits", nargs=2, default=["unknown", "unknown"], metavar=("BEFORE", "AFTER"),
                        help="names of the two checkouts in the record")
    parser.add_argument("--call", default="", help="only calls whose name contains one of these texts: a,b")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        # Import flashlin from that checkout; the benchmark's own modules are from this one.
        sys.path.insert(0, options.child)
        return print(json.dumps({name: function() for name, function in calls(options.call)}))
    if options.before is None or not (options.before / "flashlin").is_dir():
        parser.error(f"before: got {options.before}, need a checkout of flashlin")
    before, after = options.before.resolve(), HERE
    # Run each call once in its own process, several at a time, so that all kernels are compiled before
    # measuring.
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda job: measured(*job),
                      [(checkout, name) for name, _ in calls(options.call) for checkout in (before, after)]))
    told: dict[Path, list[Rows]] = {before: [], after: []}
    for checkout in (before, after, before, after):
        told[checkout].append(measured(checkout, options.call))
    rows: list[dict[str, Any]] = []
    for call, taken in told[after][0].items():
        for figure in taken:
            old, new = (min(run[call][figure] for run in told[checkout]) for checkout in (before, after))
            rows.append({"call": call, "figure": figure, "before": old, "after": new})
    rows.sort(key=ratio, reverse=True)
    for row in rows:
        print(f"{ratio(row):6.3f} {row['before']:10.4f} -> {row['after']:10.4f}  {row['figure']:16}"
              f" {row['call']}")
    card_rows = [row for row in rows if row["figure"].endswith(OF_THE_CARD)]
    print(f"{len(rows)} metrics, {len(card_rows)} of them GPU times: "
          f"{sum(ratio(row) > NOISE for row in card_rows)} are more than {NOISE} times those before")
    if options.out:
        record = {"device": torch.cuda.get_device_name(), "triton": triton.__version__,
                  "torch": torch.__version__, "date": datetime.date.today().isoformat(),
                  "commits": dict(zip(("before", "after"), options.commits, strict=True)),
                  "rows": rows}
        options.out.mkdir(parents=True, exist_ok=True)
        card = torch.cuda.get_device_name().replace(" ", "-")
        file = options.out / f"before-after-{card}-triton-{triton.__version__}.json"
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
