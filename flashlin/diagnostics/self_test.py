"""The cases of ``doctor --run``: every op's quick cases, run in a child process.

    python -m flashlin.diagnostics.self_test --device cuda:0 [--op chunk_simple_gla] [--first 3]

In a child process, an abort or a hang is a result like any other. The child prints one JSON line with its
jobs, and then one line before and one line after each job. ``watch`` reads these lines. If a child ends early
or is silent for too long, its present job has failed, and a new child continues with the next job. Only the
child imports torch.
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
LIMIT = 180.0  # seconds without a line: importing torch, or compiling and running one case
CHILDREN = 3  # if so many children end early, the machine is broken, and the other jobs are not run


def watch(device: str, op: str | None, policy: Policy, limit: float = LIMIT,
          environment: Mapping[str, str] | None = None,
          progress: Callable[[int, int, str], None] | None = None) -> Iterator[Ran]:
    """Run the cases in child processes and yield the result of each.

    environment: variables to add to those of this process; its PYTHONPATH comes first.
    progress: a function that gets (jobs done, all jobs, name of the next job); None writes them to stderr.
    limit: seconds that a child may be silent.
    """
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
    """Write the progress to stderr: one line that a terminal overwrites, or about ten lines for a log."""
    line = f"flashlin: [{at + 1}/{of}] {what} on {device}"
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{line[:79]}", end="" if at + 1 < of else "\n", file=sys.stderr, flush=True)
    elif at % max(1, of // 10) == 0 or at + 1 == of:
        print(line, file=sys.stderr, flush=True)


def _status(kind: failure_kind.Kind) -> Status:
    """Return the status of a failure. A GPU or disk that is full does not count against an op."""
    return "problem" if kind == "kernel" else "could not check"


def _ran(device: str, job: list[str], status: Status, detail: str, seconds: float) -> Ran:
    case, dtype = job
    return Ran(case=case, where=device, dtype=dtype, status=status, detail=detail, seconds=seconds)


def run(case: Any, device: Any, dtype: Any) -> tuple[bool, str]:
    """Run one case forward and backward.

    Return True if all tensors are right, and a text on the tensor nearest to its bound.
    """
    from flashlin.testing.compare import check
    worst = max(check(case, device, dtype), key=lambda verdict: (
        not verdict.ok, verdict.rms != verdict.rms, verdict.rms / verdict.allowed))
    row = "" if worst.ok else f", row {worst.row:.1e}"
    return worst.ok, f"worst is {worst.tensor}, error {worst.rms:.1e} of {worst.allowed:.1e} allowed{row}"


def main(argv: list[str] | None = None) -> None:
    """Run the jobs that the command line names, as the child process of ``watch``."""
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
    flashlin.settings(canary="off")  # this run is itself a trial
    # The reference runs token by token, so several threads only slow it down (20 times on a busy machine).
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
