"""doctor --run: every op's quick cases in a child process, so that an abort or a hang is a result like any
other.

    python -m flashlin.diagnostics.self_test --device cuda:0 [--op chunk_simple_gla] [--first 3]

The child prints one JSON line when it knows its jobs, one before each of them and one after. ``watch`` reads
them; a child that ends early, or says nothing for too long, costs the job it was at, and another child goes
on with the next. Imports torch in the child only.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from flashlin.compat import failure_kind
from flashlin.compat.subprocesses import Process, channel, python
from flashlin.diagnostics.machine import attempt
from flashlin.diagnostics.report import Ran, Status
from flashlin.policy import Policy

CHILD = partial(python, "flashlin.diagnostics.self_test")
LIMIT = 180.0  # seconds without a word: importing torch, or compiling and running one case
CHILDREN = 3  # where that many have ended early, the machine is broken and the rest is left alone


def watch(device: str, op: str | None, policy: Policy, limit: float = LIMIT,
          environment: Mapping[str, str] | None = None,
          progress: Callable[[int, int, str], None] | None = None) -> Iterator[Ran]:
    """Run the cases in children and yield the result of each. environment: variables to add to those of this
    process; its PYTHONPATH comes first. progress: gets (done, of, what is next); None writes it to stderr."""
    show = progress or partial(_show, device)
    jobs: list[list[str]] | None = None
    first = 0
    variables = {"FLASHLIN_POLICY": policy.policy, "FLASHLIN_PATH": policy.path,
                 "FLASHLIN_IGNORE": ",".join(policy.ignore), **(environment or {})}
    for _ in range(CHILDREN):
        at, since = first, time.monotonic()
        command = CHILD("--device", device, "--first", str(first), *(["--op", op] if op else []),
                        first=variables.get("PYTHONPATH", ""))
        with Process(command, variables) as child:
            for message in map(json.loads, child.lines(limit)):
                if "jobs" in message:
                    jobs = message["jobs"]
                elif "start" in message and jobs is not None:
                    at, since = message["start"], time.monotonic()
                    show(at, len(jobs), " ".join(jobs[at]))
                elif jobs is not None:
                    first = message["done"] + 1
                    status = "ok" if message["ok"] else _status(failure_kind.of_text(message["detail"]))
                    yield _ran(device, jobs[message["done"]], status, message["detail"], message["seconds"])
            ended = child.wait()
        if jobs is None:
            yield _ran(device, ["start", ""], _status(ended.kind), f"the child process {ended.ending}",
                       time.monotonic() - since)
            return
        if ended.failure and first < len(jobs):
            first = at + 1
            yield _ran(device, jobs[at], _status(ended.kind), ended.failure, time.monotonic() - since)
        if first >= len(jobs):
            return
    for job in (jobs or [])[first:]:
        yield _ran(device, job, "could not check", f"not run: {CHILDREN} child processes ended early", 0.0)


def _show(device: str, at: int, of: int, what: str) -> None:
    """Write a line that a terminal overwrites; in a log only every tenth part of them."""
    line = f"flashlin: [{at + 1}/{of}] {what} on {device}"
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{line[:79]}", end="" if at + 1 < of else "\n", file=sys.stderr, flush=True)
    elif at % max(1, of // 10) == 0 or at + 1 == of:
        print(line, file=sys.stderr, flush=True)


def _status(kind: failure_kind.Kind) -> Status:
    """A card or a disk that is full says nothing of an op."""
    return "problem" if kind == "kernel" else "could not check"


def _ran(device: str, job: list[str], status: Status, detail: str, seconds: float) -> Ran:
    case, dtype = job
    return Ran(case=case, where=device, dtype=dtype, status=status, detail=detail, seconds=seconds)


def run(case: Any, device: Any, dtype: Any) -> tuple[bool, str]:
    """One case, forward and backward: whether all tensors are right, and the one nearest to its bound."""
    from flashlin.testing.compare import check
    verdicts = check(case, device, dtype)
    worst = max(verdicts, key=lambda verdict: (not verdict.ok, verdict.rms != verdict.rms,
                                               verdict.rms / verdict.allowed))
    row = "" if worst.ok else f", row {worst.row:.1e}"
    return worst.ok, f"worst is {worst.tensor}, error {worst.rms:.1e} of {worst.allowed:.1e} allowed{row}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashlin.diagnostics.self_test",
                                     description="The child process of flashlin doctor --run.")
    parser.add_argument("--device", required=True)
    parser.add_argument("--op")
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args(argv)
    say = channel()
    import torch

    import flashlin
    from flashlin.testing import cases
    flashlin.settings(canary="off")  # this is the trial
    # the reference goes token by token: threads only get in each other's way (20 times slower on a busy
    # machine)
    torch.set_num_threads(1)
    device = torch.device(given.device)
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
    jobs = [(case, dtype) for case in cases.CASES if case.quick and given.op in (None, case.op)
            for dtype in dtypes]
    say(jobs=[[str(case), str(dtype).removeprefix("torch.")] for case, dtype in jobs])
    for index, (case, dtype) in list(enumerate(jobs))[given.first:]:
        say(start=index)
        started = time.monotonic()
        result, error = attempt(run, case, device, dtype)
        ok, detail = result or (False, error)
        say(done=index, ok=ok, detail=detail, seconds=round(time.monotonic() - started, 3))
        if "CUDA error" in detail:  # the context is lost: the next child has a new one
            return


if __name__ == "__main__":
    main()
