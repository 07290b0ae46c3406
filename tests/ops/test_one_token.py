"""Every input tensor gets a gradient, even if it is zero.

The gates of a single token without an initial state decay nothing, so their gradient is zero.
"""
from __future__ import annotations

import pytest
import torch

import flashlin
from tests import isolation

CALLS = [call for call in isolation.CALLS if not call.packed and "*" not in call.inputs and call.at_once > 1
         and call.op.startswith(("chunk", "fused", "parallel", "token"))]


@pytest.mark.parametrize("states", [False, True], ids=["bare", "initial-state"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_tensor_has_a_gradient(call: isolation.Call, states: bool) -> None:
    layouts = {name: letters for name, letters in call.layouts().items() if states or "N" not in letters}
    sizes = {**isolation.SIZES, "T": 1, "N": isolation.SIZES["B"]}
    leaves = {name: -torch.rand([sizes[letter] for letter in letters]).requires_grad_()
              for name, letters in layouts.items()}
    extra = {name: value
             for name, value in call.extra.items() if name not in ("output_final_state", "output_cache")}
    found = (call.function or getattr(flashlin, call.op))(**leaves, **extra)
    o = found[0] if isinstance(found, tuple) else found
    grads = torch.autograd.grad(o.sum(), list(leaves.values()), allow_unused=True)
    assert [name for name, grad in zip(leaves, grads, strict=True) if grad is None
            or not grad.isfinite().all()] == []
