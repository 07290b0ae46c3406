"""torch.compile of the kernels on a real GPU, with the default backend.

At most one recompilation covers all lengths, and the results equal those of eager calls.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import flashlin

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

LENGTHS = (70, 100, 65, 128, 129, 200, 500, 1000)


def gated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, h0: torch.Tensor) -> Any:
    return flashlin.chunk_simple_gla(q, k, v, g, initial_state=h0, output_final_state=True)


def leaves(T: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(T)
    made = [torch.randn(2, T, 3, 64, device="cuda", dtype=dtype) for _ in range(3)]
    made += [F.logsigmoid(torch.randn(2, T, 3, device="cuda")), torch.randn(2, 3, 64, 64, device="cuda")]
    return [x.requires_grad_() for x in made]


def results(function: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    o, ht = function(*tensors)
    return [o, ht, *torch.autograd.grad(o.float().sin().sum() + ht.sin().sum(), tensors)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_eight_lengths_and_one_recompilation(dtype: torch.dtype, starts: list[str]) -> None:
    graphs = CompileCounterWithBackend("inductor")
    compiled = torch.compile(gated, fullgraph=True, backend=graphs)
    for T in LENGTHS:
        tensors = leaves(T, dtype)
        del starts[:]
        got = results(compiled, tensors)
        assert {"simple_gla_scan", "simple_gla_states", "simple_gla_dv",
                "simple_gla_grads"} <= set(starts)
        for found, wanted in zip(got, results(gated, tensors), strict=True):
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4,
                                       atol=1e-2 if dtype == torch.bfloat16 else 1e-4)
    assert graphs.frame_count <= 2
