"""settings(invariant=True) in Triton's interpreter. tests/invariance.py has the checks."""
from __future__ import annotations

import pytest
import torch

import flashlin
from flashlin.kernels import scans
from tests.invariance import OPS, compare, inputs


@pytest.mark.parametrize("op", OPS)
@pytest.mark.alternate
def test_a_row_alone_a_prefix_and_a_prefill_in_pieces(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "forced_parts", 3)  # without the setting, sequences are split
    T, prefix = (600, 500) if op == "chunk_hgrn" else (210, 77)  # because its segments are longer
    x = inputs(op, T, 1, 16, torch.device("cpu"), torch.float32)
    with flashlin.settings(invariant=True):
        compare(op, x, prefix, cut=128)
