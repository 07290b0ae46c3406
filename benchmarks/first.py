"""Measure how long a new process waits for the first result of an op.

    python -m benchmarks.first --op chunk_gla [--what forward] [--alone]

The time includes the import of flashlin, and a forward or a forward with backward. It excludes the import of
torch, the CUDA context and torch's own imports at a first gradient.

``benchmarks/compare.py --first`` runs this twice. In the first run, Triton's cache and FLASHLIN_HOME are
empty. The second run finds the files of the first. --alone: each kernel compiles when it is launched, as on
a machine with one core (ops/_common/compile_ahead.py).
"""
from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.calls import OPS, Op, Shape, find, runs

SHAPE = Shape(2, 1024, 8, 128)
CHUNKED = [op.name for ops in OPS.values() for op in ops if op.name.startswith("chunk_")]


def waited(op: Op, what: str, shape: Shape, device: str, alone: bool = False) -> float:
    """Return the seconds until the output exists, or with ``both`` also the gradients."""
    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
    x = torch.zeros(1, device=device, requires_grad=True)
    torch.autograd.grad(2 * x, x, torch.ones_like(x))  # the first gradient imports sympy
    call = runs(lambda **arguments: getattr(flashlin, op.name)(**arguments), op, shape, device)[what]
    synchronize()
    began = time.perf_counter()
    import flashlin
    from flashlin.ops._common import compile_ahead
    if alone:
        compile_ahead.cores = lambda: 1
    call()
    synchronize()
    return round(time.perf_counter() - began, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", required=True, choices=CHUNKED)
    parser.add_argument("--what", default="both", choices=("forward", "both"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--alone", action="store_true", help="compile each kernel when it is launched")
    given = parser.parse_args()
    op = find(given.op)
    shape = SHAPE if given.device == "cuda" else op.small
    print(json.dumps({"seconds": waited(op, given.what, shape, given.device, given.alone)}))


if __name__ == "__main__":
    main()
