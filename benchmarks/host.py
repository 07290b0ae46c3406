"""Measure the host's time for a call: chunked, forward and with backward, and in decoding.

    python -m benchmarks.host [--op chunk_kda] [--profile 20] [--out FILE]

Times are in microseconds and in *bare launches*: one Triton launch of a kernel with eight tensors, timed in
turn with the calls. With a GPU the launches are real, and the GPU is kept busy. Without one, the benchmark
simulates an H200 (benchmarks/pretended.py), where launching a compiled kernel takes no time, for calls and
for bare launches. So the ratio of a call to a bare launch differs from the ratio on a real GPU. ``ordinary``:
without the shortcuts of repeated calls (ops/_common/replay.py, compat/launch_cache.py). --profile N: print
the N functions in which a call spends most time.
"""
from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

import flashlin
from benchmarks import timing
from benchmarks.calls import Shape, find, runs
from benchmarks.pretended import Driver, pretended
from flashlin.compat import launch, launch_cache
from flashlin.compat import target as machine
from flashlin.ops._common import chunked, recurrent, replay

OPS = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_simple_gla",
       "fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
# Small shapes, because on a CPU torch's own computation is not host time.
CHUNKED, DECODED = Shape(2, 64, 2, 64), Shape(2, 1, 2, 64)
ROUNDS, CALLS = 15, 100


def calls(op: str, device: str) -> dict[str, Callable[[], Any]]:
    """Return the calls of an op to time, by name.

    For an op with gradients, the entry "both, torch alone" calls an autograd function with the same tensors
    that computes nothing. Its time is a lower bound of the op's time.
    """
    shape = DECODED if "recurrent" in op else CHUNKED
    timed = {f"{op} {what}": call
             for what, call in runs(getattr(flashlin, op), find(op), shape, device).items()}
    if f"{op} both" in timed:
        timed[f"{op} both, torch alone"] = runs(alone, find(op), shape, device)["both"]
    return timed


class Alone(torch.autograd.Function):
    """An autograd function that computes nothing: its result and gradients are empty tensors."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*given)
        return torch.empty_like(given[0])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def alone(v: torch.Tensor, **others: torch.Tensor) -> Any:
    call: Any = Alone.apply  # torch has no types for apply
    return call(v, *others.values())


@contextmanager
def ordinary() -> Iterator[None]:
    """Check, plan and launch every call in the block like a first call."""
    with (mock.patch.object(chunked, "key_of", lambda *call: None),
          mock.patch.object(recurrent, "key_of", lambda *call: None),
          mock.patch.object(replay, "_key_of_run", lambda *call: None),
          mock.patch.object(launch_cache, "possible", lambda: False),
          mock.patch.object(launch, "_kernels", {})):
        yield


def microseconds(call: Callable[[], Any], queued: int = timing.QUEUED) -> float:
    """Return the microseconds of this thread for a call.

    queued: number of calls that are queued on a busy GPU. They should take some milliseconds in total,
        because the first calls find cold caches.
    """
    if torch.cuda.is_available():
        return timing.hosted(call, queued) or float("nan")
    began = time.thread_time()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.thread_time() - began) / CALLS


def measured(timed: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Return microseconds (minimum) and bare launches (median) of each call, by name.

    All calls take turns within each round.
    """
    tensors = [torch.zeros(128, device="cuda" if torch.cuda.is_available() else "cpu") for _ in range(8)]
    every = {"bare": lambda: timing.bare[(1,)](*tensors, N=128), **timed}
    taken: dict[str, list[float]] = {name: [] for name in every}
    for call in every.values():
        for _ in range(4):
            call()
    for _ in range(ROUNDS):
        for name, call in every.items():
            taken[name].append(microseconds(call, timing.LAUNCHES if name == "bare" else timing.QUEUED))
    ratios = {name: statistics.median(a / b for a, b in zip(taken[name], taken["bare"], strict=True))
              for name in every}
    return {name: {"us": round(min(taken[name]), 1), "launches": round(ratios[name], 2)} for name in every}


def profile(call: Callable[[], Any], lines: int) -> None:
    """Print the functions in which a call spends its time, in microseconds of a profiled call."""
    for _ in range(4):
        call()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(many := 10 * CALLS):
        call()
    profiler.disable()
    stats: Any = pstats.Stats(profiler)
    rows = sorted(((own, whole, times, place) for place, (_, times, own, whole, _) in stats.stats.items()),
                  reverse=True)
    for own, whole, times, (path, line, name) in rows[:lines]:
        where = "/".join(Path(path).parts[-2:])
        print(f"{own * 1e6 / many:8.2f} {whole * 1e6 / many:8.2f} {times / many:5.1f}  {where}:{line} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=OPS)
    parser.add_argument("--profile", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    real = torch.cuda.is_available()
    device = "cuda" if real else "cpu"
    if not real:
        torch.set_num_threads(1)
        machine.pretend(machine.parse(f"triton={triton.__version__},sm=90,sms=132"))
    found = {}
    with nullcontext() if real else pretended(Idle()), flashlin.settings(canary="off"):
        timed = {name: call for op in chosen.op or OPS for name, call in calls(op, device).items()}
        if chosen.profile:
            for name, call in timed.items():
                print(name)
                profile(call, chosen.profile)
            return
        found["now"] = measured(timed)
        with ordinary():
            found["ordinary"] = measured(timed)
    for name, now in found["now"].items():
        before = found["ordinary"][name]
        print(f"{name:45} {now['us']:8.1f} us {now['launches']:6.2f} bare    ordinary {before['us']:8.1f} us "
              f"{before['launches']:6.2f}")
    if chosen.out:
        facts = {"device": torch.cuda.get_device_name() if real else "none: pretended",
                 "triton": triton.__version__, "torch": torch.__version__,
                 "date": datetime.date.today().isoformat()}
        chosen.out.write_text(json.dumps(facts | found, indent=1) + "\n")


class Idle(Driver):
    """A simulated GPU on which launching a kernel takes no time."""

    def _launcher(self, src: Any, metadata: Any) -> Any:
        def start(*arguments: Any) -> None:
            _, enter, leave = arguments[6:9]
            for hook in (enter, leave):
                if hook is not None:
                    hook(None)
        return start


if __name__ == "__main__":
    main()
