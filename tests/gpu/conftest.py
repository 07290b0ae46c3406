from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def no_host_sync() -> Iterator[Callable[[], None]]:
    """A host sync is an error from the call of what this gives to the end of the test."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
