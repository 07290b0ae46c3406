"""Values that are not finite stay in their sequence on the torch path; see tests/isolation.py."""
from __future__ import annotations

import pytest

from flashlin.dispatch import OPS
from tests import isolation


@pytest.mark.parametrize("call", isolation.CALLS, ids=str)
@pytest.mark.alternate
def test_what_is_not_finite_stays_in_its_chunk_head_and_sequence(call: isolation.Call) -> None:
    assert list(isolation.leaks(call, briefly=call.op.startswith("fused") and not call.packed)) == []


def test_every_op_is_there() -> None:
    modes = {op for op, (_, mode) in OPS.items() if mode == "auto"} | {"rwkv7"}
    # the last one returns one number for all rows, so nothing can be isolated
    wanted = set(OPS) - modes - {"fused_linear_cross_entropy_loss"}
    assert {call.op for call in isolation.CALLS} == wanted, "tests/isolation.py: CALLS has a call of each op"
