"""Measure the time that planning adds to a call, on the CPU. No kernel is launched and no GPU is needed.

    python -m benchmarks.planning [--out benchmarks/results/planning.json]

Each row is the fastest of many runs, in microseconds of this thread's time, because other programs only add
to it. ``added to a call`` is the time from an op's tensors to its plan if an earlier call was the same, so
that the plan is cached. A call with new sizes also takes one miss.
"""
from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import sys
import time
import timeit
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

import flashlin
from flashlin import dispatch, policy
from flashlin.compat.target import Target, parse, pretend, probe
from flashlin.guards.plan_types import Plan, Problem
from flashlin.kernels.norm.recipe import RMS
from flashlin.ops import norm, simple_gla
from flashlin.ops._common import chunked
from flashlin.ops._common.casting import wants_grad
from flashlin.ops._common.pipeline import planned

LIMIT = 5.0  # microseconds that planning may add to a call
RUNS, CALLS = 101, 1000
# H100 needs no remedy. On a T4, bf16 is computed in fp32.
TARGETS = {"H100": "triton=3.6.0,sm=90", "T4": "triton=3.3.1,sm=75"}


def microseconds(call: Callable[[], Any], calls: int = CALLS) -> float:
    return min(timeit.repeat(call, number=calls, repeat=RUNS, timer=time.thread_time)) / calls * 1e6


def rows() -> dict[str, float]:
    q = torch.zeros(2, 128, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    of_norm, how = norm.Tensors(q), norm.scalars_of(norm.Tensors(q), norm.Asked("rms_norm", RMS, 1e-5))

    def gla() -> Problem:
        asked = chunked.Asked("chunk_simple_gla", wants_grad(q, q, q, None, None))
        return simple_gla.FAMILY.problem((q, q, q, q, None, None, None), asked)

    def rms() -> Problem:
        return norm.problem_of(of_norm, norm.scalars_of(of_norm, norm.Asked("rms_norm", RMS, 1e-5)))

    here, now, problem = probe(q.device), policy.current(), gla()
    # More problems than the cache has entries, so each is a miss.
    fresh = itertools.cycle([problem._replace(T=T) for T in range(1, 5001)])

    def missed(target: Target) -> Plan:
        return dispatch.plan(next(fresh), target, now)
    found = {
        "wants_grad": microseconds(lambda: wants_grad(q, q, q, None, None)),
        "problem_of, simple_gla": microseconds(gla),
        "problem_of, norm": microseconds(lambda: norm.problem_of(of_norm, how)),
        "probe": microseconds(lambda: probe(q.device)),
        "policy.current": microseconds(policy.current),
        "dispatch.plan, hit": microseconds(lambda: dispatch.plan(problem, here, now))}
    for name, text in TARGETS.items():
        target = parse(text)
        found[f"dispatch.plan, miss, {name}"] = microseconds(partial(missed, target), 50)
        pretend(target)
        planned(problem, q.device)
        found[f"planned, {name}"] = microseconds(lambda: planned(problem, q.device))
        found[f"added to a call, simple_gla, {name}"] = microseconds(lambda: planned(gla(), q.device))
        found[f"added to a call, norm, {name}"] = microseconds(lambda: planned(rms(), q.device))
        pretend(None)
    return found


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.processor() or platform.machine())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planning.json")
    out = parser.parse_args().out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a T4's warnings are printed once, before the timing starts
        found = rows()
    for name, value in found.items():
        print(f"{name:36} {value:8.2f} us")
    worst = max(value for name, value in found.items() if name.startswith("added"))
    print(f"at most {LIMIT:g} us may be added to a call: {'kept' if worst <= LIMIT else 'NOT kept'}, "
          f"{worst:.2f} us")
    record = {"what": "microseconds, quickest run", "runs": RUNS, "calls": CALLS,
              "date": datetime.date.today().isoformat(), "cpu": cpu(),
              "versions": {"flashlin": flashlin.__version__, "python": platform.python_version(),
                           "torch": torch.__version__, "triton": triton.__version__},
              "limit": LIMIT, "microseconds": {name: round(value, 3) for name, value in found.items()}}
    out.write_text(json.dumps(record, indent=1) + "\n")
    return worst > LIMIT


if __name__ == "__main__":
    sys.exit(main())
