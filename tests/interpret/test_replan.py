"""A graph that was traced with kernels runs when plans use torch: in forward, in backward, or in both.

Run with TRITON_INTERPRET=1.
"""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin import mamba
from flashlin.ops._common import operator

BOUNDS = torch.tensor([0, 2, 2, 5])
TARGET = torch.tensor([1, -100, 5, 2, 0])


@pytest.fixture(autouse=True)
def nothing_emptied() -> Iterator[None]:
    operator.emptied.clear()
    yield
    operator.emptied.clear()


def sequences(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, h0: torch.Tensor) -> list[torch.Tensor]:
    """Call an op by chunk and an op token by token, with q, k [1, 5, 2, 16] and v [1, 5, 2, 8]."""
    g, beta, a = -q.abs(), q[..., 0].sigmoid(), F.normalize(k, dim=-1)
    return [x for found in (
        flashlin.chunk_simple_gla(q, k, v, g[..., 0], initial_state=h0, output_final_state=True),
        flashlin.chunk_gated_delta_rule(q, a, v, g[..., 0], beta, initial_state=h0.mT,
                                        output_final_state=True, state_v_first=True),
        flashlin.chunk_gla(q, k, v, g),
        flashlin.chunk_rwkv7(q, g, a, v, -a, a * q.sigmoid(), cu_seqlens=BOUNDS),
        flashlin.fused_recurrent_kda(q, a, v, g, beta, initial_state=h0.expand(3, 2, 16, 8),
                                     output_final_state=True, cu_seqlens=BOUNDS),
    ) for x in found if x is not None]


def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, h0: torch.Tensor) -> list[torch.Tensor]:
    x, y, w = q.flatten(2), k.flatten(2), v[0, 0].flatten()
    rows = q[0, :, 0]
    return [*flashlin.chunk_hgrn(x, -y.abs(), h0[0, 0, :3].reshape(1, 24).repeat(3, 2)[:, :32], True, BOUNDS),
            flashlin.fused_recurrent_hgrn(x, -y.abs(), h0[0, :, 0, :].repeat(1, 2).reshape(1, 32))[0],
            *flashlin.layer_norm_gated(rows, k[0, :, 0], w, w + 1, residual=k[0, :, 1], prenorm=True),
            flashlin.group_norm(rows, w, None, num_groups=2), flashlin.l2norm(rows),
            flashlin.rms_norm(rows, None, None),
            *flashlin.causal_conv1d(x, y[0, :3].T, y[0, 0], y, activation="silu", output_final_state=True),
            flashlin.cross_entropy_loss(rows, TARGET, 0.1, lse_square_scale=0.1)[0],
            *mamba.selective_scan_fn(x.mT, y.mT.abs(), -y[0, :2].T.exp(), q[..., 0].mT, k[..., 0].mT, y[0, 0],
                                     y.mT, return_last_state=True)]


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_()
            for shape in ((1, 5, 2, 16), (1, 5, 2, 16), (1, 5, 2, 8), (1, 2, 16, 8))]


@pytest.mark.parametrize("call", [sequences, layers])
@pytest.mark.alternate
def test_what_was_traced_with_kernels_follows_the_plan(call: object, starts: list[str]) -> None:
    tensors = leaves()
    with flashlin.settings(path="torch"):
        wanted = call(*tensors)
        cotangents = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in wanted]
        wanted_grads = torch.autograd.grad(wanted, tensors, cotangents)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for forward, backward in (("auto", "torch"), ("torch", "torch"), ("torch", "auto")):
        del starts[:]
        with flashlin.settings(path=forward), torch._dynamo.config.patch(error_on_recompile=forward
                                                                         == "torch"):
            outputs = compiled(*tensors)
        assert bool(starts) == (forward == "auto")
        del starts[:]
        with flashlin.settings(path=backward):
            grads = torch.autograd.grad(outputs, tensors, cotangents)
        assert bool(starts) == (backward == "auto")
        for got, expected in zip([*outputs, *grads], [*wanted, *wanted_grads], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_so_does_what_was_traced_to_write_in_place(starts: list[str]) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor,
             window: torch.Tensor) -> list[torch.Tensor]:
        indices = torch.tensor([1])
        o, _ = flashlin.fused_recurrent_delta_rule(q, F.normalize(k, dim=-1), v, q[..., 0].sigmoid(),
                                                   initial_state=pool, state_indices=indices)
        y = mamba.selective_state_update(pool.mT, v[:, 0], v[:, 1].exp(), -pool[0].mT.exp(), q[:, 0], k[:, 0],
                                         state_batch_indices=indices)
        x = q[:, 0].flatten(1)
        z = mamba.causal_conv1d_update(x, window, window[0, :, :3], conv_state_indices=indices)
        return [o, y, z, flashlin.causal_conv1d_update(x, window[:1], weight=window[0])[0], pool.clone(),
                window.clone()]
    tensors = [x.detach() for x in (*leaves()[:3], torch.randn(3, 2, 16, 8), torch.randn(3, 32, 4))]
    with flashlin.settings(path="torch"):
        wanted = call(*(x.clone() for x in tensors))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for path in ("auto", "torch"):
        del starts[:]
        with flashlin.settings(path=path), torch._dynamo.config.patch(error_on_recompile=path == "torch"):
            found = compiled(*(x.clone() for x in tensors))
        assert bool(starts) == (path == "auto")
        for got, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_what_was_traced_without_kernels_may_have_them_later(starts: list[str]) -> None:
    """A graph that was traced with plain torch runs kernels if later plans have them.

    The trace contains an operator instead of the loops of plain torch, which would otherwise be unrolled.
    Kernels pad the head size of 10.
    """
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashlin.chunk_delta_rule(q, k, v,
                                         q[..., 0].sigmoid())[0] + flashlin.fused_recurrent_delta_rule(q, k,
                                                                                                       v,
                                                                                                       q[...,
                                                                                                         0].sigmoid())[0]
    tensors = [(0.5 * torch.randn(1, 5, 1, 10)).requires_grad_() for _ in range(3)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with flashlin.settings(path="torch"):
        wanted = compiled(*tensors)
        wanted_grads = torch.autograd.grad(wanted.sum(), tensors)
    assert not starts
    found = compiled(*tensors)
    assert {"delta_scan", "recurrent_forward"} <= set(starts)
    for got, expected in zip([found, *torch.autograd.grad(found.sum(), tensors)], [wanted, *wanted_grads],
                             strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
