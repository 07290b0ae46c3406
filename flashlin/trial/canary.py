"""The first call of an op whose kernels nobody has run on such a card under that Triton: a child process
tries them before this one does."""
from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import torch

from flashlin import dispatch, policy
from flashlin.compat import target as machine
from flashlin.compat.target import Target
from flashlin.guards import launch_table, local_results
from flashlin.guards.plan_types import Plan, UnsupportedError
from flashlin.kernels.families import family_of
from flashlin.trial import run

# what fails is planned otherwise, and that is tried as well: fewer warps, then it is the torch path
ROUNDS = 3
PLANS = 4096  # kept, so that a call that comes again costs a look into a dict
_log = logging.getLogger("flashlin")
settled: dict[int, Plan] = {}  # the plans that ``tried`` has returned, by id
_done: set[tuple[Any, ...]] = set()


def tried(the_plan: Plan, device: torch.device, stacklevel: int) -> Plan:
    """The plan once its kernels have run on such a card, here or where flashlin was tested; each op, dtype
    and head size is tried once on a machine, for each family of its kernels. Ranks that start together wait
    for the first one's answer. Where nothing could be tried (memory that others hold, a full disk ...) a
    warning says why and the op is used as planned; it is tried again after a day. A user's own kernel
    (``shield``) is not tried: no child knows how to call it. Raises UnsupportedError where nothing is left
    that may run."""
    asked, target = the_plan.asked, the_plan.target
    key = (asked.op, asked.family, asked.dtype, asked.K, asked.V, asked.needs_grad, target)
    if asked.given is None and key not in _done and _wanted(target):
        for _ in range(ROUNDS):
            trial = _trial(the_plan)
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


def _wanted(target: Target) -> bool:
    """Never on AMD, where that is for the user to begin: see check_has_run."""
    return target.backend == "cuda" and policy.current().canary == "auto" and not machine.pretending()


def _trial(the_plan: Plan) -> run.Trial:
    """The one that says most of a plan: an op that chooses its mode is tried as what was chosen; a norm's
    rows and a convolution's channels are no heads."""
    asked = the_plan.asked
    op = asked.op if dispatch.OPS[asked.op][1] != "auto" else f"{the_plan.problem.mode}_{asked.op}"
    return run.Trial(op, asked.dtype, asked.K if family_of(op).head_dim else 0)


def _doubtful(the_plan: Plan, trial: run.Trial) -> bool:
    """Whether it has to be tried: something would be started that has run neither on such a card nor here,
    and the last trial was not right (its small case may not start everything, and is not asked again for
    that), nor prevented less than a day ago."""
    here = local_results.local(the_plan.target)
    last = here.trials.get(str(trial))
    if last is not None and (last.word in ("ran", "torch path")
                             or (last.word == "not tried" and 0 <= time.time() - last.when < local_results.A_DAY)):
        return False
    return any(launch.config not in here.kernels and launch_table.trust(
        launch.config, the_plan.target) != "ran"
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
