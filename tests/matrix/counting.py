"""Count the branches on loop counters that Triton's compiler for AMD keeps.

test_known_issues.py runs this file under one release: python counting.py FOLDER ARCH ... prints, for each
architecture, the number of stores of each kernel. A kernel has two stores.
"""
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

from flashlin.testing.compile import compiled_by


def up_to_8(out, n):
    count = 0
    for _ in range(tl.minimum(tl.maximum(n, 0), 8)):
        count += 1
    if count >= 8:
        tl.store(out, 1)
    else:
        tl.store(out, 2)


def four_times_4(out, n):
    count = 0
    for _ in range(4):
        for _ in range(4):
            count += 1
    if count < 5:
        tl.store(out, 1)
    else:
        tl.store(out, n)


def stores(kernel, arch: str, folder: Path) -> int:
    fresh = triton.jit(kernel)  # a jitted function caches the code of the first GPU
    compiled_by(partial(fresh.warmup, torch.int32, 5, grid=(1,), num_warps=1), arch, folder)
    [code] = folder.rglob("*.ttgir")  # written before the linker runs, which Triton has since 3.5
    return code.read_text().count("store ")


if __name__ == "__main__":
    _, place, *archs = sys.argv
    print(json.dumps({arch: {kernel.__name__: stores(kernel, arch, Path(place) / arch / kernel.__name__)
                             for kernel in (up_to_8, four_times_4)} for arch in archs}))
