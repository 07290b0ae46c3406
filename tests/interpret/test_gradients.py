"""First-order gradients of the kernels if a caller asks for second-order gradients.

One op is tested for each autograd function. Run with TRITON_INTERPRET=1.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashlin

COS, SIN = torch.rand(3, 4).cos(), torch.rand(3, 4).sin()
TARGET = torch.tensor([1, -100, 5])
OPS: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    "chunk_retention": (lambda q: flashlin.chunk_retention(q, q, q)[0], ((1, 3, 1, 16),)),
    "fused_recurrent_delta_rule": (lambda q: flashlin.fused_recurrent_delta_rule(q, q, q)[0],
                                   ((1, 3, 1, 16),)),
    "chunk_hgrn": (lambda x, g: flashlin.chunk_hgrn(x, -g.exp())[0], ((1, 3, 8), (1, 3, 8))),
    "rms_norm": (lambda x, w, r: flashlin.rms_norm(x, w, None, r), ((3, 8), (8,), (3, 8))),
    "causal_conv1d": (lambda x, w: flashlin.causal_conv1d(x, w, activation="silu")[0], ((1, 3, 8), (8, 2))),
    "fused_k_rwkv7": (lambda k, a, ka: flashlin.fused_k_rwkv7(k, a, ka), ((1, 3, 8), (1, 3, 8), (8,))),
    "rotary_embedding": (lambda x: flashlin.rotary_embedding(x, COS, SIN), ((1, 3, 1, 8),)),
    "selective_scan_fn": (lambda u, A, B: flashlin.selective_scan_fn(u, u.abs(), -A.exp(), B, B),
                          ((1, 2, 3), (2, 4), (1, 4, 3))),
    "cross_entropy_loss": (lambda x: flashlin.cross_entropy_loss(x, TARGET)[0], ((3, 8),)),
    "fused_linear_cross_entropy_loss": (lambda x, w: flashlin.fused_linear_cross_entropy_loss(x, TARGET, w),
                                        ((3, 4), (8, 4))),
}


@pytest.mark.parametrize("op", OPS)
def test_a_second_derivative_is_refused_and_the_first_is_the_same(op: str) -> None:
    call, shapes = OPS[op]
    tensors = [torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
               for shape in shapes]
    plain = torch.autograd.grad(call(*tensors).square().sum(), tensors)
    grads = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(plain, grads, strict=True))
    assert all(grad.any() for grad in grads)
    with pytest.raises(RuntimeError, match=f"^{op}: got a second differentiation"):
        torch.autograd.grad(sum(grad.sum() for grad in grads), tensors)
