"""Sequences over several ranks on GPUs are as exact as on one device, and the same in each run.

Ranks share the first GPU (gloo), or have one GPU each (NCCL). Each test starts its own processes, so `-n 8`
compiles kernels in parallel.
"""
from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flashlin
from flashlin import dispatch
from flashlin.guards.deferred_checks import BEHIND
from tests.ranks import Job, as_exact_as_one, computed, divided, made, model_equals_one, of_rank, run_jobs

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a GPU")
OPS = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla", "chunk_kda", "chunk_rwkv7", "chunk_rwkv6",
       "mamba_chunk_scan_combined", "causal_conv1d", "token_shift")
MODELS = ("gdn", "kda", "mamba2")
EDGES = [0, 70, 1000, 1000, 3000, 3072]  # the fourth sequence, 1000 to 3000, is on all three ranks


def exact(op: str, H: int, dtype: torch.dtype, edges: list[int] | None, way: str, group: Any) -> None:
    plans: list[Any] = []
    with dispatch.watching(plans.append), divided(way):
        as_exact_as_one(made(op, H, 3072, edges, K=64, dtype=dtype, device="cuda"), group)
    assert {plan.path for plan in plans if plan.problem.dtype != "float64"} == {"triton"}


def repeats(op: str, H: int, group: Any) -> None:
    call = of_rank(made(op, H, 3072, EDGES, K=64, dtype=torch.bfloat16, device="cuda"), group)
    once, again = (computed(call, process_group=group) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


def _jobs(op: str, ranks: int) -> dict[str, tuple[int, Job]]:
    """Return (number of ranks, function) of each job of an op or a model, by the job's name.

    Jobs "heads" have a number of heads that the ranks divide, and jobs "states" have one head more. Jobs
    "states" and "repeats" exchange states between ranks.
    """
    if op in MODELS:
        return {op: (2, partial(model_equals_one, op, device="cuda", dtype=torch.float32, bound=1e-3))}
    jobs: dict[str, tuple[int, Job]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for edges in (None, EDGES):
            what = f"{str(dtype)[6:]}{' packed' * (edges is not None)}"
            jobs[f"states, {what}"] = ranks, partial(exact, op, ranks + 1, dtype, edges, "tokens")
            if op.startswith("chunk_"):
                jobs[f"heads, {what}"] = ranks, partial(exact, op, ranks, dtype, edges, "heads")
    if op.startswith("chunk_"):
        jobs["repeats"] = ranks, partial(repeats, op, ranks + 1)
    return jobs


def _hold(jobs: dict[str, tuple[int, Job]], folder: Path, backend: str) -> None:
    wrong = [f"{name}, rank {rank}: {text}" for name, ranks in run_jobs(jobs, folder, backend, 400).items()
             for rank, text in enumerate(ranks) if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", (*OPS, *MODELS))
def test_three_ranks_share_a_gpu(op: str, tmp_path: Path) -> None:
    _hold(_jobs(op, 3), tmp_path, "gloo")


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs: there is {GPUS}")
@pytest.mark.parametrize("op", (*OPS, *MODELS))
def test_two_ranks_with_a_gpu_each(op: str, tmp_path: Path) -> None:
    _hold(_jobs(op, 2), tmp_path, "nccl")


def unequal_edges(group: Any) -> None:
    """Ranks whose cu_seqlens differ in length raise without debug mode.

    A length that is new to a rank raises in the same call. Once each rank has used both lengths, the error
    comes in a later call, and no call waits for the GPU.
    """
    rank = dist.get_rank(group)
    whole = made("chunk_kda", 3, 3072, [0, 70, 3072], K=64, dtype=torch.bfloat16, device="cuda")
    call = of_rank(whole, group)
    hosts = [torch.tensor(some) for some in ([0, 70, 3072], [0, 70, 1000, 3072])]
    edges = [host.cuda() for host in hosts]

    def run(n: int, host: bool = True) -> None:
        flashlin.chunk_kda(**call.tokens, cu_seqlens=edges[n], process_group=group,
                           cu_seqlens_cpu=hosts[n] if host else None)
    said = r": got cu_seqlens of \[3, 4\] values \(0: none\) on ranks 0, 1, need the same"
    for host in (False, True):
        with pytest.raises(ValueError, match=f"^chunk_kda{said}"):
            run(rank, host)
    for n in (0, 1, 0, 1):
        run(n)
    flashlin.synchronize()
    nccl = dist.get_backend(group) == "nccl"
    later = f"^chunk_kda called at .*parallel.py:\\d+ in run{said}"
    torch.cuda.set_sync_debug_mode("error" if nccl else "default")
    try:
        run(0)
        run(rank)
        for _ in range(BEHIND):
            run(0)
        with pytest.raises(ValueError, match=later):  # every rank raises in this call
            run(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run(rank)
    with pytest.raises(ValueError, match=later):
        flashlin.synchronize()
    with pytest.raises(ValueError, match=f"^chunk_kda{said}"), flashlin.settings(tokens="sync"):
        run(rank)
    run(0)
    flashlin.synchronize()


def test_ranks_agree_on_the_length_of_cu_seqlens(tmp_path: Path) -> None:
    _hold({"gloo": (2, unequal_edges)}, tmp_path, "gloo")


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs: there is {GPUS}")
def test_ranks_with_a_gpu_each_agree_too(tmp_path: Path) -> None:
    _hold({"nccl": (2, unequal_edges)}, tmp_path, "nccl")


def dies(begun: Path, group: Any) -> None:
    """End rank 1 between forward and backward. Rank 0 creates the file ``begun`` and runs backward."""
    call = of_rank(made("chunk_kda", 3, 3072, None, K=64, dtype=torch.bfloat16, device="cuda"), group)
    leaves = {name: x.requires_grad_() for name, x in call.tokens.items()}
    o, _ = flashlin.chunk_kda(**leaves, process_group=group)
    torch.cuda.synchronize()
    if dist.get_rank(group) == 1:
        os._exit(1)
    begun.touch()
    o.sum().backward()
    torch.cuda.synchronize()


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs: there is {GPUS}")
def test_a_rank_that_dies_does_not_leave_the_other_waiting(tmp_path: Path) -> None:
    """If a rank dies, the other rank raises or NCCL ends its process.

    The group's timeout takes 30 seconds. NCCL's watchdog then waits another minute for a dump.
    """
    began, begun = time.monotonic(), tmp_path / "backward"
    said = run_jobs({"dies": (2, partial(dies, begun))}, tmp_path, "nccl", 240, 30)["dies"]
    assert begun.exists() and time.monotonic() - began < 200, said
    assert said[0] and said[1] == "the process was gone", said
