"""doctor --run: every op's quick cases in a child process, so that an abort or a hang is a result like any
other.

    python -m flashlin.diagnostics.quick --device cuda:0 [--op chunk_simple_gla] [--first 3]

The child prints one JSON line when it knows its jobs, one before each of them and one after. ``watch`` reads
them; a child that ends early, or says nothing for too long, costs the job it was at, and another child goes
on with the next. Imports torch in the child only.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import Empty, Queue
from threading import Thread
from typing import Any, NamedTuple

from flashlin.compat import blame
from flashlin.compat.child import channel, python
from flashlin.diagnostics.machine import attempt
from flashlin.diagnostics.report import Status
from flashlin.policy import Policy

CHILD = partial(python, "flashlin.diagnostics.quick")
LIMIT = 180.0  # seconds without a word: importing torch, or compiling and running one case
CHILDREN = 3  # where that many have ended early, the machine is broken and the rest is left alone


class Outcome(NamedTuple):
    case: str
    dtype: str
    status: Status
    detail: str
    seconds: float


def watch(device: str, op: str | None, policy: Policy, limit: float = LIMIT,
          environment: Mapping[str, str] | None = None,
          progress: Callable[[int, int, str], None] | None = None) -> Iterator[Outcome]:
    """Run the cases in children and tell how each went. environment: on top of this process's, its PYTHONPATH
    in front. progress: told (done, of, what is next); None writes it to stderr."""
    jobs: list[list[str]] | None = None
    first = 0
    for _ in range(CHILDREN):
        at, since = first, time.monotonic()
        with _Child(["--device", device, "--first", str(first), *(["--op", op] if op else [])], policy,
                    environment or {}) as child:
            for message in child.messages(limit):
                if "jobs" in message:
                    jobs = message["jobs"]
                elif "start" in message and jobs is not None:
                    at, since = message["start"], time.monotonic()
                    if progress:
                        progress(at, len(jobs), " ".join(jobs[at]))
                    else:
                        _show(at, len(jobs), f"{' '.join(jobs[at])} on {device}")
                elif jobs is not None:
                    first = message["done"] + 1
                    status = "ok" if message["ok"] else _status(blame.of_text(message["detail"]))
                    yield _outcome(jobs[message["done"]], status, message["detail"], message["seconds"])
        if jobs is None:
            yield Outcome("start", "", "problem", f"the child process {child.ending}",
                          time.monotonic() - since)
            return
        if child.ending and first < len(jobs):
            first = at + 1
            yield _outcome(jobs[at], _status(child.fault), child.ending, time.monotonic() - since)
        if first >= len(jobs):
            return
    for job in (jobs or [])[first:]:
        yield _outcome(job, "could not check", f"not run: {CHILDREN} child processes ended early", 0.0)


def _show(at: int, of: int, what: str) -> None:
    """A line that a terminal overwrites; of a log every tenth part."""
    line = f"flashlin: [{at + 1}/{of}] {what}"
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{line[:79]}", end="" if at + 1 < of else "\n", file=sys.stderr, flush=True)
    elif at % max(1, of // 10) == 0 or at + 1 == of:
        print(line, file=sys.stderr, flush=True)


def _status(fault: blame.Fault) -> Status:
    """A card or a disk that is full says nothing of an op."""
    return "problem" if fault == "kernel" else "could not check"


def _outcome(job: list[str], status: Status, detail: str, seconds: float) -> Outcome:
    case, dtype = job
    return Outcome(case, dtype, status, detail, seconds)


class _Child:
    """A child process that talks JSON lines. ``ending``: how it ended, if not as it should; ``fault``: whose
    that was."""

    def __init__(self, arguments: list[str], policy: Policy, environment: Mapping[str, str]) -> None:
        settings = {"FLASHLIN_POLICY": policy.policy, "FLASHLIN_PATH": policy.path,
                    "FLASHLIN_IGNORE": ",".join(policy.ignore)}
        command = CHILD(*arguments, first=environment.get("PYTHONPATH", ""))
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                         stdin=subprocess.DEVNULL, text=True, errors="replace",
                                         env={**os.environ, **settings, **environment})
        self._said: Queue[str | None] = Queue()
        self._grumbled: deque[str] = deque(maxlen=200)
        self._threads = [Thread(target=self._listen, daemon=True), Thread(target=self._overhear, daemon=True)]
        for thread in self._threads:
            thread.start()
        self.ending = ""
        self.fault: blame.Fault = "kernel"

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def messages(self, limit: float) -> Iterator[dict[str, Any]]:
        while True:
            try:
                line = self._said.get(timeout=limit)
            except Empty:
                self.ending = f"gave no answer for {limit:.0f} s and was ended"
                return
            if line is None:
                code = self._process.wait()
                self._threads[1].join(timeout=5)
                self.ending = _ending(code, self._grumbled) if code else ""
                self.fault = blame.of_exit(code, self.ending)
                return
            yield json.loads(line)

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._said.put(line)
        self._said.put(None)

    def _overhear(self) -> None:
        for line in self._process.stderr or ():
            self._grumbled.append(line.strip())


def _ending(code: int, grumbled: deque[str]) -> str:
    names = {int(number): number.name for number in signal.Signals}
    how = f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
    lines = list(filter(None, grumbled))
    telling = [line for line in lines if "rror" in line or "ssert" in line] or lines
    return f"{how}: {telling[-1][:300]}" if telling else how


def run(case: Any, device: Any, dtype: Any) -> tuple[bool, str]:
    """One case, forward and backward: whether all tensors are right, and the one nearest to its bound."""
    from flashlin.testing.compare import check
    verdicts = check(case, device, dtype)
    worst = max(verdicts, key=lambda verdict: (not verdict.ok, verdict.rms != verdict.rms,
                                               verdict.rms / verdict.allowed))
    row = "" if worst.ok else f", row {worst.row:.1e}"
    return worst.ok, f"worst is {worst.tensor}, error {worst.rms:.1e} of {worst.allowed:.1e} allowed{row}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashlin.diagnostics.quick",
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
