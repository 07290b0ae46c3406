"""One decay reference per chunk is compared with halving on a GPU.

In the inputs, a chunk forgets everything at each position in turn.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import flashlin
from flashlin.kernels.gla import forward
from tests import one_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@pytest.fixture
def halve(monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> Iterator[Callable[[bool], None]]:
    """Return a function that turns halving of every chunk on or off, for this test."""
    def force(halving: bool) -> None:
        monkeypatch.setattr(forward, "halving", halving)
        fresh()
    yield force


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("op", one_reference.GATES)
def test_one_reference_loses_no_more_than_halving(op: str, K: int, halve: Callable[[bool], None]) -> None:
    with flashlin.settings(canary="trial"):  # so kernels that have not run on this GPU are also planned
        assert one_reference.failures(op, CUDA, torch.bfloat16, halve, K=K, V=K) == []


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("op", one_reference.GATES)
def test_float32_is_right_there(op: str, K: int, halve: Callable[[bool], None]) -> None:
    """Errors stay within the op's own bounds. float32 always halves (tests/plan/test_one_reference.py)."""
    with flashlin.settings(canary="trial"):
        assert one_reference.failures(op, CUDA, torch.float32, halve, K=K, V=K) == []


@pytest.mark.parametrize("op", one_reference.GATES)
def test_one_reference_is_taken(op: str, halve: Callable[[bool], None]) -> None:
    with flashlin.settings(canary="trial"):
        one_reference.check_taken(op, CUDA, torch.bfloat16, halve, 128)
