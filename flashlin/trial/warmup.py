"""flashlin warmup: compile what this machine will need, in parallel, and try it, before the first real call
does.

Each op, dtype and head size gets a child process: it runs a small case of the op forward and backward twice
on the GPU, both bitwise the same and right against float64. What it compiled stays in Triton's cache; what
was found of each configuration goes into the table of this machine (``guards.local_results``), which
planning and doctor read: what is right here counts as run, what is not is planned otherwise from then on.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from flashlin.compat.suggestions import need_one_of
from flashlin.compat.target import probe
from flashlin.dispatch import OPS
from flashlin.guards import local_results
from flashlin.guards.plan_types import dtype_name
from flashlin.kernels.families import PUBLIC, family_of, op_of
from flashlin.trial.run import LIMIT, Trial, Tried, run

DTYPES, HEAD_DIMS = ("bfloat16", "float16", "float32"), (64, 128)


def warmup(ops: Sequence[str] = (), dtypes: Sequence[str] = ("bfloat16",),
           head_dims: Sequence[int] = HEAD_DIMS, *, device: str = "cuda:0", jobs: int = 0,
           limit: float = LIMIT, progress: Callable[[Tried], None] = lambda _: None) -> tuple[Tried, ...]:
    """Compile and try the kernels of these ops (all by default) on ``device``, and keep the verdicts for this
    machine.

    On AMD, where kernels are started only once they have been right here, it is one child at a time, and none
    after one that hangs.

    jobs: children at a time, 0 for up to 8. limit: seconds for each; one that seems to hang is asked again,
    alone, with twice that. progress is told each result as it comes. Verdicts that cannot be kept (a cache
    that cannot be written) are told with a warning and hold in this process only. Returns a
    ``flashlin.trial.run.Tried`` for each op, dtype and head size. Raises ValueError for an unknown op, dtype
    or head size, RuntimeError for a device that torch cannot use.
    """
    ops = _planned(ops)
    dtypes = [dtype_name(one) for one in dtypes]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtype: got {dtype!r}, {need_one_of(dtype, DTYPES)}")
    for size in head_dims:
        if not 1 <= size <= 512:
            raise ValueError(f"head_dim: got {size}, need 1 to 512")
    try:
        place = torch.device(device)
        target = probe(place)
    except (RuntimeError, AssertionError) as error:  # the second is torch's word for a build without CUDA
        raise RuntimeError(f"device: got {device}, need a GPU that torch can use ({error}); flashlin doctor "
                           "says more") from error
    todo = [Trial(op, dtype, size) for op in ops or OPS if OPS[op][1] != "auto" for dtype in dtypes
            for size in (head_dims if family_of(op).head_dim else (0,))]
    if target.backend != "hip":
        return tuple(run(todo, place, target, jobs=jobs or min(8, os.cpu_count() or 1), limit=limit,
                         progress=progress))
    outcomes: list[Tried] = []
    for trial in todo:  # each is kept before the next begins, since a hang may take the machine with it
        outcomes += run([trial], place, target, limit=limit, progress=progress)
        if outcomes[-1].verdict == "hang":
            break
    return tuple(outcomes)


def forget(ops: Sequence[str] = ()) -> int:
    """Take back what trials of these ops (all by default) have found on this machine, under any Triton;
    returns how many verdicts that were. Raises ValueError for an unknown op, OSError where the tables cannot
    be written."""
    return local_results.forget(_planned(ops))


def _planned(ops: Sequence[str]) -> list[str]:
    """Return the ops that these names are planned as. Raise a ValueError for an unknown name."""
    return list(dict.fromkeys(PUBLIC[op].planned_as or op for op in map(op_of, ops)))
