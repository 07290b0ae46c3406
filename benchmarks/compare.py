"""Compare ops of flashlin with fla, mamba_ssm and FlashQLA, on the same work in one process.

    python -m benchmarks.compare --op gated_delta_rule --out benchmarks/results [--warm-fla 16]
    python -m benchmarks.compare --op gla --op rwkv6 --shape 1x32768x8x128
    python -m benchmarks.compare --op gla --device cpu --small        try the script itself

It times forward, and forward with backward, at the shapes of benchmarks/calls.py; benchmarks/timing.py
describes the method. The packages take turns. The floor of a call is the time in which this GPU copies the
bytes that the call must move (``calls.floor``).

fla's autotuning takes minutes. With ``--warm-fla N``, N processes first fill Triton's cache together
(matrix/warming.py). The configurations that fla's tuners choose are stored in ``fla-winners-*.json`` next to
the record (mamba_ssm's in a separate file). If that file exists, nothing is tuned again. Each configuration
is timed for a quarter of the usual time (``warming.hurry``).

fla refuses the backward of its scalar gates on Hopper with Triton 3.4 to 3.7.0
(https://github.com/fla-org/flash-linear-attention/issues/640). This process switches the refusal off, and the
row is marked (``refused``). fla's dispatch to other packages is switched off, so that its column measures
fla's own kernels.
"""
from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.calls import OPS, Op, Shape, cases, floor, inputs, runs
from benchmarks.first import CHUNKED
from benchmarks.winners import Winners
from flashlin.compat import target
from matrix import record, warming
from matrix.peer_table import module_of

RESULTS = Path(__file__).parent / "results"
DOORS = {"FLA_FLASH_QLA": "0", "FLA_FLASH_KDA": "0", "FLA_TILELANG": "0"}
Function = Callable[..., Any]


def sides(op: Op, shape: Shape) -> dict[str, Function | str]:
    """Return the function of each package, or the reason why it is missing."""
    import flashlin
    found: dict[str, Function | str] = {"flashlin": getattr(flashlin, op.name)}
    loaders: dict[str, Callable[[], Function]] = {op.peer: lambda: getattr(module_of(op.home), op.name)}
    if op.name == "chunk_gated_delta_rule" and shape.D == 128:
        loaders["FlashQLA"] = lambda: partial(importlib.import_module("flash_qla").chunk_gated_delta_rule,
                                              auto_cp=True)
    for name, load in loaders.items():
        try:
            found[name] = load()
        # The other package is missing or broken here. Its column shows the reason.
        except Exception as error:
            found[name] = record.raised(error).removeprefix("error: ")
    return found


def stop_refusing() -> bool:
    """Switch fla's refusal off, and return True if fla would have refused on this machine."""
    try:
        module: Any = importlib.import_module("fla.ops.common.chunk_o")
    except Exception:  # fla's column shows the reason
        return False
    refuses = module.IS_NVIDIA_HOPPER and module.TRITON_ABOVE_3_4_0 and not module.TRITON_ABOVE_3_7_1
    module.IS_NVIDIA_HOPPER = False
    return bool(refuses)


def measured(op: Op, shape: Shape, device: str, rounds: int, speed: float) -> dict[str, Any]:
    """Measure one row: all packages on one op and shape.

    speed: bytes per second of a copy.
    """
    found = sides(op, shape)
    given = inputs(op, shape, device)
    calls = {name: runs(function, op, shape, device, given) for name, function in found.items()
             if not isinstance(function, str)}
    floors = {what: 1e3 * size / speed for what, size in floor(op, shape).items()}
    row: dict[str, Any] = {"op": op.name, "shape": str(shape), **shape._asdict(), "arguments": op.arguments}
    for what, least in floors.items():
        row[what] = {"floor_ms": float(f"{least:.4g}"),
                     **{name: {"failed": why} for name, why in found.items() if isinstance(why, str)},
                     **timing.compared({name: of[what] for name, of in calls.items()}, rounds)}
        for figures in row[what].values():
            if isinstance(figures, dict) and "device_ms" in figures:
                figures["share"] = float(f"{least / figures['device_ms']['median']:.4g}")
    return row


def first(op: Op, device: str) -> dict[str, Any]:
    """Return the seconds to the first result of a new process, or the reason why there is none.

    They are measured with ``empty`` and with ``full`` caches, see benchmarks/first.py.
    """
    found: dict[str, Any] = {"op": op.name, "empty": {}, "full": {}}
    for what in ("forward", "both"):
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as home:
            for caches in ("empty", "full"):
                child = record.child("benchmarks.first", "--op", op.name, "--what", what, "--device", device,
                                     seconds=120, TRITON_CACHE_DIR=cache, FLASHLIN_HOME=home)
                found[caches][what] = (child.messages[-1]["seconds"] if child.messages and not child.failure
                                       else child.ending)
    return found


def called(op: Op, shape: Shape, device: str) -> str:
    """Run each call of a row once, and return the errors as text.

    The caller can then repeat calls that ran out of memory.
    """
    raised = []
    for name, function in sides(op, shape).items():
        if isinstance(function, str) or name == "FlashQLA":  # not a Triton kernel
            continue
        for call in runs(function, op, shape, device).values():
            try:
                call()
            except Exception as error:  # the measuring process meets the same error
                raised.append(record.raised(error))
    return "; ".join(raised)


