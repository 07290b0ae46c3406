"""``flashlin warmup``: compile and try the kernels for this machine before their first real use.

Each op, dtype and head size gets a child process. It runs a small case of the op twice on the GPU, forward
and backward. The two results must be bitwise equal and must agree with a float64 reference. The compiled code
stays in Triton's cache. The verdict on each configuration goes into the table of this machine
(``guards.local_results``), which planning and doctor read. A configuration that is correct here counts as
run. Planning no longer uses a configuration that failed here.
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
    """Compile and try the kernels of ops on this machine, and store the verdicts.

    On AMD, kernels are launched only after they have run correctly on this machine. There the trials run one
    at a time and stop after the first hang.

    ops: public names of ops; all ops by default.
    dtypes, head_dims: each op is tried with each of them.
    jobs: child processes at a time; 0 for one per CPU, at most 8.
    limit: seconds for each child. A child that seems to hang runs again, alone, with twice that limit.
    progress: is called with each outcome as it arrives.

    If verdicts cannot be written, a warning says so, and they apply in this process only. Returns a
    ``flashlin.trial.run.Tried`` for each op, dtype and head size. Raises ValueError for an unknown op, dtype
    or head size, and RuntimeError for a device that torch cannot use.
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
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError in a build without CUDA
        raise RuntimeError(f"device: got {device}, need a GPU that torch can use ({error}); flashlin doctor "
                           "says more") from error
    todo = [Trial(op, dtype, size) for op in ops or OPS if OPS[op][1] != "auto" for dtype in dtypes
            for size in (head_dims if family_of(op).head_dim else (0,))]
    if target.backend != "hip":
        return tuple(run(todo, place, target, jobs=jobs or min(8, os.cpu_count() or 1), limit=limit,
                         progress=progress))
    outcomes: list[Tried] = []
    for trial in todo:  # store each verdict before the next trial, since a hang may stop the machine
        outcomes += run([trial], place, target, limit=limit, progress=progress)
        if outcomes[-1].verdict == "hang":
            break
    return tuple(outcomes)


def forget(ops: Sequence[str] = ()) -> int:
    """Delete the verdicts of trials on this machine, for any Triton release, and return their number.

    ops: public names of ops; all ops by default. Raises ValueError for an unknown op, and OSError if the
    tables cannot be written.
    """
    return local_results.forget(_planned(ops))


def _planned(ops: Sequence[str]) -> list[str]:
    """Return the ops as which these names are planned, each once. Raises ValueError for an unknown name."""
    return list(dict.fromkeys(PUBLIC[op].planned_as or op for op in map(op_of, ops)))
