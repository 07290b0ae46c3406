"""Gated linear attention on a real GPU in the shapes of real models.

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

DEVICE = torch.device("cuda")
NAMES = ("o", "ht", "dq", "dk", "dv", "dg", "dh0")


def leaves(B: int, T: int, H: int, K: int, V: int, strong: bool = False) -> list[torch.Tensor]:
    """Return the inputs of a call, with gradients.

    strong: decays are uniform in -20 .. 0; one channel is always -20, and another is always 0.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D, device=DEVICE).bfloat16() for D in (K, K, V))
    g = -20 * torch.rand(B, T, H, K,
                         device=DEVICE) if strong else F.logsigmoid(torch.randn(B, T, H, K,
                                                                                device=DEVICE) + 3)
    if strong:
        g[..., 0], g[..., 1] = -20, 0
    return [x.requires_grad_() for x in (q, k, v, g, torch.randn(B, H, K, V, device=DEVICE))]


def results(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    q, k, v, g, h0 = tensors
    o, ht = flashlin.chunk_gla(q.to(dtype), k.to(dtype), v.to(dtype), g, initial_state=h0,
                               output_final_state=True)
    torch.manual_seed(1)
    do, dht = torch.randn(o.shape, device=DEVICE).bfloat16().to(o.dtype), torch.randn_like(ht)
    return [o, ht, *torch.autograd.grad([o, ht], tensors, [do, dht])]


@pytest.mark.parametrize("facts",
                         [dict(B=2, T=300, H=16, K=128, V=128), dict(B=2, T=1000, H=4, K=128, V=256),
                          dict(B=1, T=300, H=4, K=256, V=512), dict(B=2, T=300, H=8, K=64, V=64, strong=True),
                          dict(B=1, T=300, H=4, K=128, V=256, strong=True)], ids=str)
def test_shapes_of_real_models(facts: dict[str, Any]) -> None:
    tensors = leaves(**facts)
    got, again = (results(tensors, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    with flashlin.settings(path="torch"):
        wanted = results(tensors, torch.float32)
    verdicts = [judge(name, a, b, 0.02 if name == "dg" else 0.01)
                for name, a, b in zip(NAMES, got, wanted, strict=True)]
    assert all(verdict.ok for verdict in verdicts), verdicts


def test_the_first_tokens_of_many_are_those_of_few() -> None:
    tensors = leaves(1, 8192, 16, 128, 128)
    got = results(tensors, torch.bfloat16)
    assert all(bool(x.isfinite().all()) for x in got)
    short = [x[:, :640] if x.shape[1] == 8192 else x for x in tensors]
    alone, _ = flashlin.chunk_gla(*short[:4], initial_state=short[4])
    assert torch.equal(got[0][:, :640], alone)


def test_65538_heads() -> None:
    """In a call of 10,923 rows with 6 heads each, 40 rows have the same results as in their own call.

    The call has 65,538 heads in total, more than the 65,535 that some axes of a grid can count.

    The first call on a machine tries kernels of one decay reference, and the next call is planned with
    them. So a small call comes first: then the two calls that are compared have the same plan.
    """
    results(leaves(1, 32, 6, 16, 16), torch.bfloat16)
    tensors = leaves(10923, 32, 6, 16, 16)
    whole = results(tensors, torch.bfloat16)
    q, k, v, g, h0 = (x[7000:7040].detach().requires_grad_() for x in tensors)
    o, ht = flashlin.chunk_gla(q, k, v, g, initial_state=h0, output_final_state=True)
    assert torch.equal(whole[0][7000:7040], o) and torch.equal(whole[1][7000:7040], ht)
    assert all(bool(x.isfinite().all()) for x in whole)
