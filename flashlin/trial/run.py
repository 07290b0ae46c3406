"""Trials: a child process runs a small case of an op, and how it ends is a verdict on a kernel, or on nothing
but the circumstances.

A child says which kernel it is about to start and when that has run, so that an abort or a hang has somebody
to blame, and so that whatever goes wrong between two launches, such as memory that others have taken, blames
nobody.
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
LONGER = 2.0  # times that, for one that seems to hang and is asked again, alone
SAID = 400  # characters of a child's own words that are kept


class Trial(NamedTuple):
    """head_dim: 0 for ops without heads."""
    op: str
    dtype: str
    head_dim: int

    def __str__(self) -> str:
        return " ".join([self.op, self.dtype, *([str(self.head_dim)] if self.head_dim else [])])


class Tried(NamedTuple):
    """How a trial went. verdict: ``ran``, ``wrong numbers``, ``compiler error``, ``abort or illegal access``,
    ``hang``; ``not tried`` (memory, disk, permissions, a busy or absent device, anything that went wrong
    outside a launch: nothing is known of any kernel); ``torch path`` (nothing to start). configs: what was
    started, in that order. struck: the launch during which the child ended, if one did. memory: whether
    memory was what it lacked."""
    trial: Trial
    verdict: Word
    detail: str
    configs: tuple[str, ...] = ()
    struck: str = ""
    memory: bool = False
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        return self.verdict in ("ran", "torch path")

    @property
    def again(self) -> bool:
        """Whether a second child, alone, may come to another verdict."""
        return self.memory or self.verdict == "hang"

    def __str__(self) -> str:
        D = f" D={self.trial.head_dim}" if self.trial.head_dim else ""
        detail = f"  {self.detail}" if self.detail else ""
        return f"{self.verdict:14} {self.trial.op} {self.trial.dtype}{D}  {self.seconds:.0f} s{detail}"


def run(trials: Sequence[Trial], device: torch.device, target: Target, *, jobs: int = 1, limit: float = LIMIT,
        progress: Callable[[Tried], None] = lambda _: None) -> list[Tried]:
    """Try them, ``jobs`` at a time, and keep what was found for this machine. What lacked memory is asked
    again alone, with a smaller case and after this process has given back what it does not use; what seems to
    hang, alone and with a longer limit, but on AMD, where that may take the desktop with it."""
    def again(tried: Tried) -> bool:
        return tried.again and (tried.memory or target.backend != "hip")

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
    """Blocks that torch keeps for later belong to this process, and a child cannot have them. Not while a
    graph is being captured, which freeing memory would end."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.empty_cache()


def _keep(outcomes: Sequence[Tried], target: Target) -> None:
    """What ended a child is the fault of the launch that it was in. Wrong numbers may be that of any kernel
    that was started: of those that have not been right elsewhere, or of all where there is none such. A
    kernel that failed in one trial and ran in another has failed."""
    now = time.time()
    ran: dict[str, Verdict] = {}
    bad: dict[str, Verdict] = {}
    trials = {str(one.trial): Verdict(one.verdict, now, str(one.trial), one.detail) for one in outcomes}
    for one in outcomes:
        if one.verdict == "ran":
            ran.update(dict.fromkeys(one.configs, trials[str(one.trial)]))
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
    """Run one trial in a child process, and judge how it ended."""
    what = ["--op", trial.op, "--dtype", trial.dtype, "--head-dim", str(trial.head_dim)]
    known = local_results.unwritten(target)  # sent by a pipe, since an argument has at most 128 KiB
    command = CHILD("--device", str(device), *what, *(["--small"] if small else []),
                    *(["--known"] if known else []))
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
    blamed: Word = "not tried"
    if struck and ended.kind == "kernel":
        blamed = "hang" if ended.timed_out else "abort or illegal access"
    return Tried(trial, blamed, f"{ended.how}, {at}{line}"[:SAID], launched, struck, ended.kind == "memory",
                 seconds)
