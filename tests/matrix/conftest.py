"""Every Triton release, without a GPU: launches recorded on the CPU, compiled by child processes that import the release."""
from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import flashlin
from flashlin.testing.compile import Job, Result, compile_launches
from flashlin.testing.environments import NotInstallable, triton_environment

Compile = Callable[[str, list[Job]], list[Result]]


@pytest.fixture(scope="session")
def compiled() -> Compile:
    """compiled(version, jobs) -> results. A release that cannot be installed is skipped, but fails in CI: nobody looks at skips there."""
    def run(version: str, jobs: list[Job]) -> list[Result]:
        try:
            environment = triton_environment(version)
        except NotInstallable as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        results = compile_launches(jobs, environment)
        assert {result.triton for result in results} <= {version}
        return results
    return run


@pytest.fixture(scope="session")
def gated() -> Callable[..., None]:
    return call_gated


def call_gated(op: str = "chunk_simple_gla", dtype: torch.dtype = torch.bfloat16, *, B: int = 2, T: int = 128, H: int = 4, K: int = 64,
               V: int = 64, others: torch.dtype = torch.float32, edges: list[int] | None = None) -> None:
    """An op of the scalar-decay family with all there is, forward and backward: gate, states in and out. others: dtype of gate and state."""
    def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)
    N = B if edges is None else len(edges) - 1
    o, ht = getattr(flashlin, op)(leaf(B, T, H, K), leaf(B, T, H, K), leaf(B, T, H, V), g=leaf(B, T, H, dtype=others),
                                  initial_state=leaf(N, H, K, V, dtype=others), output_final_state=True,
                                  cu_seqlens=None if edges is None else torch.tensor(edges, dtype=torch.int32))
    torch.autograd.backward([o, ht], [torch.zeros_like(o), torch.zeros_like(ht)])
