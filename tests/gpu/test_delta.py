"""The delta-rule families on a real GPU in the shapes of real models.

Kernels in bf16 are compared with the torch path in float32 on the same tensors.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.testing.compare import judge

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

NAMES = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0")
ALLOWED = {"dg": 0.02, "dbeta": 0.02}


def leaves(B: int, T: int, H: int, HV: int, K: int, V: int, most: float = 1.0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(B, T, H, K, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(B, T, HV, V, device="cuda").bfloat16()
    g, beta = F.logsigmoid(torch.randn(B, T, HV, device="cuda") + 3), most * torch.rand(B, T, HV,
                                                                                        device="cuda")
    return [x.requires_grad_() for x in (q, k, v, g, beta, torch.randn(B, HV, K, V, device="cuda"))]


def results(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    q, k, v, g, beta, h0 = tensors
    o, ht = flashlin.chunk_gated_delta_rule(q.to(dtype), k.to(dtype), v.to(dtype), g, beta, initial_state=h0,
                                            output_final_state=True)
    torch.manual_seed(1)
    do, dht = torch.randn(o.shape, device="cuda").bfloat16().to(o.dtype), torch.randn_like(ht)
    return [o, ht, *torch.autograd.grad([o, ht], tensors, [do, dht])]


@pytest.mark.parametrize("facts",
                         [dict(B=2, T=300, H=16, HV=32, K=128, V=128),
                          dict(B=1, T=300, H=16, HV=48, K=128, V=128),
                          dict(B=2, T=300, H=30, HV=30, K=96, V=192, most=2.0),
                          dict(B=1, T=300, H=6, HV=6, K=256, V=512)], ids=str)
def test_shapes_of_real_models(facts: dict[str, Any]) -> None:
    tensors = leaves(**facts)
    got = results(tensors, torch.bfloat16)
    with flashlin.settings(path="torch"):
        wanted = results(tensors, torch.float32)
    verdicts = [judge(name, a, b, ALLOWED.get(name, 0.01))
                for name, a, b in zip(NAMES, got, wanted, strict=True)]
    assert all(verdict.ok for verdict in verdicts), verdicts


def test_heads_of_256_over_8192_tokens() -> None:
    """Forward and backward run. The first tokens have the same outputs as without the later tokens."""
    tensors = leaves(1, 8192, 36, 36, 256, 256)
    got = results(tensors, torch.bfloat16)
    assert all(bool(x.isfinite().all()) for x in got)
    short = [x[:, :640] if x.shape[1] == 8192 else x for x in tensors]
    alone, _ = flashlin.chunk_gated_delta_rule(*short[:5], initial_state=short[5])
    assert torch.equal(got[0][:, :640], alone)


def test_65538_heads() -> None:
    tensors = leaves(10923, 32, 6, 6, 16, 16)
    whole = results(tensors, torch.bfloat16)
    part = [x[7000:7040].detach().requires_grad_() for x in tensors]
    q, k, v, g, beta, h0 = part
    o, ht = flashlin.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0, output_final_state=True)
    assert torch.equal(whole[0][7000:7040], o) and torch.equal(whole[1][7000:7040], ht)
    assert all(bool(x.isfinite().all()) for x in whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_torch_compile_shares_a_graph_between_lengths(dtype: torch.dtype) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    graphs = CompileCounterWithBackend("inductor")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
             h0: torch.Tensor) -> Any:
        return flashlin.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0, output_final_state=True,
                                               use_qk_l2norm_in_kernel=True)
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for T in (70, 100, 65, 128, 129, 200, 500, 1000):
        tensors = [x.detach().to(dtype if x.ndim == 4 and x.shape[1] == T else x.dtype).requires_grad_()
                   for x in leaves(2, T, 2, 4, 64, 64)]
        found = []
        for function in (compiled, call):
            o, ht = function(*tensors)
            found.append([o, ht, *torch.autograd.grad(o.float().sin().sum() + ht.sin().sum(), tensors)])
        for a, b in zip(*found, strict=True):
            assert judge("", a, b, 0.01 if dtype == torch.bfloat16 else 1e-4).ok
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("op", [flashlin.chunk_gated_delta_rule, flashlin.chunk_gated_delta_product])
def test_the_first_call_with_other_bounds_is_captured(op: Any) -> None:
    """A CUDA graph can capture the first call with new cu_seqlens.

    In fla 0.6.0 this call waits for the GPU, so the capture fails. fla's cache then keeps values that were
    never computed.
    """
    more = {"num_householder": 1} if "product" in op.__name__ else {}
    tensors = [x.detach() for x in leaves(1, 512, 2, 2, 64, 64)[:5]]
    bounds = torch.tensor([0, 100, 512], device="cuda", dtype=torch.int32)
    wanted = op(*tensors, **more, cu_seqlens=bounds)[0]
    others = torch.tensor([0, 300, 512], device="cuda", dtype=torch.int32)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(*tensors, **more, cu_seqlens=others)[0]
    others.copy_(bounds)
    graph.replay()
    flashlin.synchronize()
    assert torch.equal(got, wanted)
