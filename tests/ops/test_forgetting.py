"""Tokens that forget the whole state, on the torch path.

A gate of -inf at the first token of each sequence must give the results of packed sequences, in each mode and
gate dtype. Other tests give whole heads a fixed decay that forgets everything.
"""
from __future__ import annotations

import math

import pytest
import torch

import flashlin
from tests import forgetting

OPS = ("chunk_simple_gla", "fused_recurrent_simple_gla", "fused_chunk_simple_gla", "parallel_simple_gla",
       "simple_gla", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "gated_delta_rule",
       "chunk_gla", "fused_recurrent_gla", "gla", "chunk_kda", "fused_recurrent_kda", "kda")


@pytest.mark.parametrize("op", OPS)
def test_a_boundary_may_be_a_gate(op: str) -> None:
    forgetting.assert_same(op, torch.float32, torch.float32, 2e-6)


@pytest.mark.parametrize("op", ["chunk_simple_gla", "chunk_gated_delta_rule"])
def test_a_boundary_may_be_a_gate_of_any_dtype(op: str) -> None:
    forgetting.assert_same(op, torch.float64, torch.float64, 1e-12)
    forgetting.assert_same(op, torch.float32, torch.float16, 1e-3)
    forgetting.assert_same(op, torch.float32, torch.bfloat16, 1e-2)


@pytest.mark.parametrize("op",
                         ["chunk_simple_gla", "fused_recurrent_simple_gla", "fused_chunk_simple_gla",
                          "simple_gla"])
def test_heads_may_forget_everything(op: str) -> None:
    """With g_gamma = -inf or -1e9 each token reads only itself.

    The kernels subtract multiples of g_gamma, which must not produce NaN.
    """
    made = {name: x
            for name, x in forgetting.inputs("chunk_simple_gla", torch.float32, torch.float32).items()
            if name != "g"}
    found = forgetting.run(op, made, g_gamma=torch.tensor([-math.inf, -1e9]), scale=1.0)
    q, k, v = made.values()
    torch.testing.assert_close(found["o"], (q * k).sum(-1, keepdim=True) * v)


def test_heads_that_forget_everything_are_still_checked() -> None:
    made = forgetting.inputs("chunk_simple_gla", torch.float32, torch.float32)
    for wrong in (torch.tensor([-1, -1]), torch.zeros(3), [-1.0, -1.0]):
        with pytest.raises((TypeError, ValueError), match="g_gamma"):
            flashlin.chunk_simple_gla(made["q"], made["k"], made["v"], g_gamma=wrong)  # type: ignore[arg-type]
