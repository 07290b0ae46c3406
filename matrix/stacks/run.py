"""Run the models of every stack raw and patched, and write one record for each stack.

This module does the work of ``python -m matrix stacks``. It runs the models in child processes
(``matrix/stacks/child.py``), compares their answers and prints the failures.
"""
from __future__ import annotations

import datetime
import json
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashlin.compat.subprocesses import python, run_to_end
from flashlin.integrations.on_a_cpu import ADVICE
from matrix.results import one_a_line
from matrix.stacks.child import Job
from matrix.stacks.models import Model, excuse
from matrix.stacks.records import packed, read
from matrix.stacks.verdicts import Answer, Outcome, outcome, verdict_of
from matrix.stacks.versions import STACKS, Stack

SECONDS = 1800
TOGETHER = 4  # models in one process; if it ends early, each model runs again in a process of its own
RAW = ["raw", "plain", "float64"]
WAYS = {"raw": RAW, "patched": ["patched"], "both": [*RAW, "patched"]}
INTERPRETED = {"PYTHONOPTIMIZE": "1", "TRITON_INTERPRET": "1"}


class Failed(RuntimeError):
    """Raised if a child process returned no answers. The text says how the process ended."""


def asked(stack: Stack, models: Sequence[Model], way: str = "both") -> dict[str, dict[str, Any]]:
    """Return the verdicts on models of a stack, by model, in the form that ``judged`` returns.

    All models run in one child process. A second process computes the reference if it needs another
    environment. Models that this version of the package does not have are missing from the result.

    way: ``raw``, ``patched`` or ``both``.
    """
    names = [one.name for one in models]
    with tempfile.TemporaryDirectory() as folder:
        own = Job(names, WAYS[way], list(stack.patches), stack.hidden(), str(Path(folder, "own")),
                  on_cuda=stack.on_cuda)
        other: dict[str, Any] = {}
        if stack.reference:
            beside = own._replace(ways=["raw"] if stack.reference == "interpreter" else RAW,
                                  out=str(Path(folder, "reference")), reference=stack.reference,
                                  hidden=own.hidden + ["fla"] * (stack.reference == "without fla"))
            other = told(stack, beside)
            own = own._replace(weights=beside.out if stack.reference == "transformers" else "",
                               ways=[one for one in own.ways if one in ("raw", "patched")])
        found = told(stack, own)
    return {name: judged(one, other.get(name, {})) for name, one in found.items()}


def told(stack: Stack, job: Job) -> dict[str, Any]:
    """Run a child process and return its answers by model. Raise Failed if the process fails."""
    import torch
    extra = INTERPRETED if job.reference == "interpreter" else {}
    command = python("matrix.stacks.child", json.dumps(job._asdict()),
                     first=stack.environment()["PYTHONPATH"])
    ended = run_to_end(command, extra, limit=SECONDS)
    if ended.failure:
        raise Failed(f"{stack.name}, {', '.join(job.models)}: {ended.how}: {ended.stderr.strip()[-1000:]}")
    found: dict[str, Any] = torch.load(job.out, weights_only=True)
    for one in found.values():
        one["ways"] = {way: {quantity: Answer(**answer) for quantity, answer in said.items()}
                       for way, said in one["ways"].items()}
    return found


