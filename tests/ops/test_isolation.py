"""What is not finite stays where it is, on the torch path: see tests/isolation.py."""
from __future__ import annotations

import pytest

from tests import isolation


@pytest.mark.parametrize("call", isolation.CALLS, ids=str)
def test_what_is_not_finite_stays_in_its_chunk_head_and_sequence(call: isolation.Call) -> None:
    assert list(isolation.leaks(call)) == []
