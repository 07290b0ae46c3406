"""The scan whose loads, products and stores overlap, on a Hopper card: what plain Triton's gives, in parts,
too, and the same each time."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.kernels import scans
from tests.overlapped import CALLS, sequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                reason="needs a Hopper GPU")
CUDA = torch.device("cuda")


@pytest.fixture(params=[0, 3], ids=["whole", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scans, "forced_parts", request.param)
    dispatch.plan.cache_clear()
    yield
    monkeypatch.undo()
    dispatch.plan.cache_clear()


def compare(call: Callable[[torch.device], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for never in (True, *[False] * 4):  # found by Triton, started directly, and as part of a run made again
        monkeypatch.setattr(scans, "OVERLAPS", (99,) if never else (3, 6))
        if len(found) < 2:  # what is made again has the same plan
            dispatch.plan.cache_clear()
        plans: list[flashlin.Plan] = []
        with flashlin.settings(canary="trial"), dispatch.watching(plans.append):
            found.append(call(CUDA))
        kernels = {launch.kernel for plan in plans for launch in plan.launches}
        assert ("simple_gla_overlapped" in kernels) is not never
    for plain, once, *again in zip(*found, strict=True):
        assert all(torch.equal(once, other) for other in again)
        torch.testing.assert_close(once, plain, rtol=0.01, atol=0.005 * float(plain.abs().max()))


@pytest.mark.parametrize("name", CALLS)
def test_it_gives_what_plain_triton_gives(name: str, parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(CALLS[name], monkeypatch)


def test_many_chunks_and_an_odd_address(parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(partial(sequences, "chunk_simple_gla", T=4096, gated=True, state=True, shift=1), monkeypatch)
