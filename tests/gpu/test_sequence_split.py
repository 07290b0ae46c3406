"""Sequences in segments on a GPU are as exact as whole sequences, and the same in each run.

The inputs are numerically hard and have 8,192 tokens (tests/splitting.py).
"""
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin import dispatch
from flashlin.kernels import scans
from tests.splitting import HARD, compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that sets the number of segments of every sequence, for this test."""
    def force(parts: int) -> None:
        monkeypatch.setattr(scans, "forced_parts", parts)
        dispatch.plan.cache_clear()
    yield force
    monkeypatch.undo()
    dispatch.plan.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", HARD)
def test_parts_are_as_exact_as_the_whole(name: str, dtype: torch.dtype,
                                         forced: Callable[[int], None]) -> None:
    compare(HARD[name](T=8192), CUDA, dtype, forced, 16)


@pytest.mark.parametrize("op", ["chunk_simple_gla", "chunk_gated_delta_rule"])
def test_a_long_sequence_is_split_and_repeats_to_the_bit(op: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 16384, 4, 128, device=CUDA, dtype=torch.bfloat16) for _ in "qkv")
    x = {"q": q, "k": F.normalize(k, dim=-1), "v": v}
    x["g"] = F.logsigmoid(torch.randn(1, 16384, 4, device=CUDA) + 4)
    if "delta" in op:
        x["beta"] = torch.rand(1, 16384, 4, device=CUDA, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in x.values()]
    pull, plans = torch.randn_like(v), []
    with dispatch.watching(plans.append):
        once, again = ([o := getattr(flashlin, op)(**x)[0], *torch.autograd.grad(o, leaves, pull)]
                       for _ in range(2))
    assert all(plan.part for plan in plans)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
