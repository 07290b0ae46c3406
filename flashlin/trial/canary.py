"""Trial of new kernels at the first call of an op.

If the kernels of an op have not been run on this kind of GPU with this Triton, a child process tries them
before this process launches them.
"""
from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import torch

from flashlin import dispatch, policy
from flashlin.compat import target as machine
from flashlin.guards import launch_table, local_results
from flashlin.guards.plan_types import Plan, UnsupportedError
from flashlin.kernels.families import family_of
from flashlin.trial import run

# The most trials for one call. If a kernel fails its trial, the call is planned again: with another tile,
# with fewer warps, or on the torch path. The new plan is then tried.
ROUNDS = 3
PLANS = 4096  # most plans in ``settled``, with which a repeated call costs one dict lookup
_log = logging.getLogger("flashlin")
settled: dict[int, Plan] = {}  # the plans that ``tried`` has returned, by id
_done: set[tuple[Any, ...]] = set()


def tried(the_plan: Plan, device: torch.device, stacklevel: int) -> Plan:
    """Return a plan whose kernels may run: try new kernels first, and plan again if a trial fails.

    A kernel is new if it has not run on this machine, and no shipped record shows that it ran on this kind of
    GPU. There is one trial per machine for each combination of op, dtype, head size and family. Ranks that
    start together wait for the trial of the first rank.

    If a trial could not run, for example because memory or disk is full, a warning says why. The op then
    runs as planned, and the trial is repeated after a day. A user's own kernel (``shield``) is not tried,
    because a child process cannot call it. Raises UnsupportedError if no plan is left that may run.
    """
    asked, target = the_plan.asked, the_plan.target
    key = (asked.op, asked.family, asked.dtype, asked.K, asked.V, asked.needs_grad, target)
    # On AMD no call starts a trial: there the user must run ``flashlin warmup``, see check_has_run.
    wanted = target.backend == "cuda" and policy.current().canary == "auto" and not machine.pretending()
    if asked.given is None and key not in _done and wanted:
        for _ in range(ROUNDS):
            # Try the op of the planned mode. Only families with heads have a head dimension, not norms and
            # convolutions.
            op = asked.op if dispatch.OPS[asked.op][1] != "auto" else f"{the_plan.problem.mode}_{asked.op}"
            trial = run.Trial(op, asked.dtype, asked.K if family_of(op).head_dim else 0)
            if not _doubtful(the_plan, trial):
                break
            with local_results.alone(str(trial)):
                local_results.read_again()
                if _doubtful(the_plan, trial):
                    _try(the_plan, trial, device, stacklevel + 1)
            if not any(launch_table.trust(launch.config, target) == "failed" for launch in the_plan.launches):
                break
            dispatch.plan.cache_clear()
            the_plan = dispatch.plan(asked, target, policy.current())
        _done.add(key)
        if the_plan.refused:
            raise UnsupportedError(the_plan)
    if len(settled) >= PLANS:
        settled.clear()
    settled[id(the_plan)] = the_plan
    return the_plan


def _doubtful(the_plan: Plan, trial: run.Trial) -> bool:
    """Return True if a plan needs a trial, because one of its kernels has not run on this kind of GPU.

    No trial is needed if the last one succeeded, even if its small case does not launch every kernel. A trial
    that could not run is repeated after a day at the earliest.
    """
    here = local_results.local(the_plan.target)
    last = here.trials.get(str(trial))
    if last is not None and (last.word in ("ran", "torch path")
                             or (last.word == "not tried" and 0 <= time.time() - last.when < local_results.A_DAY)):
        return False
    return any(launch.config not in here.kernels
               and launch_table.trust(launch.config, the_plan.target) != "ran"
               for launch in the_plan.launches)


def _try(the_plan: Plan, trial: run.Trial, device: torch.device, stacklevel: int) -> None:
    target = the_plan.target
    why = (f"with these sizes has not been run on {target.sm} under Triton {target.triton} yet"
           if launch_table.knows(target.triton) else
           f"is new to Triton {target.triton}, which is not known to flashlin")
    _log.warning("flashlin: %s %s: it is tried once on this machine, in a child process; flashlin warmup "
                 "does so beforehand, FLASHLIN_CANARY=off leaves it out", trial.op, why)
    [outcome] = run.run([trial], device, target)
    if outcome.verdict == "not tried":
        warnings.warn(f"{trial.op} {why}, and could not be tried: {outcome.detail}. It is used as planned, "
                      "and tried again after a day or by flashlin warmup", stacklevel=stacklevel)
    elif not outcome.fine:
        warnings.warn(f"{trial.op} {why}, and was tried: {outcome.verdict}, {outcome.detail}. It is planned "
                      "otherwise on this machine until flashlin warmup --forget", stacklevel=stacklevel)
