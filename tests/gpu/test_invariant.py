"""settings(invariant=True) on a GPU, for long sequences with few heads.

Without the setting, such sequences are split into segments. tests/invariance.py has the checks.
"""
from __future__ import annotations

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.guards.plan_types import Plan
from tests.invariance import OPS, compare, inputs, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_row_alone_a_prefix_and_a_prefill_in_pieces(op: str, dtype: torch.dtype) -> None:
    x = inputs(op, 8256, 2, 128, CUDA, dtype)
    with flashlin.settings(invariant=True):
        compare(op, x, prefix=5000, cut=4096)


def test_without_it_such_sequences_are_split() -> None:
    plans = list[Plan]()
    x = inputs("chunk_simple_gla", 8256, 2, 128, CUDA, torch.bfloat16)
    with dispatch.watching(plans.append):
        run("chunk_simple_gla", x)
        with flashlin.settings(invariant=True):
            run("chunk_simple_gla", x)
    assert [bool(plan.part) for plan in plans] == [True, False]
