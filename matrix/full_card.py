"""Test on a GPU that full GPU memory does not lead to wrong results of trials.

    python -m matrix.full_card --out matrix/results

writes full-card-<card>-triton-<version>.json. Run it under a Triton release for which the launch table has no
entry of this GPU, because only then flashlin tries kernels before their first use.

Four processes run one after the other. They share a new FLASHLIN_HOME, so each process reads the local
results of the earlier ones:
  95 %         95 % of the memory is in use: the rest is enough, and the kernels run
  full         no memory is left: the result is right, one warning appears, the local result is *not tried*,
               and the plan does not change
  next         the memory is free again on the same day: nothing is tried, and no warning appears
  cached       one day later, all memory is in blocks that torch caches: they are released, and the kernels
               run
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import flashlin
from flashlin.compat.target import probe
from flashlin.guards import local_results
from flashlin.kernels.gla.reference import recurrence
from flashlin.testing.compare import judge
from matrix import record

# Process -> fraction of the GPU memory in use, expected result of its trial, and expected number of warnings.
PROCESSES = {"95 %": (0.95, "ran", 0), "full": (1.0, "not tried", 1), "next": (0.0, "not tried", 0),
             "cached": (1.0, "ran", 0)}
ALLOWED = 0.005  # RMS error over the RMS of the reference
LEFT = 64 * 2**20  # bytes left on a full GPU; a CUDA context alone needs about 500 MB


def fill(share: float) -> list[torch.Tensor]:
    """Allocate blocks until a fraction of the GPU memory is in use, and return them.

    At least ``LEFT`` bytes stay free.
    """
    free, whole = torch.cuda.mem_get_info()
    wanted = free - max(LEFT, int((1 - share) * whole))
    blocks = []
    for size in (2**30, 2**26, 2**24):
        while wanted >= size:
            blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            wanted -= size
    return blocks


def process(name: str) -> dict[str, Any]:
    """Run one of the four processes, and return its row of the record."""
    share, word, told_of = PROCESSES[name]
    device = torch.device("cuda:0")
    # Process "95 %" has its own head size, because each head size is tried only once.
    generator, D = torch.Generator().manual_seed(0), 128 if name == "95 %" else 64
    inputs = {name: torch.randn(1, 96, 2, D, generator=generator).bfloat16() for name in "qkv"}
    inputs["g"] = torch.nn.functional.logsigmoid(torch.randn(1, 96, 2, generator=generator))
    on_card = {name: x.to(device) for name, x in inputs.items()}
    call: Any = flashlin.chunk_simple_gla

    def launches() -> list[str]:
        text = flashlin.explain("chunk_simple_gla", B=1, T=96, H=2, K=D, V=D, needs_grad=False)
        return [line for line in text.splitlines() if line.startswith("  launch")]
    if name == "cached":
        now = time.time()
        time.time = lambda: now + local_results.A_DAY + 1
    before = launches()
    blocks = fill(share) if share else []
    left = torch.cuda.mem_get_info()[0]
    if name == "cached":
        blocks.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        began = time.monotonic()
        o, _ = call(**on_card)
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
        call(**on_card)
    right, _ = recurrence(**{name: x.double() for name, x in inputs.items()}, scale=D ** -0.5)
    error = judge("o", o.cpu(), right, ALLOWED).rms
    local_results.read_again()
    here = local_results.local(probe(device))
    trial = here.trials.get(f"chunk_simple_gla bfloat16 {D}")
    row = {"process": name, "bytes free": left, "error": error, "right": error < ALLOWED,
           "seconds": round(seconds, 1), "warnings": [str(one.message) for one in warned],
           "trial": trial and trial.word, "said": trial and trial.said,
           "kernels ran": sum(one.word == "ran" for one in here.kernels.values()),
           "kernels blamed": sum(one.word in local_results.BAD for one in here.kernels.values()),
           "same plan": bool(before) and before == launches()}
    row["as wanted"] = bool(row["right"] and row["same plan"] and row["trial"] == word
                            and len(warned) == told_of and not row["kernels blamed"])
    return row


def main() -> int:
    parser = record.parser(__doc__, required=True)
    parser.add_argument("--process", choices=list(PROCESSES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process:
        print(json.dumps(process(given.process)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as home:
        for name in PROCESSES:
            child = record.child("matrix.full_card", "--out", str(given.out), "--process", name,
                                 FLASHLIN_HOME=str(Path(home, "flashlin")))
            row = {"process": name, "failed": child.stderr[-2000:], "as wanted": False}
            rows.append(row if child.failure else child.messages[-1])
            print(name, "as wanted" if rows[-1]["as wanted"] else "NOT AS WANTED", json.dumps(rows[-1]))
    record.write(given.out, "full-card", record.this_card(), rows=rows)
    return 0 if all(row["as wanted"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
