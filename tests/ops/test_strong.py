"""Ops with very strong decays on the torch path in float32; see tests/strong.py."""
from __future__ import annotations

import pytest
import torch

from tests import strong


@pytest.mark.parametrize("op", strong.OPS)
def test_no_decay_is_too_strong(op: str) -> None:
    assert strong.failures(op, torch.device("cpu"), torch.float32, T=1024, K=16, V=16) == []