def told(row: dict[str, Any]) -> str:
    """Return a row as text for the terminal."""
    lines = [f"{row['op']} {row['shape']}" + (", fla's refusal off" if row["refused"] else "")]
    for what in ("forward", "both"):
        for name, figures in row.get(what, {}).items():
            if name == "floor_ms":
                continue
            if "failed" in figures:
                lines.append(f"  {what:8} {name:9} {figures['failed']}")
                continue
            parts = [f"{figures['device_ms']['median']:9.4f} ms", f"{100 * figures['share']:3.0f} % of floor",
                     f"wall {figures['wall_ms']['median']:9.4f} ms"]
            if "launches" in figures:
                parts.append(f"host {figures['launches']['median']:5.1f} launches")
            parts += [f"{figures['peak_mb']:.0f} MB"] if "peak_mb" in figures else []
            lines.append(f"  {what:8} {name:9} " + "  ".join([*parts, figures["how"]]))
    return "\n".join(lines)


def kept(place: Path, versions: dict[str, str]) -> dict[str, Any]:
    """Return the existing record, whose rows are kept unless measured again.

    Return {} if it was made with other versions. FlashQLA's version is not compared, because each row says
    whether it has FlashQLA.
    """
    found = dict(json.loads(place.read_text(encoding="utf-8"))) if place.exists() else {}
    return found if versions.items() <= found.items() else {}


def parsed() -> argparse.Namespace:
    options = record.parser(__doc__)
    options.add_argument("--op", required=True, action="append", choices=OPS,
                         help="family of ops (repeatable, which saves the start of a process)")
    options.add_argument("--shape", action="append", default=[],
                         help="only this shape, as in the table: 1x32768x8x128 (repeatable)")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--small", action="store_true", help="use small sizes, to try the script itself")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--first", action="store_true",
                         help="also time the first result of a new process, with caches empty and full")
    options.add_argument("--warm-fla", type=int, default=0, metavar="N",
                         help="first fill Triton's cache with N processes")
    options.add_argument("--warm-seconds", type=float, default=300, help="seconds for --warm-fla at most")
    options.add_argument("--winners", type=Path, help="file with the tuners' choices; by default in --out")
    options.add_argument("--fill", type=warming.Share.parse, help=argparse.SUPPRESS)
    given = options.parse_args()
    for op in given.op:
        known = dict.fromkeys(str(shape) for _, shape in cases(op, given.small).values())
        if other := set(given.shape) - known.keys():
            options.error(f"--shape: got {', '.join(sorted(other))}, need one of {op}'s, {', '.join(known)}")
    if len(peers := {OPS[op][0].peer for op in given.op}) > 1:
        options.error(f"--op: got ops of {' and '.join(sorted(peers))}, need one package at a time")
    return given


def main() -> None:
    given = parsed()
    os.environ.update(DOORS)
    warming.hurry()
    families = {family: cases(family, given.small, given.shape) for family in given.op}
    card = record.this_card() if given.device == "cuda" else target.probe(torch.device("cpu"))
    versions = {package: record.version(name) for package, name in (
        ("fla", "fla-core"), ("mamba_ssm", "mamba_ssm"), ("FlashQLA", "flash-qla"))}
    peer = OPS[given.op[0]][0].peer
    file = given.winners or record.place(given.out or RESULTS, f"{peer}-winners", card)
    winners = Winners(file, {"device": card.name, "triton": card.triton, "ptxas": card.ptxas,
                             peer: versions[peer]}, (peer,))
    refused = stop_refusing()
    if given.fill:
        every = {name: case for chosen in families.values() for name, case in chosen.items()}
        warming.walk(list(every), given.fill, lambda name: called(*every[name], given.device))
        return
    if given.warm_fla:
        arguments = [*(f"--op={op}" for op in given.op), *(f"--shape={shape}" for shape in given.shape),
                     "--device", given.device, "--winners", str(file),
                     *(["--small"] if given.small else [])]
        print(warming.fill("benchmarks.compare", *arguments, processes=given.warm_fla,
                           seconds=given.warm_seconds), flush=True)
    speed = timing.bandwidth(given.device)
    for family, chosen in families.items():
        kind = f"speed-{family}"
        before = kept(record.place(given.out, kind, card), {peer: versions[peer]}) if given.out else {}
        waits = before.get("first", [])
        if given.first:
            waits = [first(op, given.device) for op in OPS[family] if op.name in CHUNKED]
            print("first result:", *waits, flush=True)
        rows = {row["name"]: row for row in before.get("rows", [])}
        for name, (op, shape) in chosen.items():
            rows[name] = {"name": name, "date": datetime.date.today().isoformat(),
                          "refused": refused and op.refused,
                          **measured(op, shape, given.device, given.rounds, speed)}
            print(told(rows[name]), flush=True)
            if given.out:  # after each row, because the GPU may be available only for a limited time
                in_order = [rows[name] for name in cases(family, given.small) if name in rows]
                record.write(given.out, kind, card, **versions, copy_tb_s=round(speed / 1e12, 3), first=waits,
                             rows=in_order)
                winners.write()


if __name__ == "__main__":
    main()
