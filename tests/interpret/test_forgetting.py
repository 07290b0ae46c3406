"""The kernels in Triton's interpreter, for heads whose fixed decay forgets everything.

The cases of test_cases.py include tokens that forget everything.
"""
from __future__ import annotations

import math

import torch

from tests import forgetting


def test_heads_may_forget_everything() -> None:
    made = {name: x
            for name, x in forgetting.inputs("chunk_simple_gla", torch.float32, torch.float32).items()
            if name != "g"}
    found = forgetting.run("chunk_simple_gla", made, g_gamma=torch.tensor([-math.inf, -1e9]), scale=1.0)
    q, k, v = made.values()
    torch.testing.assert_close(found["o"], (q * k).sum(-1, keepdim=True) * v)
    assert all(x.isfinite().all() for x in found.values())