def judged(found: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the verdicts on one model.

    The result has the key ``ops``: the ops of flashlin that ran in the patched model. Its keys ``raw`` and
    ``patched`` contain an Outcome for each quantity; a way that did not run is missing.

    found: the answers of the model.
    other: the answers of the reference process, or an empty dict if the model itself is the reference.
    """
    ways, beside, ops = found["ways"], other.get("ways", {}), found["ops"].get("patched", [])
    fp64 = beside.get("float64") or ways.get("float64") or {}

    def fp32(quantity: str) -> Answer:
        """Return the answer in float32 of the first raw program that has one."""
        answers = (said.get(way, {}).get(quantity) for said in (beside, ways) for way in ("plain", "raw"))
        return next((one for one in answers if one and one.tensors), Answer())
    said: dict[str, Any] = {"ops": ops}
    for way in ways.keys() & {"raw", "patched"}:
        said[way] = {quantity: outcome(one, None, fp64.get(quantity)) if way == "raw" else
                     outcome(one, fp32(quantity), fp64.get(quantity), ran=bool(ops))
                     for quantity, one in ways[way].items()}
    return said


def short(one: Outcome) -> str:
    """Return an outcome as text for a record.

    The text is such as ``agrees fp32 3e-06/8e-06 fp64 ...``, with the RMS ratio of the tensor and of its
    worst row, or ``raises: `` and the message of the error.
    """
    figures = [f"{name} {error.rms:.1e}/{error.row:.1e}" + ("" if error.ok else f" at {error.at}")
               for name, error in (("fp32", one.fp32), ("fp64", one.fp64), ("itself", one.itself))
               if error and not (error.ok and error.rms == 0)]
    said = re.sub(r"(/[\w.+-]+){2,}", r"...\1", one.said)  # records contain no local paths
    said = said.partition(f" {ADVICE[:20]}")[0]  # drop the advice, which is the same for all models
    return f"{one.verdict}: {said}" if said else " ".join([one.verdict, *figures])


def row(model: str, said: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a model in a record."""
    import torch
    return {"model": model, "torch": torch.__version__, "date": datetime.date.today().isoformat(),
            "ops": " ".join(said["ops"]),
            **{way: {quantity: short(one) for quantity, one in said[way].items()}
               for way in ("raw", "patched") if way in said}}


def write(folder: Path, stack: Stack, rows: list[dict[str, Any]]) -> None:
    """Write rows to the record of a stack. Rows of other models stay in the record with their date."""
    path = folder / f"{stack.file}.json"
    before = read(path)["rows"] if path.exists() else []
    known = {one["model"]: one for one in [*before, *rows]}
    facts = {"stack": stack.name, "of": stack.of, "patches": list(stack.patches),
             "reference": stack.reference, "on_cuda": stack.on_cuda,
             "rows": [known[one.name] for one in stack.models if one.name in known]}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(one_a_line(packed(facts)), encoding="utf-8")


def run(stacks: Iterable[Stack], names: Sequence[str], way: str, out: Path | None, jobs: int) -> int:
    """Run the models of stacks, print their failures, and write their records.

    Return 1 if patching made a model worse without an excuse, else 0.

    names: names of the models. Empty means all.
    way: ``raw``, ``patched`` or ``both``. Only ``both`` writes records.
    out: folder of the records, or None.
    jobs: number of processes at the same time.
    """
    began, bad = time.monotonic(), 0
    for stack in stacks:
        stack.environment()  # install it once, before several processes need it at the same time
        chosen = [one for one in stack.models if not names or one.name in names]
        shares = [chosen[first:first + TOGETHER] for first in range(0, len(chosen), TOGETHER)]
        with ThreadPoolExecutor(jobs) as pool:
            for said in pool.map(lambda share, stack=stack: _alone(stack, share, way), shares):
                rows = [row(name, one) for name, one in said.items()]
                for one in rows:
                    failures = wrong(one, stack.on_cuda)
                    bad += bool(failures)
                    print("\n    ".join([f"{stack.name}: {one['model']}:{'' if failures else ' agrees'}",
                                         *failures]), flush=True)
                if out is not None and way == "both":
                    write(out, stack, rows)
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if bad else 0


def _alone(stack: Stack, models: Sequence[Model], way: str) -> dict[str, dict[str, Any]]:
    try:
        return asked(stack, models, way)
    except Failed as failure:
        if len(models) > 1:
            return {name: said for one in models for name, said in _alone(stack, [one], way).items()}
        return {models[0].name: {"ops": [], "patched": {"logits": Outcome("raises", str(failure))}}}


def wrong(row: dict[str, Any], on_cuda: bool = False) -> list[str]:
    """Return one text for each quantity of a model that patching made worse.

    A quantity counts as worse if the patched verdict differs from the raw verdict and is ``differs``,
    ``raises`` or ``not patched``. It does not count if ``excuse`` has a reason in the model itself.

    row: the row of the model in a record.
    on_cuda: True if the patched model runs its branch for GPUs.
    """
    raw, lines = row.get("raw", {}), []
    for quantity, answer in row.get("patched", {}).items():
        verdict, before = verdict_of(answer), verdict_of(raw[quantity]) if quantity in raw else ""
        worse = verdict in ("differs", "not patched", "raises") and verdict != before
        if worse and not excuse(row["model"], quantity, verdict, before, on_cuda):
            lines.append(f"{quantity}: {answer}" + (f" | raw: {raw[quantity]}" if before else ""))
    return lines


def by_name(names: Sequence[str]) -> list[Stack]:
    """Return the stacks with these names, or all stacks if ``names`` is empty.

    A name that no stack has selects all stacks whose names begin with it. Raise ValueError if there are none.
    """
    found: dict[str, Stack] = {}
    for name in names or [""]:
        begun = {one.name: one for one in STACKS if one.name.startswith(name)}
        if not begun:
            raise ValueError(f"got {name}, need a stack out of {'; '.join(one.name for one in STACKS)}")
        found |= {name: begun[name]} if name in begun else begun
    return list(found.values())
