"""Rotary embeddings and cross entropies on a real GPU.

The tests cover sizes of real models, offsets beyond 32 bits, targets out of range, host syncs and CUDA
graphs.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.testing.compare import judge

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

GPU = torch.device("cuda", torch.cuda.current_device())
A_SECOND = 1_500_000_000  # clock cycles, about


@pytest.fixture(autouse=True)
def nothing_owed() -> Iterator[None]:
    yield
    flashlin.synchronize()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, device=GPU).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize(("N", "V"), [(4096, 32000), (1000, 50257), (300, 256000), (100000, 10)])
@pytest.mark.parametrize("in_place", [False, True])
def test_shapes_of_real_models(N: int, V: int, in_place: bool) -> None:
    logits, target = randn(N, V), torch.randint(0, V, (N,), device=GPU)
    target[::7] = -100
    wide = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(wide, target, label_smoothing=0.1)
    got = flashlin.FusedCrossEntropyLoss(label_smoothing=0.1, inplace_backward=in_place)(logits, target)
    assert judge("loss", got, expected, 1e-4).ok
    assert judge("dlogits", *(torch.autograd.grad(loss, x)[0]
                              for loss, x in ((got, logits), (expected, wide))), 0.005).ok


def test_more_logits_than_32_bits_count() -> None:
    N, V = 17000, 128256
    logits = torch.empty(N, V, dtype=torch.bfloat16, device=GPU).normal_().requires_grad_()
    target = torch.randint(0, V, (N,), device=GPU)
    last = logits.detach()[-5:].float().requires_grad_()
    expected = F.cross_entropy(last, target[-5:], reduction="none")
    wanted, = torch.autograd.grad(expected.sum(), last)
    loss, _ = flashlin.cross_entropy_loss(logits, target, inplace_backward=True)
    grad, = torch.autograd.grad(loss.sum(), logits)
    assert judge("loss", loss[-5:], expected, 1e-4).ok and judge("dlogits", grad[-5:], wanted,
                                                                 0.005).ok and grad.data_ptr() == logits.data_ptr()


def test_a_target_out_of_range_is_reported_later_and_the_context_lives_on(
        no_host_sync: Callable[[], None]) -> None:
    logits, target = randn(64, 1000), torch.randint(0, 1000, (64,), device=GPU)
    target[7] = 1000
    flashlin.FusedCrossEntropyLoss()(logits, target % 1000)  # loads the kernels and makes the slots
    flashlin.synchronize()
    no_host_sync()
    torch.cuda._sleep(A_SECOND)  # so no later call of this test can report the error yet
    loss, _ = flashlin.cross_entropy_loss(logits, target)
    grad, = torch.autograd.grad(loss.sum(), logits)
    torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError,
                       match=r"cross_entropy_loss called at .*: target: got 1000 at position 7, need 0 <= "
                             r"token < 1000"):
        flashlin.synchronize()
    assert loss[7] == 0 and not grad[7].any() and bool(loss[:7].ne(0).all())


def test_nothing_waits_for_the_host(no_host_sync: Callable[[], None]) -> None:
    x, weight, target = randn(600, 64), randn(1000, 64), torch.randint(0, 1000, (600,), device=GPU)
    q, bounds = randn(1, 600, 4, 64), torch.tensor([0, 100, 100, 600], device=GPU)
    table, offsets = randn(700, 32, grad=False), torch.tensor([3, 4, 5], device=GPU)

    def step() -> None:
        y = flashlin.rotary_embedding(q, table, table, False, False, offsets, bounds)
        hidden = flashlin.rms_norm_linear(y[0].flatten(1)[:, :64] + x, None, None, weight[:64], None)
        loss = flashlin.FusedLinearCrossEntropyLoss(num_chunks=4)(hidden, target, weight)
        loss = loss + flashlin.FusedCrossEntropyLoss()(hidden @ weight.t(), target)
        torch.autograd.grad(loss, (q, x, weight))
    step()
    flashlin.synchronize()
    no_host_sync()
    step()


@pytest.mark.parametrize("wide", [False, True])
def test_the_linear_layers_logits_are_never_all_there(wide: bool) -> None:
    N, D, V = 8192, 1024, 64000
    x, weight, target = randn(N, D), (randn(V, D, grad=False) * D**-0.5).requires_grad_(), torch.randint(0, V,
                                                                                                         (N,),
                                                                                                         device=GPU)
    loss = flashlin.FusedLinearCrossEntropyLoss(accumulate_grad_in_fp32=wide)
    torch.autograd.grad(loss(x, target, weight), (x, weight))  # a first run, whose memory is not measured
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = loss(x, target, weight)
    grads = torch.autograd.grad(got, (x, weight))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * N * V, f"{peak} bytes, all logits are {2 * N * V}"
    doubles = [t.detach().float().requires_grad_() for t in (x, weight)]
    expected = F.cross_entropy(F.linear(*doubles), target)
    assert judge("loss", got, expected, 1e-3).ok
    for grad, wanted in zip(grads, torch.autograd.grad(expected, doubles), strict=True):
        assert judge("grad", grad, wanted, 0.02).ok


def test_a_factor_of_the_loss_is_not_rounded_to_16_bits() -> None:
    x, weight, target = randn(257, 64), randn(80, 64), torch.randint(0, 80, (257,), device=GPU)
    got = flashlin.fused_linear_cross_entropy_loss(x, target, weight)
    wide = [t.detach().float().requires_grad_() for t in (x, weight)]
    expected = F.cross_entropy(F.linear(*wide), target)
    for one, two in zip(torch.autograd.grad(got * 1.34, (x, weight)),
                        torch.autograd.grad(expected * 1.34, wide), strict=True):
        # bfloat16 rounds 1.34 to 1.3438
        assert abs(float((one * two).sum() / two.square().sum()) - 1) < 1e-3


@pytest.mark.parametrize(("shape", "R"),
                         [((5000, 2, 16, 64), 32), ((1, 4096, 32, 128), 64), ((2, 1000, 3, 300), 150),
                          ((2, 1000, 8, 160), 64)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_beside_the_torch_path(shape: tuple[int, int, int, int], R: int, interleaved: bool) -> None:
    x, angles = randn(*shape), torch.rand(shape[1], R, device=GPU) * 6
    found = []
    for path in ("triton", "torch"):
        with flashlin.settings(path=path):
            y = flashlin.rotary_embedding(x, angles.cos(), angles.sin(), interleaved)
            found.append((y, torch.autograd.grad(y, x, x.detach().flip(0))[0]))
    for one, two in zip(*found, strict=True):
        assert judge("", one, two, 0.003).ok
    copy = x.detach().clone()
    assert flashlin.rotary_embedding(copy, angles.cos(), angles.sin(), interleaved,
                                     inplace=True) is copy and torch.equal(copy, found[0][0])


def test_compiled_steps_are_those_of_eager_calls() -> None:
    rotary, whole, loss = flashlin.RotaryEmbedding(
        64), flashlin.FusedCrossEntropyLoss(), flashlin.FusedLinearCrossEntropyLoss()
    rotary.to(GPU)

    def step(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        q, k = rotary(x.unflatten(2, (4, 64)), x.unflatten(2, (4, 64)))
        hidden = flashlin.rms_norm_linear((q * k).flatten(2), None, None, weight[:256], None)
        plain = whole((hidden @ weight.t()).flatten(0, 1), target.flatten())
        return plain + loss(hidden, target, weight)  # type: ignore[no-any-return]
    # Scores are about 1. For far larger scores softmax selects one, and rounding decides which.
    compiled, weight = torch.compile(step,
                                     fullgraph=True), (randn(1000, 256, grad=False) / 16).requires_grad_()
    for T in (50, 77, 300):
        x, target = randn(2, T, 256), torch.randint(0, 1000, (2, T), device=GPU)
        found = [(value, *torch.autograd.grad(value, (x, weight)))
                 for value in (function(x, weight, target) for function in (compiled, step))]
        for one, two in zip(*found, strict=True):
            assert judge("", one, two, 0.02).ok


def test_a_captured_graph_replays_and_reports() -> None:
    logits, target = randn(64, 1000), torch.randint(0, 1000, (64,), device=GPU)
    x, table = randn(2, 50, 4, 64, grad=False), randn(60, 32, grad=False)

    def step() -> Any:
        loss, _ = flashlin.cross_entropy_loss(logits, target)
        return loss, torch.autograd.grad(loss.sum(), logits)[0], flashlin.rotary_embedding(x, table, table)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    target.copy_(target.flip(0))
    graph.replay()
    for got, wanted in zip(captured, step(), strict=True):
        assert torch.equal(got, wanted)
    flashlin.synchronize()
    target[3] = 5000
    graph.replay()
    with pytest.raises(ValueError, match="target: got 5000 at position 3"):
        flashlin.synchronize()
    target[3] = 0
