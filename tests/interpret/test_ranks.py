"""The kernels, in gloo processes, are as exact for sequences over several ranks as on one device."""
from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch

from flashlin import dispatch
from tests.ranks import Job, as_exact_as_one, made, run_jobs
from tests.share import WHOLE

# Number of ranks, op, dtype, tokens and edges. Only the middle one of three ranks computes a matrix.
CHOSEN: list[tuple[int, str, torch.dtype, int, list[int] | None]] = [
    (3, "chunk_gated_delta_rule", torch.float16, 48, [0, 2, 48]),
    (2, "chunk_simple_gla", torch.float32, 48, [0, 5, 30, 48]),
    (3, "chunk_kda", torch.float16, 48, [0, 2, 48]),
    (2, "chunk_gated_delta_rule", torch.float32, 96, None),
    (3, "chunk_gla", torch.float32, 48, [0, 2, 48]),
    (3, "chunk_rwkv7", torch.float32, 48, [0, 2, 48]),
    (3, "chunk_rwkv6", torch.float32, 48, [0, 2, 48]),
    (3, "mamba_chunk_scan_combined", torch.float32, 48, [0, 2, 48]),
    *[(3, op, torch.float32, 48, [0, 2, 48])
      for op in ("chunk_gdn2", "chunk_comba", "chunk_gated_delta_product", "chunk_dplr_delta_rule",
                 "chunk_iplr_delta_rule", "chunk_delta_rule")]]


def by_kernels(op: str, dtype: torch.dtype, T: int, edges: list[int] | None, group: Any) -> None:
    """Check the op over ranks; without edges, also a call that passes no states.

    The first rank then still needs the final state of its own tokens.
    """
    plans: list[Any] = []
    call = made(op, 1, T, edges, K=16, dtype=dtype)
    with dispatch.watching(plans.append):
        for asked in (call,) if edges else (call, call._replace(state="")):
            as_exact_as_one(asked, group)
    assert {plan.path for plan in plans if plan.problem.dtype != "float64"} == {"triton"}
    assert {plan.problem.over for plan in plans if plan.asked.ranks > 1} == {"tokens"}


JOBS: dict[str, tuple[int, Job]] = {
    f"{op} {str(dtype)[6:]} on {ranks}": (ranks, partial(by_kernels, op, dtype, T, edges))
    for ranks, op, dtype, T, edges in (CHOSEN if WHOLE else CHOSEN[:5])}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_jobs(JOBS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.alternate
def test_over_ranks(name: str, said: dict[str, list[str]]) -> None:
    assert not any(said[name]), "\n".join(said[name])
