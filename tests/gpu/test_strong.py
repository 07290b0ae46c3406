"""Very strong decays over 8,192 tokens on a real GPU; tests/strong.py has the inputs.

Kernels in bf16 are compared with the recurrence in float64.
"""
from __future__ import annotations

import pytest
import torch

from tests import strong

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


@pytest.mark.parametrize("op", strong.OPS)
def test_no_decay_is_too_strong(op: str) -> None:
    assert strong.failures(op, torch.device("cuda"), torch.bfloat16, T=8192, K=64, V=64) == []
