"""Sequences over several ranks on GPUs: as exact as on one device, and the same each time. Ranks share the
first GPU (gloo), or have one each (NCCL)."""
from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from flashlin import dispatch
from tests.ranks import Job, as_exact_as_one, computed, made, model_equals_one, of_rank, run_jobs

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a GPU")
OPS = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla", "chunk_kda", "chunk_rwkv7", "chunk_rwkv6",
       "mamba_chunk_scan_combined", "causal_conv1d", "token_shift")
EDGES = [0, 70, 1000, 1000, 3000, 3072]  # on three ranks of 1,024 tokens, the fourth sequence is on all


def exact(op: str, H: int, dtype: torch.dtype, edges: list[int] | None, group: Any) -> None:
    plans: list[Any] = []
    with dispatch.watching(plans.append):
        as_exact_as_one(made(op, H, 3072, edges, K=64, dtype=dtype, device="cuda"), group)
    assert {plan.path for plan in plans if plan.problem.dtype != "float64"} == {"triton"}


def repeats(op: str, H: int, group: Any) -> None:
    call = of_rank(made(op, H, 3072, EDGES, K=64, dtype=torch.bfloat16, device="cuda"), group)
    once, again = (computed(call, process_group=group) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


def _jobs(ranks: int) -> dict[str, tuple[int, Job]]:
    """Heads that the ranks divide go by heads, others by states."""
    jobs: dict[str, tuple[int, Job]] = {}
    for op in OPS:
        for H in (ranks, ranks + 1):
            for dtype in (torch.bfloat16, torch.float32):
                for edges in (None, EDGES):
                    jobs[f"{op} {H} heads {str(dtype)[6:]}{' packed' * (edges is not None)}"] = (
                        ranks, partial(exact, op, H, dtype, edges))
        if op.startswith("chunk_"):
            jobs[f"{op} repeats"] = ranks, partial(repeats, op, ranks + 1)
    for kind in ("gdn", "kda", "mamba2"):
        jobs[f"model {kind}"] = 2, partial(model_equals_one, kind, device="cuda", dtype=torch.float32,
                                           bound=1e-3)
    return jobs


SHARED, OWN = _jobs(3), _jobs(2)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_jobs(SHARED, tmp_path_factory.mktemp("shared"), seconds=900)


@pytest.fixture(scope="module")
def said_by_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_jobs(OWN, tmp_path_factory.mktemp("own"), backend="nccl", seconds=900)


@pytest.mark.parametrize("name", SHARED)
def test_three_ranks_share_a_gpu(name: str, said: dict[str, list[str]]) -> None:
    assert not any(said[name]), "\n".join(said[name])


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs: there is {GPUS}")
@pytest.mark.parametrize("name", OWN)
def test_two_ranks_with_a_gpu_each(name: str, said_by_gpus: dict[str, list[str]]) -> None:
    assert not any(said_by_gpus[name]), "\n".join(said_by_gpus[name])
