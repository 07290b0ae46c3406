"""How long a process that has just begun waits for the first result of an op, forward and with backward, with
the import of flashlin; torch and the card's context are there, and what torch itself imports for a first
gradient.

    python -m benchmarks.first --op chunk_gla

``benchmarks/compare.py --first`` runs it twice: where Triton's cache and FLASHLIN_HOME are empty, and again.
"""
from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.calls import OPS, Op, Shape, find, runs

SHAPE = Shape(2, 1024, 8, 128)
CHUNKED = [op.name for ops in OPS.values() for op in ops if op.name.startswith("chunk_")]


def waited(op: Op, shape: Shape, device: str) -> dict[str, float]:
    """Seconds until the output is there, and until the gradients are, too."""
    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
    x = torch.zeros(1, device=device, requires_grad=True)
    torch.autograd.grad(2 * x, x, torch.ones_like(x))  # which imports sympy
    given = runs(lambda **arguments: getattr(flashlin, op.name)(**arguments), op, shape, device)
    synchronize()
    began, taken = time.perf_counter(), {}
    import flashlin
    for what, call in given.items():
        call()
        synchronize()
        taken[f"{what}_s"] = round(time.perf_counter() - began, 3)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", required=True, choices=CHUNKED)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args()
    op = find(given.op)
    print(json.dumps(waited(op, SHAPE if given.device == "cuda" else op.small, given.device)))


if __name__ == "__main__":
    main()
