"""The kernels of the rotary embedding and of the cross entropy, and their host code, beyond their cases.

Run with TRITON_INTERPRET=1, see test_cases.py.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import flashlin
from flashlin.guards.plan_types import Problem
from flashlin.kernels.cross_entropy.reference import cross_entropy as of_logits
from flashlin.kernels.rotary import forward
from flashlin.kernels.rotary.reference import rotate
from flashlin.ops import cross_entropy, rotary
from flashlin.ops._common.pipeline import planned
from flashlin.testing.compare import judge, poisoned

CPU = torch.device("cpu")


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape,
                       generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_(grad)


# Cross entropy

BAD = torch.tensor([5, 2**40, -1, 8, -2**40, -100, 7])


def test_targets_out_of_range_reach_nothing_and_count_as_ignored() -> None:
    """Targets out of range count as ignored, and nothing outside of the logits is read or written.

    NaN surrounds the logits, so such reads and writes are detected.
    """
    around = randn(9, 20)
    around[:, 8:], around[0], around[8] = torch.nan, torch.nan, torch.nan
    logits, before = around[1:8, :8], around.clone()
    leaf = logits.detach().clone().requires_grad_()
    with flashlin.settings(tokens="off"), poisoned():
        got = flashlin.cross_entropy_loss(logits.requires_grad_(), BAD, lse_square_scale=0.1,
                                          inplace_backward=True)
        grad, = torch.autograd.grad(got[0].sum(), logits)
    expected = of_logits(leaf, torch.where((BAD >= 0) & (BAD < 8), BAD, -100), lse_square_scale=0.1)
    wanted, = torch.autograd.grad(expected[0].sum(), leaf)
    assert judge("loss", got[0], expected[0], 1e-5).ok and judge("z", got[1], expected[1],
                                                                 1e-5).ok and judge("d", grad, wanted,
                                                                                    1e-5).ok
    assert not grad[1:6].any() and got[0][1:6].eq(0).all()
    assert grad.data_ptr() == logits.data_ptr()
    around[1:8, :8] = before[1:8, :8] = 0
    assert around.equal(before) or bool((around.isnan() == before.isnan()).all())


def test_backward_in_place_is_done_once() -> None:
    leaf, weight = randn(6, 30, grad=True), randn(6, 30)
    target = torch.arange(6)
    logits = leaf * 1
    loss, _ = flashlin.cross_entropy_loss(logits, target, inplace_backward=True)
    expected = F.cross_entropy(leaf, target, reduction="none")
    got, = torch.autograd.grad(loss, leaf, weight[:, 0], retain_graph=True)
    wanted, = torch.autograd.grad(expected, leaf, weight[:, 0])
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(logits.detach(), wanted)  # backward stores the gradient in the logits
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf, weight[:, 0])


def test_backward_leaves_the_logits_alone_unless_asked() -> None:
    leaf = randn(6, 30, grad=True)
    before = leaf.detach().clone()
    loss, _ = flashlin.cross_entropy_loss(leaf, torch.arange(6))
    first, = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
    again, = torch.autograd.grad(loss.sum(), leaf)
    assert torch.equal(leaf.detach(), before) and torch.equal(first, again)


@pytest.mark.parametrize("view",
                         [lambda x: x[:, 10:], lambda x: x[::2], lambda x: x.t().contiguous().t(),
                          lambda x: x[:1].expand(6, -1)],
                         ids=["columns", "rows", "transposed", "expanded"])
def test_logits_of_any_strides(view: Any) -> None:
    x = randn(6, 40, grad=True)
    target = torch.randint(0, 20, (len(view(x)),), generator=torch.Generator().manual_seed(0))
    found = []
    for logits in (view(x * 1), view(x * 1).clone()):
        loss, _ = flashlin.cross_entropy_loss(logits, target, 0.1, inplace_backward=False)
        found.append((loss, torch.autograd.grad((loss * loss).sum(), x)[0]))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_contiguous_rows_are_not_copied() -> None:
    x = randn(6, 40)
    assert all(cross_entropy._rows(view) is view for view in (x, x[:, 10:], x[::2]))


def test_a_row_that_is_ignored_may_hold_anything() -> None:
    logits = randn(4, 6)
    logits[1], logits[2, 3] = torch.nan, torch.inf
    logits.requires_grad_()
    loss, z_loss = flashlin.cross_entropy_loss(logits, torch.tensor([1, -100, -100, 2]), lse_square_scale=0.1)
    grad, = torch.autograd.grad(loss.sum(), logits)
    assert loss[1] == loss[2] == z_loss[1] == 0 and not grad[1:3].any() and bool(grad.isfinite().all())


def test_losses_share_a_graph_that_starts_kernels(starts: list[str]) -> None:
    graphs = CompileCounterWithBackend("aot_eager")

    def both(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        plain = flashlin.FusedCrossEntropyLoss(label_smoothing=0.1, lse_square_scale=0.1)(x @ weight.t(),
                                                                                          target)
        return plain + flashlin.FusedLinearCrossEntropyLoss()(x, target, weight)  # type: ignore[no-any-return]
    compiled = torch.compile(both, fullgraph=True, backend=graphs)
    weight = randn(9, 8, grad=True)
    for N in (3, 5, 9, 130):
        x, target = randn(N, 8, grad=True), torch.arange(N) % 9
        del starts[:]
        found = [(total, *torch.autograd.grad(total, (x, weight)))
                 for total in (f(x, weight, target) for f in (compiled, both))]
        assert starts.count("cross_entropy_backward") >= 4
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted)
    assert graphs.frame_count <= 2


def test_the_library_operators() -> None:
    terms = (1.3, 5.0, 0.1, 0.1, -100)
    logits, target, lse = randn(4, 6, grad=True), torch.arange(4), randn(4)
    how = (*terms, False, True, "cross_entropy_loss float32")
    torch.library.opcheck(torch.ops.flashlin.cross_entropy.default, (logits, target, *how))
    torch.library.opcheck(torch.ops.flashlin.cross_entropy_backward.default, (
        logits.detach(), target, None, None, lse, lse, None, *how, "logits"))
    for bias, grads in ((randn(6, grad=True), [True, True, True]), (None, [True, True, False])):
        torch.library.opcheck(torch.ops.flashlin.linear_cross_entropy.default, (
            randn(4, 8, grad=True), target, randn(6, 8, grad=True), bias, *terms, 8, True, 0.1, True,
            torch.float32, *grads, True, "fused_linear_cross_entropy_loss float32"))


# Rotary embedding

def tables(TR: int, R: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(TR, R, generator=torch.Generator().manual_seed(0)) * 6
    return angles.cos(), angles.sin()


def problem(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, packed: bool, needs_grad: bool) -> Problem:
    bounds = torch.zeros(2) if packed else None
    return rotary.problem_of(rotary.Tensors(x, cos, sin, None, bounds),
                             rotary.Scalars(0, False, False, needs_grad, "rotary_embedding"))


@pytest.mark.parametrize("edges", [(2, 5, 5, 9), (0, 4, 7), (0,), (12, 12)], ids=str)
@pytest.mark.parametrize("back", [False, True])
def test_rows_of_no_sequence_are_zero(edges: tuple[int, ...], back: bool) -> None:
    """Rows of no sequence are zero.

    The bounds are as on a GPU, where the host does not check them: in order and within 0 .. T.
    """
    x, (cos, sin) = randn(1, 12, 3, 10), tables(6, 4)
    plan = planned(problem(x, cos, sin, True, True), CPU)
    with poisoned():
        y = forward.launch_forward(plan, x, cos, sin, 0, None, torch.tensor(edges), False, back, False)
    expected = rotate(x, cos, -sin if back else sin, cu_seqlens=torch.tensor(edges))
    assert judge("y", y, expected, 1e-6).ok


@pytest.mark.parametrize("packed", [False, True])
def test_places_past_the_tables_are_nan_and_read_nothing(packed: bool) -> None:
    x = randn(1 if packed else 2, 8, 2, 6)
    huge, (cos, sin) = torch.tensor([2, 2**40]), tables(7, 2)
    bounds = torch.tensor([0, 4, 8]) if packed else None
    y = forward.launch_forward(planned(problem(x, cos, sin, packed, False), CPU), x, cos, sin, 0, huge,
                               bounds,
                    False, False, False)
    lost = y[:, 4:, :, :4] if packed else torch.cat([y[:1, 5:, :, :4].flatten(), y[1:, ..., :4].flatten()])
    assert lost.isnan().all()
    fine = y[0, :4] if packed else y[0, :5]
    assert judge("y", fine, rotate(x, *tables(99, 2), seqlen_offsets=2)[0, :len(fine)], 1e-6).ok or packed
    assert bool(fine.isfinite().all()) and torch.equal(y[..., 4:], x[..., 4:])


def fused(x: torch.Tensor) -> torch.Tensor:
    return x[..., 8:20].unflatten(2, (2, 6))


@pytest.mark.parametrize("view",
                         [fused, lambda x: x.unflatten(2, (5, 4)).transpose(1, 2),
                          lambda x: x.unflatten(2, (2, 10))[..., 4:],
                          lambda x: x[:, ::3].unflatten(2, (5, 4)),
                          lambda x: x[:1, :1].expand(2, 7, 20).unflatten(2, (5, 4))],
                         ids=["slice", "heads-first", "channels", "every-third", "expanded"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tensors_of_any_strides(view: Any, interleaved: bool) -> None:
    x = randn(2, 7, 20, grad=True)
    seen = view(x)
    cos, sin = tables(40, 2)
    dy = randn(*reversed(seen.shape)).permute(3, 2, 1, 0)
    y = flashlin.rotary_embedding(seen, cos, sin, interleaved, seqlen_offsets=torch.tensor([3, 5]))
    expected = rotate(view(x.double()), cos, sin, interleaved, torch.tensor([3, 5]))
    assert judge("y", y, expected, 1e-6).ok
    assert judge("dx", *(torch.autograd.grad(z, x, dy.to(z.dtype))[0] for z in (y, expected)), 1e-6).ok


def test_evenly_spaced_tokens_are_not_copied() -> None:
    x = randn(2, 7, 20)
    assert all(rotary._evenly(view) is view
               for view in (fused(x), x.unflatten(2, (2, 10)), x.unflatten(2, (2, 10))[..., 4:],
                            fused(x)[:, :1]))
    flat = x.unflatten(2, (5, 4))
    assert rotary._evenly(flat.transpose(1,
                                         2)).is_contiguous() and rotary._evenly(flat[:, ::3]).is_contiguous()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_in_place_is_in_place_and_autograd_knows(interleaved: bool, whole: bool) -> None:
    leaf = randn(2, 5, 3, 8, grad=True)
    cos, sin = tables(9, 4 if whole else 3)
    x = leaf * 2
    y = flashlin.rotary_embedding(x, cos, sin, interleaved, inplace=True)
    expected = rotate(leaf.double() * 2, cos, sin, interleaved)
    assert y is x and judge("y", y, expected, 1e-6).ok
    dy = randn(2, 5, 3, 8)
    kept = dy.clone()
    assert judge("dx", *(torch.autograd.grad(z, leaf, dy.to(z.dtype))[0] for z in (y, expected)), 1e-6).ok
    assert torch.equal(dy, kept)


@pytest.mark.filterwarnings("ignore:.*fp32 copies")
def test_in_place_through_fp32_copies() -> None:
    x = randn(2, 5, 3, 8, dtype=torch.bfloat16)
    expected = rotate(x, *tables(9, 4))
    assert flashlin.rotary_embedding(x, *tables(9, 4), inplace=True) is x and judge("y", x, expected,
                                                                                    0.005).ok


def test_tables_get_no_gradient_and_heads_may_be_none() -> None:
    cos, sin = (table.requires_grad_() for table in tables(9, 4))
    assert not flashlin.rotary_embedding(randn(2, 5, 3, 8), cos, sin).requires_grad
    assert flashlin.rotary_embedding(randn(2, 5, 0, 8), cos, sin).shape == (2, 5, 0, 8)


def test_norms_with_a_linear_layer_start_the_kernels_and_make_their_rows_again(starts: list[str]) -> None:
    x, weight = randn(5, 8, grad=True), randn(4, 8, grad=True)
    module = flashlin.FusedRMSNormSwishGateLinear(8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = []
    for function in (module, compiled):
        del starts[:]
        out = function(x, x, weight)
        found.append((out, *torch.autograd.grad(out.sin().sum(), (x, weight))))
        assert starts == ["norm_forward", "norm_forward", "norm_backward"]
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)
