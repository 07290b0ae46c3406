"""Two checkouts of flashlin on the same work in one run: whether a change made anything slower.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before --out benchmarks/results

Calls are those of compare_fla.py and compare_layer.py. Each checkout has processes of its own, two of them in
turn with the other's, so that a card that slows down does so for both; a figure is the smaller of the two.
Ratios: this checkout / the other, above 1 is slower.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import compare_fla
import compare_layer
import torch
import triton

HERE = Path(__file__).resolve().parents[1]
NOISE = 1.05  # what two runs of one checkout may differ by
# The others are mostly the host's, whose cores may be anybody's.
OF_THE_CARD = ("device_ms", "forward_ms", "both_ms")
Rows = dict[str, dict[str, float]]  # what was called -> figure -> milli- or microseconds


def chunked(op: str, arguments: str, extra: dict[str, Any], shape: tuple[int, ...]) -> dict[str, float]:
    import flashlin
    B, T, H, D = shape
    function, tensors = getattr(flashlin, op), compare_fla.inputs(B, T, H, D, arguments, torch.bfloat16)
    figures = compare_fla.timed(function, tensors, extra) | compare_fla.host(function, D, arguments, extra)
    return {name: value for name, value in figures.items() if name != "peak_mb"}


def layer(op: str, arguments_of: Callable[[], dict[str, Any]], gradients: bool) -> dict[str, float]:
    import flashlin
    return compare_layer.timed(getattr(flashlin, op), arguments_of(), gradients)


def calls(having: str) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """What is timed, of calls that have this in their name, and what makes its figures."""
    made: list[tuple[str, Callable[[], dict[str, float]]]] = []
    for family, op, arguments, _, extra in compare_fla.OPS:
        for shape in compare_fla.SHAPES_OF.get(family, compare_fla.SHAPES)[:2]:
            layout = " channels_last" if "channels_last" in arguments else ""
            made.append((f"{op}{layout} {'x'.join(map(str, shape))}",
                         partial(chunked, op, arguments, extra, shape)))
    made += [(op, partial(layer, op, arguments_of, gradients))
             for op, _, arguments_of, gradients in compare_layer.ROWS]
    return [(name, function) for name, function in made if having in name]


def measured(checkout: Path, having: str) -> Rows:
    """In a process of that checkout, the calls that have this in their name."""
    path = os.pathsep.join([str(checkout), str(HERE), str(HERE / "benchmarks"),
                            os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--child", "--call", having]
    done = subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"before_after: {checkout}: {done.stderr[-2000:]}")
    rows: Rows = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--commits", nargs=2, default=["unknown", "unknown"], metavar=("BEFORE", "AFTER"),
                        help="what to call the two in the record")
    parser.add_argument("--call", default="", help="only calls that have this in their name")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return print(json.dumps({name: function() for name, function in calls(options.call)}))
    if options.before is None or not (options.before / "flashlin").is_dir():
        parser.error(f"before: got {options.before}, need a checkout of flashlin")
    before, after = options.before.resolve(), HERE
    # So that both find everything compiled: a process for each call, the card shared.
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda job: measured(*job),
                      [(checkout, name) for name, _ in calls(options.call) for checkout in (before, after)]))
    runs: dict[Path, list[Rows]] = {before: [], after: []}
    for checkout in (before, after, before, after):
        runs[checkout].append(measured(checkout, options.call))
    rows: list[dict[str, Any]] = []
    for call, figures in runs[after][0].items():
        for figure in figures:
            old, new = (min(run[call][figure] for run in runs[checkout]) for checkout in (before, after))
            rows.append({"call": call, "figure": figure, "before": old, "after": new, "ratio": new / old})
    rows.sort(key=lambda row: -row["ratio"])
    for row in rows:
        print(f"{row['ratio']:6.3f} {row['before']:10.4f} -> {row['after']:10.4f}  {row['figure']:16}"
              f" {row['call']}")
    card_rows = [row for row in rows if row["figure"] in OF_THE_CARD]
    print(f"{len(rows)} figures, {len(card_rows)} of them of the card's time: "
          f"{sum(row['ratio'] > NOISE for row in card_rows)} more than {NOISE} times the other's")
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
