"""Trials of kernels in child processes.

A child process runs a small case of an op. Its end gives a verdict on a kernel, or shows that the trial could
not run. The child reports each kernel before the launch and after it has run. Therefore an abort or a hang
during a launch counts against that kernel. An error between two launches, such as a lack of memory that other
processes use, counts against no kernel.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from flashlin import dispatch
from flashlin.compat.subprocesses import python, run_to_end
from flashlin.compat.target import Target
from flashlin.guards import launch_table, local_results
from flashlin.guards.local_results import BAD, Table, Verdict, Word

CHILD = partial(python, "flashlin.trial.child")
LIMIT = 300.0  # seconds for a child, from its start to its end
LONGER = 2.0  # factor on the limit when a child that seems to hang is run again, alone
SAID = 400  # characters that are kept of a child's message


class Trial(NamedTuple):
    """One op with a dtype and a head dimension to try; head_dim is 0 for ops without heads."""
    op: str
    dtype: str
    head_dim: int

    def __str__(self) -> str:
        return " ".join([self.op, self.dtype, *([str(self.head_dim)] if self.head_dim else [])])


class Tried(NamedTuple):
    """The outcome of a trial.

    verdict: ``ran``, ``wrong numbers``, ``compiler error``, ``abort or illegal access`` or ``hang``. It is
        ``torch path`` if no kernel was launched. It is ``not tried`` after an error outside a launch (memory,
        disk, permissions, a busy or missing device), because such an error says nothing about a kernel.
    detail: the message of the error, or the differences.
    configs: the configurations that were launched, in order.
    struck: the configuration of the launch during which the child ended, or ``""``.
    memory: True if the trial failed for lack of memory.
    seconds: the duration of the child process.
    """
    trial: Trial
    verdict: Word
    detail: str
    configs: tuple[str, ...] = ()
    struck: str = ""
    memory: bool = False
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        """Return True if the kernels ran correctly or no kernel was needed."""
        return self.verdict in ("ran", "torch path")

    def __str__(self) -> str:
        D = f" D={self.trial.head_dim}" if self.trial.head_dim else ""
        detail = f"  {self.detail}" if self.detail else ""
        return f"{self.verdict:14} {self.trial.op} {self.trial.dtype}{D}  {self.seconds:.0f} s{detail}"


def run(trials: Sequence[Trial], device: torch.device, target: Target, *, jobs: int = 1, limit: float = LIMIT,
        progress: Callable[[Tried], None] = lambda _: None) -> list[Tried]:
    """Run trials, ``jobs`` at a time, and store the verdicts for this machine.

    A trial that lacked memory runs again alone with a smaller case. Before that, this process frees the GPU
    memory that it does not use. A trial that seems to hang runs again alone with a longer limit, except on
    AMD, where a hang may freeze the desktop.
    limit: seconds for each child.
    progress: is called with each outcome.
    """
    def again(tried: Tried) -> bool:
        return tried.memory or (tried.verdict == "hang" and target.backend != "hip")

    def first(trial: Trial) -> Tried:
        tried = _child(trial, device, target, limit)
        if not again(tried):
            progress(tried)
        return tried
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(first, trials))
    for number, one in enumerate(outcomes):
        if again(one):
            if one.memory:
                _give_back_memory(device)
            outcomes[number] = _child(one.trial, device, target, limit if one.memory else limit * LONGER,
                                      small=one.memory)
            progress(outcomes[number])
    _keep(outcomes, target)
    return outcomes


def _give_back_memory(device: torch.device) -> None:
    """Free the GPU memory that torch caches in this process, so that a child process can use it.

    Do nothing during the capture of a CUDA graph, which freeing memory would abort.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.empty_cache()


def _keep(outcomes: Sequence[Tried], target: Target) -> None:
    """Derive a verdict for each kernel from the outcomes of trials, and store the verdicts.

    If a child ended during a launch, that kernel failed. Wrong numbers count against each launched kernel
    that has not run correctly elsewhere, or against all launched kernels if there is no such kernel. A kernel
    that failed in one trial and ran in another has failed.
    """
    now = time.time()
    bad: dict[str, Verdict] = {}
    trials = {str(one.trial): Verdict(one.verdict, now, str(one.trial), one.detail) for one in outcomes}
    ran = {config: trials[str(one.trial)] for one in outcomes if one.verdict == "ran"
           for config in one.configs}
    for one in outcomes:
        blamed: Sequence[str] = ()
        if one.verdict == "wrong numbers":
            blamed = [config for config in one.configs if config not in ran
                      and launch_table.trust(config, target) != "ran"] or one.configs
        elif one.verdict in BAD:
            blamed = (one.struck,)
        bad.update(dict.fromkeys(blamed, trials[str(one.trial)]))
    local_results.keep(Table({**ran, **bad}, trials), target)
    dispatch.plan.cache_clear()


def _child(trial: Trial, device: torch.device, target: Target, limit: float, small: bool = False) -> Tried:
    """Run one trial in a child process and return its outcome."""
    known = local_results.unwritten(target)  # sent through a pipe, because an argument has at most 128 KiB
    command = CHILD(f"--device={device}", f"--op={trial.op}", f"--dtype={trial.dtype}",
                    f"--head-dim={trial.head_dim}", *["--small"] * small, *["--known"] * bool(known))
    ended = run_to_end(command, {"FLASHLIN_CANARY": "trial"}, limit=limit, given=known)
    seconds = round(ended.seconds, 1)
    configs: list[str] = []
    struck, result = "", None
    for message in ended.messages:
        struck = message.get("launch", "" if "landed" in message else struck)
        configs += [message["launch"]] if "launch" in message else []
        result = message if "verdict" in message else result
    launched = tuple(dict.fromkeys(configs))
    if result is not None:
        return Tried(trial, result["verdict"], result["detail"][:SAID], launched, struck, result["memory"],
                     seconds)
    at = f"at {struck}" if struck else f"after {configs[-1]}" if configs else "before any kernel"
    line = f": {ended.line}" if ended.code is not None and ended.line else ""
    blamed: Word = ("not tried" if not struck or ended.kind != "kernel" else
                    "hang" if ended.timed_out else "abort or illegal access")
    return Tried(trial, blamed, f"{ended.how}, {at}{line}"[:SAID], launched, struck, ended.kind == "memory",
                 seconds)
