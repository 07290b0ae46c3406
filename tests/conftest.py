"""For every test: one thread, since the tensors are small, and the policy of the environment, whatever the test before it set."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashlin import policy

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_policy() -> Iterator[None]:
    policy._current = None
    policy.current()
    yield
    policy._current = None
