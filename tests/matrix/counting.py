"""Which branches on what a loop has counted Triton's compiler for AMD leaves. Run by test_known_issues.py, under
one release: python counting.py FOLDER ARCH ... prints, for each, the stores of each kernel, which has two."""
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
    fresh = triton.jit(kernel)  # what is compiled for one card is kept in it
    compiled_by(partial(fresh.warmup, torch.int32, 5, grid=(1,), num_warps=1), arch, folder)
    [code] = folder.rglob("*.ttgir")  # written before a linker is called, which Triton has from 3.5 on
    return code.read_text().count("store ")


if __name__ == "__main__":
    _, place, *archs = sys.argv
    print(json.dumps({arch: {kernel.__name__: stores(kernel, arch, Path(place) / arch / kernel.__name__)
                             for kernel in (up_to_8, four_times_4)} for arch in archs}))
