"""The scan of scalar decays whose loads, products and stores overlap (``kernels/simple_gla/overlapping.py``),
beside the one that plain Triton makes: milliseconds of the card, forward and with backward, and how far apart
the outputs are.

    python -m benchmarks.overlapping --out benchmarks/results
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import flashlin
from benchmarks import timing
from benchmarks.calls import Shape, find, output, runs
from flashlin import dispatch
from flashlin.kernels import scans
from matrix import record

D, ROUNDS, NEVER = 128, 9, (99, 0)
SHAPES = (Shape(4, 4096, 32, D), Shape(1, 8192, 32, D), Shape(16, 4096, 16, D), Shape(1, 32768, 8, D))
OPS = ("chunk_simple_gla", "chunk_retention", "mamba_chunk_scan_combined")


def planned(call: Callable[[], Any], since: tuple[int, int]) -> Any:
    """A call as if Gluon's scan were there since this release."""
    scans.OVERLAPS = since
    dispatch.plan.cache_clear()
    return call()


def row(name: str, shape: Shape) -> dict[str, Any]:
    """Milliseconds of both ways; distance: of the outputs, relative."""
    found: dict[str, Any] = {"op": name, "shape": str(shape)}
    for what, call in runs(getattr(flashlin, name), find(name), shape, "cuda").items():
        plain, overlapped = partial(planned, call, NEVER), partial(planned, call, scans.OVERLAPS)
        if what == "forward":
            right, other = output(plain()).float(), output(overlapped()).float()
            found["distance"] = float(f"{float((other - right).norm() / right.norm()):.2g}")
        taken = timing.compared({"plain": plain, "overlapped": overlapped}, ROUNDS)
        found[what] = {way: one.get("failed") or one["device_ms"]["median"] for way, one in taken.items()}
    return found


def main() -> int:
    given = record.parser(__doc__).parse_args()
    flashlin.settings(canary="trial")  # whether it has run or not
    rows = []
    for name in OPS:
        for shape in SHAPES if name.startswith("chunk_") else find(name).shapes:
            rows.append(row(name, shape))
            print(rows[-1], flush=True)
            if given.out:
                record.write(given.out, "overlapping-scan", record.this_card(), dtype="bfloat16", rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
