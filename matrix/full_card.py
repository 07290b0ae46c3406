"""What a full card does to verdicts, on a real one: nothing. Writes
``full-card-<card>-triton-<version>.json``.

    python matrix/full_card.py --out matrix/results       under a Triton that the launch table knows nothing of on this card

Four processes share a new FLASHLIN_HOME, so that each meets what the ones before it have left:
  95 %         95 % of the card is in use: what is left is enough, and the kernels run
  full         nothing is left: right result, one warning, *not tried* is kept, no plan changes
  next         the card is free again, the same day: nothing is tried, nothing is said
  cached       a day later; all of the card is in blocks that torch keeps for itself: they are given back, and the kernels run
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEFT = 64 * 2**20  # bytes; a context alone takes some 500 MB


def fill(share: float) -> list[Any]:
    """Blocks that take that share of the card, or all but LEFT bytes."""
    import torch
    free, whole = torch.cuda.mem_get_info()
    wanted = free - max(LEFT, int((1 - share) * whole))
    blocks = []
    for size in (2**30, 2**26, 2**24):
        while wanted >= size:
            blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            wanted -= size
    return blocks


def process(what: str) -> dict[str, Any]:
    """One of the four."""
    import torch

    import flashlin
    from flashlin.compat.target import probe
    from flashlin.guards import verdicts
    from flashlin.kernels.simple_gla.reference import recurrence
    device = torch.device("cuda:0")
    target, generator = probe(device), torch.Generator().manual_seed(0)
    D = 128 if what == "95 %" else 64  # each head size is tried once
    q, k, v = (torch.randn(1, 96, 2, D, generator=generator).bfloat16() for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(1, 96, 2, generator=generator))
    on_card = {name: x.to(device) for name, x in (("q", q), ("k", k), ("v", v), ("g", g))}
    call: Any = flashlin.chunk_simple_gla

    def launches() -> list[str]:
        told = flashlin.explain("chunk_simple_gla", B=1, T=96, H=2, K=D, V=D, needs_grad=False)
        return [line for line in told.splitlines() if line.startswith("  launch")]
    if what == "cached":
        now = time.time()
        time.time = lambda: now + verdicts.A_DAY + 1
    before = launches()
    blocks = fill({"95 %": 0.95, "full": 1.0, "cached": 1.0}.get(what, 0.0)) if what != "next" else []
    left = torch.cuda.mem_get_info()[0]
    if what == "cached":
        blocks.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        began = time.monotonic()
        o, _ = call(**on_card)
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
        call(**on_card)
    right, _ = recurrence(q.double(), k.double(), v.double(), g.double(), None, None, None, D ** -0.5)
    error = float((o.cpu().double() - right).pow(2).mean().sqrt() / right.pow(2).mean().sqrt())
    verdicts.read_again()
    here = verdicts.local(target)
    trial = here.trials.get(f"chunk_simple_gla bfloat16 {D}")
    return {"process": what, "bytes free": left, "error": error, "right": error < 0.005,
            "seconds": round(seconds, 1), "warnings": [str(one.message) for one in told],
            "trial": trial and trial.word, "said": trial and trial.said,
            "kernels ran": sum(one.word == "ran" for one in here.kernels.values()),
            "kernels blamed": sum(one.word in verdicts.BAD for one in here.kernels.values()),
            "same plan": bool(before) and before == launches()}


WANTED = {"95 %": ("ran", 0), "full": ("not tried", 1), "next": ("not tried", 0), "cached": ("ran", 0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    parser.add_argument("--process", choices=list(WANTED), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process:
        print(json.dumps(process(given.process)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as home:
        for what in WANTED:
            ran = subprocess.run([sys.executable, __file__, "--out", str(given.out), "--process", what],
                                 capture_output=True, text=True, check=False,
                                 env={**os.environ, "FLASHLIN_HOME": str(Path(home, "flashlin"))})
            rows.append(json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0
                        else {"process": what, "failed": ran.stderr[-2000:]})
    for row in rows:
        word, told = WANTED[row["process"]]
        row["as wanted"] = bool(row.get("right") and row["same plan"] and row["trial"] == word
                                and len(row["warnings"]) == told
                                and not row["kernels blamed"])
        print(row["process"], "as wanted" if row["as wanted"] else "NOT AS WANTED", json.dumps(row))
    import torch

    from flashlin.compat.target import probe
    target = probe(torch.device("cuda:0"))
    record = {"device": target.name, "capability": list(target.capability), "triton": target.triton,
              "ptxas": target.ptxas, "torch": target.torch, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"full-card-{target.name.replace(' ', '-')}-triton-{target.triton}.json").write_text(
        json.dumps(record, indent=1) + "\n")
    return 0 if all(row["as wanted"] for row in rows) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
