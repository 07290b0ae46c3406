"""The first call of an op under a Triton that nobody has looked at: its kernels are tried in a child process before they run in this one."""
from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import lru_cache
from typing import Any

import torch

from flashlin import dispatch, policy
from flashlin.compat.target import Target
from flashlin.guards import proven
from flashlin.guards.problem import Plan, UnsupportedError

ROUNDS = 3  # what fails is planned otherwise, and that is tried as well: fewer warps, then it is the torch path
known = lru_cache(maxsize=64)(proven.knows)
_done: set[tuple[Any, ...]] = set()


def tried(the_plan: Plan, device: torch.device, stacklevel: int) -> Plan:
    """The plan once its kernels have a verdict on this machine; each op, dtype and head size is tried once. Ranks that start together wait
    for the first one's answer. Raises UnsupportedError where nothing is left that may run."""
    asked, target = the_plan.asked, the_plan.target
    key = (asked.op, asked.dtype, asked.K, asked.V, asked.needs_grad, target)
    if key in _done or policy.current().canary == "off" or target.backend != "cuda":
        return the_plan
    for _ in range(ROUNDS):
        with proven.alone(f"canary-{asked.op}-{asked.dtype}-{asked.K}"):
            _read_again(target, {})
            unknown = [launch.config for launch in the_plan.launches if proven.trust(launch, target) == "unknown"]
            if not unknown or not _failed(the_plan, device, unknown, stacklevel + 1):
                break
        dispatch.plan.cache_clear()
        the_plan = dispatch.plan(asked, target, policy.current())
    _done.add(key)
    if the_plan.refused:
        raise UnsupportedError(the_plan)
    return the_plan


def _failed(the_plan: Plan, device: torch.device, unknown: list[str], stacklevel: int) -> bool:
    """Run ``flashlin warmup`` for this op; whether something is wrong, so that it has to be planned again. What is to blame stands in this
    machine's table; where that cannot be written, all that was unknown counts as failed in this process."""
    asked, target = the_plan.asked, the_plan.target
    op = asked.op if dispatch.OPS[asked.op][1] != "auto" else f"{the_plan.problem.mode}_{asked.op}"
    warnings.warn(f"Triton {target.triton} is not known to flashlin: {op} is tried once in a child process first; "
                  "FLASHLIN_CANARY=off leaves that out", stacklevel=stacklevel)
    facts = ["--op", op, "--dtype", asked.dtype, "--device", str(device)]
    if dispatch.OPS[op][1]:  # a norm's rows and a convolution's channels are no heads
        facts += ["--head-dim", str(asked.K)]
    ran = subprocess.run([sys.executable, "-m", "flashlin", "warmup", *facts], capture_output=True, text=True, check=False,
                         env={**os.environ, "FLASHLIN_CANARY": "off", "PYTHONPATH": os.pathsep.join(sys.path)})
    if ran.returncode not in (0, 1):
        warnings.warn(f"{op} could not be tried, and is used as it is: {ran.stderr.strip()[-300:]}", stacklevel=stacklevel)
        return False
    _read_again(target, {})
    if ran.returncode == 1 and not any(config in proven.local(target) for config in unknown):
        _read_again(target, dict.fromkeys(unknown, "failed"))
    return ran.returncode == 1


def _read_again(target: Target, others: dict[str, proven.Trust]) -> None:
    """What another process has found, and for the rest what this one knows already and ``others``: a cache need not be writable."""
    before = proven.local(target)
    proven.local.cache_clear()
    found = proven.local(target)
    for config, level in {**others, **before}.items():
        found.setdefault(config, level)
