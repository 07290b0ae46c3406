"""Compare ops of flashlin with fla, mamba_ssm, FlashQLA and cuDNN, on the same work in one process.

    python -m benchmarks.compare --op gated_delta_rule --out benchmarks/results [--warm-fla 16]
    python -m benchmarks.compare --op gla --op rwkv6 --shape 1x32768x8x128
    python -m benchmarks.compare --op kda --calls layers              only the calls that layers make
    python -m benchmarks.compare --op gla --device cpu --small        try the script itself

It times forward, and forward with backward, at the shapes of benchmarks/calls.py; benchmarks/timing.py
describes the method. The packages take turns. The floor of a call is the time in which this GPU copies the
bytes that the call must move (``calls.floor``). Each package's output is compared with flashlin's.

fla runs twice: as it is installed, when it may call FlashQLA and TileLang, and with its Triton kernels alone
(benchmarks/sides.py). fla's autotuning takes minutes. With ``--warm-fla N``, N processes first fill Triton's
cache together (matrix/warming.py). The configurations that fla's tuners choose are stored in
``fla-winners-*.json`` next to the record (mamba_ssm's in a separate file). If that file exists, nothing is
tuned again. Each configuration is timed for a quarter of the usual time (``warming.hurry``).

fla's Triton kernels refuse the backward of scalar gates on Hopper with Triton 3.4 to 3.7.0
(https://github.com/fla-org/flash-linear-attention/issues/640). The refusal is switched off for Triton alone,
and the row is marked (``refused``). As installed, fla refuses unless TileLang computes that backward.
"""
from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.calls import OPS, Op, Shape, cases, floor, inputs, output, runs
from benchmarks.first import CHUNKED
from benchmarks.report import milliseconds
from benchmarks.sides import FLA, PACKAGES, TRITON, refuses, sides
from benchmarks.winners import Winners
from flashlin.compat import target
from matrix import record, warming

RESULTS = Path(__file__).parent / "results"


def measured(op: Op, shape: Shape, device: str, rounds: int, speed: float) -> dict[str, Any]:
    """Measure one row: all packages on one op and shape.

    speed: bytes per second of a copy.
    """
    found = sides(op, shape)
    given = inputs(op, shape, device)
    calls = {name: runs(function, op, shape, device, given) for name, function in found.items()
             if not isinstance(function, str)}
    packages = {name.partition(" (")[0] for name in calls} | set(op.backends.split(", "))
    floors = {what: 1e3 * size / speed for what, size in floor(op, shape).items()}
    row: dict[str, Any] = {"op": op.name, "layer": op.layer, "shape": str(shape),
                           "arguments": op.arguments, "options": dict(op.options), "backends": op.backends,
                           "versions": {name: version for name, of in PACKAGES.items() if name in packages
                                        and (version := record.version(of)) != "none"}}
    for what, least in floors.items():
        row[what] = {"floor_ms": float(f"{least:.4g}"),
                     **{name: {"failed": why} for name, why in found.items() if isinstance(why, str)},
                     **timing.compared({name: of[what] for name, of in calls.items()}, rounds)}
    differences(row["forward"], {name: of["forward"] for name, of in calls.items()})
    return row


def differences(row: dict[str, Any], calls: dict[str, Any]) -> None:
    """Add to each package's figures how far its output is from flashlin's: the relative L2 distance."""
    right = output(calls["flashlin"]()).float() if "failed" not in row["flashlin"] else None
    for name, call in calls.items():
        if right is not None and name != "flashlin" and "failed" not in row[name]:
            distance = (output(call()).float() - right).norm() / right.norm()
            row[name]["differs"] = float(f"{distance.item():.2g}")


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
        if isinstance(function, str) or name.startswith("cuDNN"):  # its kernels are not kept on disk
            continue
        for call in runs(function, op, shape, device).values():
            try:
                call()
            except Exception as error:  # the measuring process meets the same error
                raised.append(record.raised(error))
    return "; ".join(raised)


def told(row: dict[str, Any]) -> str:
    """Return a row as text for the terminal."""
    lines = [f"{row['name']}" + (f", {TRITON} would refuse its backward" if row["refused"] else "")]
    for what in ("forward", "both"):
        for name, figures in row.get(what, {}).items():
            if name == "floor_ms":
                continue
            if "failed" in figures:
                lines.append(f"  {what:8} {name:9} {figures['failed']}")
                continue
            share = row[what]["floor_ms"] / milliseconds(figures)
            parts = [f"{figures['device_ms']['median']:9.4f} ms", f"{100 * share:3.0f} % of floor",
                     f"wall {figures['wall_ms']['median']:9.4f} ms"]
            if "launches" in figures:
                parts.append(f"host {figures['launches']['median']:5.1f} launches")
            parts += [f"{figures['peak_mb']:.0f} MB"] if "peak_mb" in figures else []
            parts += [f"differs by {figures['differs']:.1e}"] if "differs" in figures else []
            lines.append(f"  {what:8} {name:9} " + "  ".join([*parts, figures["how"]]))
    return "\n".join(lines)


def kept(place: Path, versions: dict[str, str]) -> dict[str, Any]:
    """Return the existing record, whose rows are kept unless measured again.

    Return {} if it was made with another version of the peer. Each row has the versions of all packages.
    """
    found = dict(json.loads(place.read_text(encoding="utf-8"))) if place.exists() else {}
    return found if versions.items() <= found.items() else {}


def parsed() -> argparse.Namespace:
    options = record.parser(__doc__)
    options.add_argument("--op", required=True, action="append", choices=OPS,
                         help="family of ops (repeatable, which saves the start of a process)")
    options.add_argument("--shape", action="append", default=[],
                         help="only this shape, as in the table: 1x32768x8x128 (repeatable)")
    options.add_argument("--calls", default="all", choices=("all", "layers", "plain"),
                         help="layers: only the calls with a layer's arguments; plain: only the others")
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
    warming.hurry()
    families = {family: {name: one for name, one in cases(family, given.small, given.shape).items()
                         if given.calls == "all" or bool(one[0].layer) == (given.calls == "layers")}
                for family in given.op}
    card = record.this_card() if given.device == "cuda" else target.probe(torch.device("cpu"))
    peer = OPS[given.op[0]][0].peer
    versions = {peer: record.version(PACKAGES[peer])}
    file = given.winners or record.place(given.out or RESULTS, f"{peer}-winners", card)
    winners = Winners(file, {"device": card.name, "triton": card.triton, "ptxas": card.ptxas,
                             **versions}, (peer,))
    refused = peer == FLA and refuses()
    if given.fill:
        every = {name: case for chosen in families.values() for name, case in chosen.items()}
        warming.walk(list(every), given.fill, lambda name: called(*every[name], given.device))
        return
    if given.warm_fla:
        arguments = [*(f"--op={op}" for op in given.op), *(f"--shape={shape}" for shape in given.shape),
                     "--device", given.device, "--winners", str(file), "--calls", given.calls,
                     *(["--small"] if given.small else [])]
        print(warming.fill("benchmarks.compare", *arguments, processes=given.warm_fla,
                           seconds=given.warm_seconds), flush=True)
    speed = timing.bandwidth(given.device)
    for family, chosen in families.items():
        kind = f"speed-{family}"
        before = kept(record.place(given.out, kind, card), versions) if given.out else {}
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
