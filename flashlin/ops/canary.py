"""The first call of an op whose kernels nobody has run on such a card under that Triton: a child process tries them before this one does."""
from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import torch

from flashlin import dispatch, policy
from flashlin.compat import target as machine
from flashlin.compat.target import Target
from flashlin.guards import proven
from flashlin.guards.problem import Plan, UnsupportedError

ROUNDS = 3  # what fails is planned otherwise, and that is tried as well: fewer warps, then it is the torch path
PLANS = 4096  # kept, so that a call that comes again costs a look into a dict
_settled: dict[int, Plan] = {}
_done: set[tuple[Any, ...]] = set()


def settled(the_plan: Plan) -> bool:
    """Whether ``tried`` has answered with this very plan."""
    return _settled.get(id(the_plan)) is the_plan


def tried(the_plan: Plan, device: torch.device, stacklevel: int) -> Plan:
    """The plan once its kernels have run on such a card, here or where flashlin was tested; each op, dtype and head size is tried once on a
    machine, for each family of its kernels. Ranks that start together wait for the first one's answer. A user's own kernel (``shield``) is not
    tried: no child knows how to call it. Raises UnsupportedError where nothing is left that may run."""
    asked, target = the_plan.asked, the_plan.target
    key = (asked.op, asked.family, asked.dtype, asked.K, asked.V, asked.needs_grad, target)
    if asked.given is None and key not in _done and _wanted(target) and _unsure(the_plan):
        for _ in range(ROUNDS):
            with proven.alone(f"canary-{asked.op}-{asked.dtype}-{asked.K}"):
                _read_again(target, {})
                unsure = _unsure(the_plan)
                if unsure:
                    _try(the_plan, device, unsure, stacklevel + 1)
            if not any(proven.trust(launch, target) == "failed" for launch in the_plan.launches):
                break
            dispatch.plan.cache_clear()
            the_plan = dispatch.plan(asked, target, policy.current())
        _done.add(key)
        if the_plan.refused:
            raise UnsupportedError(the_plan)
    if len(_settled) >= PLANS:
        _settled.clear()
    _settled[id(the_plan)] = the_plan
    return the_plan


def _wanted(target: Target) -> bool:
    return target.backend == "cuda" and policy.current().canary != "off" and not machine.pretending()


def _unsure(the_plan: Plan) -> list[str]:
    """Configurations that have run neither on such a card nor in this machine's canary."""
    here = proven.local(the_plan.target)
    return [launch.config for launch in the_plan.launches if launch.config not in here and proven.trust(launch, the_plan.target) != "ran"]


def _try(the_plan: Plan, device: torch.device, unsure: list[str], stacklevel: int) -> None:
    """Run ``flashlin warmup`` for this op. What is to blame for a failure stands in this machine's table then; where that cannot be written, all
    that was unsure counts as failed in this process."""
    asked, target = the_plan.asked, the_plan.target
    op = asked.op if dispatch.OPS[asked.op][1] != "auto" else f"{the_plan.problem.mode}_{asked.op}"
    why = f"with these sizes has not been run on {target.sm} under Triton {target.triton} yet" if proven.knows(target.triton) else \
        f"is new to Triton {target.triton}, which is not known to flashlin"
    warnings.warn(f"{op} {why}: it is tried once on this machine, in a child process; flashlin warmup does so beforehand, FLASHLIN_CANARY=off leaves "
                  "it out", stacklevel=stacklevel)
    facts = ["--op", op, "--dtype", asked.dtype, "--device", str(device)]
    if dispatch.OPS[op][1]:  # a norm's rows and a convolution's channels are no heads
        facts += ["--head-dim", str(asked.K)]
    ran = subprocess.run([sys.executable, "-m", "flashlin", "warmup", *facts], capture_output=True, text=True, check=False,
                         env={**os.environ, "FLASHLIN_CANARY": "off", "PYTHONPATH": os.pathsep.join(sys.path)})
    if ran.returncode not in (0, 1):
        warnings.warn(f"{op} could not be tried, and is used as it is: {ran.stderr.strip()[-300:]}", stacklevel=stacklevel)
        return
    _read_again(target, {})
    found = proven.local(target)
    if ran.returncode == 0:  # the op has been tried here; what its small case does not launch is known no better, and not asked again
        proven.keep({launch.config: proven.trust(launch, target) for launch in the_plan.launches if launch.config not in found}, target)
    elif not any(config in found for config in unsure):
        _read_again(target, dict.fromkeys(unsure, "failed"))


def _read_again(target: Target, others: dict[str, proven.Trust]) -> None:
    """What another process has found, and for the rest what this one knows already and ``others``: a cache need not be writable."""
    before = proven.local(target)
    proven.local.cache_clear()
    found = proven.local(target)
    for config, level in {**others, **before}.items():
        found.setdefault(config, level)
