"""Inside torch.func and forward-mode AD, ops on a GPU run in plain torch, as accurate as kernels."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import flashlin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gated_delta_rule(x: Tensor) -> Any:
    k = F.normalize(x, dim=-1)
    return flashlin.chunk_gated_delta_rule(x, k, x, -x[..., 0].abs(), x[..., 1].sigmoid())[0]


def mamba2(x: Tensor) -> Any:
    A = -torch.ones(x.shape[2], device=x.device)
    return flashlin.mamba_chunk_scan_combined(x, x[..., 0], A, x[:, :, :1], x[:, :, :1], 64, dt_softplus=True)


CALLS = {"gated_delta_rule": gated_delta_rule, "mamba2": mamba2,
         "simple_gla": lambda x: flashlin.chunk_simple_gla(x, x, x, -x[..., 0].abs())[0],
         "rms_norm": lambda x: flashlin.rms_norm(x, None, None),
         "causal_conv1d": lambda x: flashlin.causal_conv1d(
             x.flatten(2), torch.ones(x.shape[2] * x.shape[3], 4, device=x.device))[0]}


@pytest.mark.parametrize("name", CALLS)
def test_transforms_equal_backward(name: str) -> None:
    torch.manual_seed(0)
    samples = torch.randn(2, 1, 200, 2, 32, device="cuda").unbind(0)

    def loss(x: Tensor) -> Tensor:
        y: Tensor = CALLS[name](x).flatten()
        # The squares have different weights, because their plain sum is constant for rms_norm.
        return y.square() @ torch.linspace(0, 1, y.numel(), device=y.device)
    wanted = []
    for x in samples:
        leaf = x.clone().requires_grad_()
        wanted += torch.autograd.grad(loss(leaf), leaf)
    found = torch.func.vmap(torch.func.grad(loss))(torch.stack(samples))
    tangent = torch.randn_like(samples[0])
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(loss(forward_ad.make_dual(samples[0], tangent))).tangent
    for one, right in zip(found, wanted, strict=True):
        assert (one - right).norm() <= 1e-3 * right.norm()
    scale = wanted[0].norm() * tangent.norm()
    for product in (dual, torch.func.jvp(loss, (samples[0],), (tangent,))[1]):
        assert (product - (wanted[0] * tangent).sum()).abs() <= 1e-4 * scale
