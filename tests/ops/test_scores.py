"""Attention scores that the parallel ops return on request, on the torch path."""
from __future__ import annotations

import math

import pytest
import torch

import flashlin
from tests.ops.test_simple_gla import assert_close, inputs, ints


@pytest.mark.parametrize("op", ["parallel_simple_gla", "parallel_retention"])
def test_scores_make_the_output(op: str) -> None:
    given = inputs(dtype=torch.float32)
    if op == "parallel_retention":
        del given["g"]
    function = getattr(flashlin, op)
    o, attn = function(**given, scale=-0.3, output_attentions=True)
    assert attn.shape == (2, 3, 12, 12) and (attn.triu(1) == 0).all()
    assert_close((attn @ given["v"].transpose(1, 2)).transpose(1, 2), o, 1e-5)
    plain, nothing = function(**given, scale=-0.3)
    assert nothing is None and torch.equal(plain, o)
    half = {name: x.bfloat16() for name, x in given.items()}
    half["v"] = half["v"].float()
    o, attn = function(**half, output_attentions=True)
    assert (o.dtype, attn.dtype) == (torch.float32, torch.bfloat16)


def test_scores_over_many_tokens_keep_their_digits() -> None:
    """A score after 3,000 tokens with strong decays is accurate to 1e-6.

    Differences of running sums would have the rounding error of a sum of thousands of terms.
    """
    T = 3000
    q, g = torch.ones(1, T, 1, 8), torch.full((1, T, 1), -20.0)
    g[:, -1] = -1e-3
    _, attn = flashlin.parallel_simple_gla(q, q, q, g, 1.0, True)
    assert attn is not None
    torch.testing.assert_close(attn[0, 0, -1, -2].item(), 8 * math.exp(-1e-3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", ["parallel_simple_gla", "parallel_retention"])
def test_packed_sequences_have_no_scores(op: str) -> None:
    given = {name: inputs(B=1)[name] for name in "qkv"}
    o, attn = getattr(flashlin, op)(**given, cu_seqlens=ints(0, 4, 12))
    assert o.shape == (1, 12, 3, 5) and attn is None
    with pytest.raises(ValueError, match="output_attentions: got True with cu_seqlens, need one of them"):
        getattr(flashlin, op)(**given, output_attentions=True, cu_seqlens=ints(0, 4, 12))


@pytest.mark.parametrize("facts", [{"T": 0}, {"B": 0}, {"H": 0}], ids=str)
def test_scores_of_nothing(facts: dict[str, int]) -> None:
    given = {name: x.requires_grad_() for name, x in inputs(**{"B": 2, **facts}).items()}
    o, attn = flashlin.parallel_simple_gla(**given, output_attentions=True)
    assert attn is not None and o.numel() == 0 and attn.numel() == 0
    (o.sum() + attn.sum()).backward()
    assert all(x.grad is not None for x in given.values())


def test_gradients_of_scores_and_output_pass_gradcheck() -> None:
    leaves = [x.requires_grad_() for x in inputs(B=1, T=6, H=2, K=3, V=2).values()]
    assert torch.autograd.gradcheck(lambda *x: flashlin.parallel_simple_gla(*x, output_attentions=True),
                                    leaves)
