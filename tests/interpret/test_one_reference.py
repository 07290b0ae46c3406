"""One decay reference to a chunk against halving, at the border between both, run by Triton's interpreter."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from flashlin.kernels.gla import forward
from tests import one_reference
from tests.share import WHOLE

CPU = torch.device("cpu")
# The first rows and the last of both halves of a chunk of 32, and one in each.
POSITIONS = range(32) if WHOLE else (0, 1, 15, 16, 31)


@pytest.fixture
def halve(monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> Iterator[Callable[[bool], None]]:
    """Sets whether every chunk is halved, for this test."""
    def force(halving: bool) -> None:
        monkeypatch.setattr(forward, "halving", halving)
        fresh()
    yield force


@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")  # of pairs that nobody reads
@pytest.mark.parametrize("op", one_reference.GATES)
def test_one_reference_loses_no_more_than_halving(op: str, halve: Callable[[bool], None]) -> None:
    assert one_reference.failures(op, CPU, torch.float32, halve, POSITIONS, 1, K=16, V=16) == []


@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("op", one_reference.GATES)
def test_one_reference_is_taken(op: str, halve: Callable[[bool], None]) -> None:
    """Else there is nothing to compare: results differ in their last bits."""
    decays, found = one_reference.gates(one_reference.chunk_of(op, torch.float32), ())["hardly anything"], []
    for halving in (True, False):
        halve(halving)
        found.append(one_reference.errors(op, CPU, torch.float32, decays, 16, 16)[0])
    assert found[0] != found[1]
