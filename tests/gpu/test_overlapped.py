"""The overlapping scans on a Hopper GPU agree with the scans in plain Triton, and are as exact.

They are also tested with segments, and give the same bits in each run. Child processes run them, because a
wrong barrier hangs.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch

from matrix.record import child
from tests.overlapped import ALL, LONG

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                                reason="needs a Hopper GPU")
PARTS = (0, 3)
CLOSE, AS_EXACT = 5e-3, 1.25  # largest difference from plain Triton; largest multiple of plain Triton's error
# Seconds that a child has for all remaining calls, including compilation. If it dies, or its time is up, the
# call that it had begun has failed, and the next child makes the remaining calls.
LIMIT, CHILDREN = 420, 3


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the results of tests.overlapped by segments and call, for the selected calls."""
    every = [item.callspec.params for item in request.session.items
             if isinstance(item, pytest.Function) and item.module is request.module]
    left, found = [(one["parts"], one["name"]) for one in every], {}
    for _ in range(CHILDREN):
        done = child("tests.overlapped", *(str(word) for one in left for word in one), seconds=LIMIT)
        for told in done.messages:
            found[told["parts"], told["call"]] = told
        if done.messages and done.failure:
            last = done.messages[-1]
            found[last["parts"], last["call"]] = {"ended": f"{done.how}: {done.stderr[-1000:]}"}
        left = [one for one in left if one not in found]
        if not left or not done.messages:
            break
    return {**{one: {"ended": "not tried"} for one in left}, **found}


@pytest.mark.parametrize("parts", PARTS, ids=["whole", "in parts"])
@pytest.mark.parametrize("name", [*ALL, *LONG])
def test_it_gives_what_plain_triton_gives(name: str, parts: int,
                                          verdicts: dict[tuple[int, str], dict[str, Any]]) -> None:
    told = verdicts[parts, name]
    assert "ended" not in told, told["ended"]
    assert told["planned"] and told["same"], told
    chunks_differ = "layer" in name and "gradients" in name  # plain Triton has longer chunks in this backward
    assert max(told["from_plain"]) < CLOSE * (2 if chunks_differ else 1), told
    for ours, plain in zip(*told.get("from_float64", ((), ())), strict=True):
        assert ours < AS_EXACT * plain, told
