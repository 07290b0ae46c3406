"""The cross entropy losses, compared with those of torch.

Further tests cover dtypes, targets out of range, exact error texts, torch.compile and the planned launches.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import flashlin
from flashlin.compat.target import parse
from flashlin.dispatch import plan
from flashlin.guards.plan_types import Problem
from flashlin.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss
from flashlin.ops import cross_entropy
from flashlin.testing.cases.cross_entropy import ALL, CASES
from flashlin.testing.compare import Case, check

CPU = torch.device("cpu")
H200 = parse("triton=3.6.0,sm=90")


pytestmark = pytest.mark.usefixtures("torch_path")


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape,
                       generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_(grad)


def targets(N: int, V: int, every: int = 0) -> torch.Tensor:
    found = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(N))
    if every:
        found[::every] = -100
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_path_is_the_reference_in_float64(case: Case) -> None:
    assert all(verdict.ok for verdict in check(case, CPU, torch.float64))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_module_is_torchs_own(reduction: str, smoothing: float) -> None:
    logits, target = randn(12, 30, grad=True), targets(12, 30, 4)
    found = flashlin.FusedCrossEntropyLoss(reduction=reduction, label_smoothing=smoothing)(logits, target)
    expected = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(found, expected)
    weights = torch.linspace(1, 2, found.numel()).reshape(found.shape)
    torch.testing.assert_close(*(torch.autograd.grad((loss * weights).sum(), logits)[0]
                                 for loss in (found, expected)))


def test_z_loss_is_part_of_the_loss_and_has_no_gradient_of_its_own() -> None:
    logits, target = randn(12, 30, grad=True), targets(12, 30, 4)
    loss, z_loss = flashlin.cross_entropy_loss(logits, target, lse_square_scale=0.1)
    plain, nothing = flashlin.cross_entropy_loss(logits, target)
    assert not z_loss.requires_grad and not nothing.any()
    torch.testing.assert_close(loss, plain + z_loss)
    reduced = flashlin.FusedCrossEntropyLoss(lse_square_scale=0.1, return_z_loss=True)(logits, target)
    torch.testing.assert_close(reduced, (loss.sum() / 9, z_loss.sum() / 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_losses_are_wide_and_gradients_have_the_logits_dtype(dtype: torch.dtype) -> None:
    logits, weight = randn(12, 30, dtype=dtype, grad=True), randn(7, 30, dtype=dtype, grad=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    loss, z_loss = flashlin.cross_entropy_loss(logits, targets(12, 30))
    total = flashlin.fused_linear_cross_entropy_loss(logits, targets(12, 7), weight)
    assert loss.dtype == z_loss.dtype == total.dtype == wide
    assert {grad.dtype for grad in torch.autograd.grad(loss.sum() + total, (logits, weight))} == {dtype}


@pytest.mark.parametrize("module", [flashlin.FusedCrossEntropyLoss(), flashlin.FusedLinearCrossEntropyLoss()],
                         ids=lambda m: type(m).__name__)
def test_where_all_rows_are_ignored_the_mean_is_nothing_and_not_nan(module: Any) -> None:
    x, weight = randn(5, 8, grad=True), randn(8, 8, grad=True)
    loss = module(x, torch.full((5,), -100), *(() if "Linear" not in type(module).__name__ else (weight,)))
    grad, = torch.autograd.grad(loss, x)
    assert loss == 0 and not grad.any()


def test_a_row_that_is_ignored_may_hold_anything() -> None:
    logits = randn(4, 6)
    logits[1] = torch.nan
    logits[2, 3] = torch.inf
    logits.requires_grad_()
    loss, z_loss = flashlin.cross_entropy_loss(logits, torch.tensor([1, -100, -100, 2]), lse_square_scale=0.1)
    grad, = torch.autograd.grad(loss.sum(), logits)
    assert loss[1] == loss[2] == z_loss[1] == 0 and not grad[1:3].any() and bool(grad.isfinite().all())


def test_gradients_are_those_of_differences() -> None:
    x, weight, bias = (randn(*shape, dtype=torch.float64, grad=True) for shape in ((70, 3), (9, 3), (9,)))
    target = targets(70, 9, 4)
    terms = {"label_smoothing": 0.1, "logit_scale": 1.3, "logit_softcapping": 2.0}
    assert torch.autograd.gradcheck(lambda x: flashlin.cross_entropy_loss(x, target[:5] % 3,
                                                                          lse_square_scale=0.1, **terms)[0],
                                    (x[:5],))
    assert torch.autograd.gradcheck(lambda *tensors: flashlin.fused_linear_cross_entropy_loss(tensors[0],
                                                                                              target,
                                                                                              *tensors[1:],
                                                                                              **terms),
                                    (x, weight, bias))


# The loss with a linear layer

@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_linear_layers_module_is_torchs_own(reduction: str) -> None:
    tensors = randn(2, 100, 16, grad=True), randn(300, 16, grad=True), randn(300, grad=True)
    target = targets(200, 300, 3).reshape(2, 100)
    found = flashlin.FusedLinearCrossEntropyLoss(reduction=reduction, label_smoothing=0.1)(tensors[0], target,
                                                                                           *tensors[1:])
    expected = F.cross_entropy(F.linear(*tensors).flatten(0, 1), target.flatten(), reduction=reduction,
                               label_smoothing=0.1)
    torch.testing.assert_close(found, expected)
    for got, wanted in zip(*(torch.autograd.grad(loss * 3, tensors) for loss in (found, expected)),
                           strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("N", "V", "num_chunks", "rows"),
                         [(1000, 400, 8, {128, 104}), (1000, 400, 2, {512, 488}), (1000, 40, 8, {384, 232}),
                          (1000, 16, 8, {1000}), (10, 400, 8, {10}), (0, 40, 8, set())])
def test_only_a_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch, N: int, V: int, num_chunks: int,
                                       rows: set[int]) -> None:
    seen = set()

    def noting(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.add(len(x))
        return torch.matmul(x, rest[0].t())
    monkeypatch.setattr(cross_entropy.F, "linear", noting)
    flashlin.fused_linear_cross_entropy_loss(randn(N, 16), targets(N, V), randn(V, 16), num_chunks=num_chunks)
    assert seen == rows


def test_a_second_backward_through_the_same_graph_is_right() -> None:
    tensors = randn(20, 4, grad=True), randn(8, 4, grad=True)
    loss = flashlin.fused_linear_cross_entropy_loss(tensors[0], targets(20, 8), tensors[1])
    first = torch.autograd.grad(loss * 3, tensors, retain_graph=True)
    for got, wanted in zip(torch.autograd.grad(loss * 6, tensors), first, strict=True):
        torch.testing.assert_close(got, 2 * wanted)


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2], []], ids=str)
def test_gradients_for_some_tensors_only(wanted: list[int]) -> None:
    tensors = [randn(20, 4), randn(8, 4), randn(8)]
    whole = [x.clone().requires_grad_() for x in tensors]
    some = [x.clone().requires_grad_(at in wanted) for at, x in enumerate(tensors)]
    losses = [flashlin.fused_linear_cross_entropy_loss(x, targets(20, 8), *rest)
              for x, *rest in (whole, some)]
    torch.testing.assert_close(*(loss.detach() for loss in losses))
    assert losses[1].requires_grad == bool(wanted)
    for at in wanted:
        torch.testing.assert_close(torch.autograd.grad(losses[1], some[at], retain_graph=True)[0],
                                   torch.autograd.grad(losses[0], whole[at], retain_graph=True)[0])


def test_l2warp_pulls_at_the_highest_logit_of_each_row() -> None:
    x, weight = randn(150, 6, dtype=torch.float64, grad=True), randn(40, 6, dtype=torch.float64, grad=True)
    target = targets(150, 40, 5)
    losses = [flashlin.fused_linear_cross_entropy_loss(x, target, weight, use_l2warp=on,
                                                       l2_penalty_factor=0.3) for on in (False, True)]
    torch.testing.assert_close(*losses)
    pull = (x @ weight.t()).max(1).values.square().sum() * (0.3 / 2 / 150)
    for without, pulled, more in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (*losses, pull)),
                                     strict=True):
        torch.testing.assert_close(pulled, without + more)


@pytest.mark.parametrize("wide", [False, True])
def test_the_autocast_dtype_is_the_linear_layers(wide: bool) -> None:
    tensors = randn(100, 16, grad=True), randn(80, 16, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = flashlin.fused_linear_cross_entropy_loss(tensors[0], targets(100, 80), tensors[1],
                                                         accumulate_grad_in_fp32=wide)
    half = [x.detach().bfloat16().requires_grad_() for x in tensors]
    expected = F.cross_entropy(F.linear(*half).float(), targets(100, 80))
    torch.testing.assert_close(found, expected)
    for got, wanted in zip(torch.autograd.grad(found, tensors), torch.autograd.grad(expected, half),
                           strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted.float(), rtol=0.02, atol=2e-4)


def test_small_gradients_do_not_vanish_in_float16() -> None:
    """Small float16 gradients do not become zero, because the factor of a gradient scaler applies first.

    The division by the number of rows comes after it.
    """
    x, weight, target = randn(2000, 16), randn(80, 16) * 1e-3, targets(2000, 80)
    half = x.half().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        got, = torch.autograd.grad(flashlin.fused_linear_cross_entropy_loss(half, target, weight) * 65536,
                                   half)
    x.requires_grad_()
    wanted, = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target) * 65536, x)
    assert float((got - wanted).square().mean() / wanted.square().mean()) < 1e-5


def test_weights_of_another_dtype_are_used_in_that_of_x() -> None:
    x, weight = randn(10, 16, dtype=torch.bfloat16), randn(80, 16, grad=True)
    found = flashlin.fused_linear_cross_entropy_loss(x, targets(10, 80), weight)
    torch.testing.assert_close(found,
                               F.cross_entropy(F.linear(x, weight.bfloat16()).float(), targets(10, 80)))
    assert torch.autograd.grad(found, weight)[0].dtype == torch.float32


# Targets out of range

OUT = torch.tensor([1, 8, -1, 2])


@pytest.mark.parametrize("call",
                         [lambda x: flashlin.cross_entropy_loss(x, OUT),
                          lambda x: flashlin.FusedCrossEntropyLoss()(x, OUT),
                          lambda x: flashlin.fused_linear_cross_entropy_loss(x, OUT, x.new_zeros(8, 8))],
                         ids=["loss", "module", "linear"])
def test_a_target_out_of_range_is_named(call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(ValueError,
                       match=r"cross_entropy_loss called at .*test_cross_entropy.py:\d+ in .*: target: got 8 "
                             r"at position 1, "
                                         r"need 0 <= token < 8, the vocabulary size or ignore_index = -100"):
        call(randn(4, 8))


def test_where_nobody_looks_a_row_with_a_target_out_of_range_counts_as_ignored() -> None:
    logits, weight = randn(4, 8, grad=True), randn(8, 8, grad=True)
    ignored = torch.tensor([1, -100, -100, 2])
    with flashlin.settings(tokens="off"):
        for function in (lambda target: flashlin.FusedCrossEntropyLoss(lse_square_scale=0.1)(logits, target),
                         lambda target: flashlin.fused_linear_cross_entropy_loss(logits, target, weight)):
            losses = [function(target) for target in (OUT, ignored)]
            torch.testing.assert_close(*losses)
            torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in losses))


X, T = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
loss, linear = flashlin.cross_entropy_loss, flashlin.fused_linear_cross_entropy_loss


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: loss([1.0], T), TypeError, "logits: got list, need a tensor of shape [N, V]"),
    (lambda: loss(X[0], T), ValueError, "logits: got shape [8], need [N, V] with V of at least 1"),
    (lambda: loss(X[:, :0], T), ValueError, "logits: got shape [3, 0], need [N, V] with V of at least 1"),
    (lambda: loss(X.int(), T), TypeError,
     "logits: got dtype torch.int32, need bfloat16, float16, float32 or float64"),
    (lambda: loss(X, None), TypeError, "target: got NoneType, need an int32 or int64 tensor"),
    (lambda: loss(X, X[:, 0]), TypeError, "target: got dtype torch.float32, need int32 or int64"),
    (lambda: loss(X, T[:2]), ValueError, "target: got shape [2], need [N] = [3]"),
    (lambda: loss(X, T.to("meta")), ValueError, "target: got device meta, need cpu, where logits is"),
    (lambda: loss(X, T, 1.5), ValueError, "label_smoothing: got 1.5, need a number in 0 .. 1"),
    (lambda: loss(X, T, logit_scale=float("nan")), ValueError, "logit_scale: got nan, need a finite number"),
    (lambda: loss(X, T, lse_square_scale=float("inf")), ValueError,
     "lse_square_scale: got inf, need a finite number"),
    (lambda: loss(X, T, logit_softcapping=0), ValueError,
     "logit_softcapping: got 0, need a number above 0, or None"),
    (lambda: loss(X, T, process_group=object()), ValueError,
     "process_group: got object, need None: a vocabulary split over several GPUs is not supported"),
    (lambda: flashlin.FusedCrossEntropyLoss(reduction="max"), NotImplementedError,
     "reduction: got 'max', need 'mean', 'sum' or 'none'"),
    (lambda: linear(X[0], T, X), ValueError, "x: got shape [8], need [N, D] with D of at least 1"),
    (lambda: linear(X, T, X[0]), ValueError,
     "weight: got shape [8], need [V, D] with V of at least 1 and D = 8"),
    (lambda: linear(X, T, X[:, :7]), ValueError,
     "weight: got shape [3, 7], need [V, D] with V of at least 1 and D = 8"),
    (lambda: linear(X, T, X[:0]), ValueError,
     "weight: got shape [0, 8], need [V, D] with V of at least 1 and D = 8"),
    (lambda: linear(X, T, None), TypeError, "weight: got NoneType, need a tensor of shape [V, D]"),
    (lambda: linear(X, T, X, X), ValueError, "bias: got shape [3, 8], need [V] = [3]"),
    (lambda: linear(X, T, X, T), TypeError,
     "bias: got dtype torch.int64, need bfloat16, float16, float32 or float64"),
    (lambda: linear(X, T, X.to("meta")), ValueError, "weight: got device meta, need cpu, where x is"),
    (lambda: linear(X, T[:2], X), ValueError, "target: got shape [2], need [N] = [3]"),
    (lambda: linear(X, T, X, reduction="none"), ValueError, "reduction: got 'none', need 'mean' or 'sum'"),
    (lambda: linear(X, T, X, num_chunks=0), ValueError, "num_chunks: got 0, need at least 1"),
    (lambda: flashlin.FusedLinearCrossEntropyLoss()(X, T[:2], X), ValueError,
     "target: got shape [2], need x's without its last dimension, [3]"),
    (lambda: flashlin.FusedLinearCrossEntropyLoss(reduction="none"), ValueError,
     "reduction: got 'none', need 'mean' or 'sum'"),
])
def test_wrong_arguments_are_named(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_compiles_to_one_graph_for_all_numbers_of_rows() -> None:
    graphs = CompileCounterWithBackend("aot_eager")

    def both(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        plain = flashlin.FusedCrossEntropyLoss(**ALL)(x @ weight.t(), target)
        return plain + flashlin.FusedLinearCrossEntropyLoss()(x, target, weight)  # type: ignore[no-any-return]
    compiled = torch.compile(both, fullgraph=True, backend=graphs)
    weight = randn(9, 8, grad=True)
    for N in (3, 5, 9, 130):
        x = randn(N, 8, grad=True)
        found = [(total, *torch.autograd.grad(total, (x, weight)))
                 for total in (f(x, weight, targets(N, 9, 3)) for f in (compiled, both))]
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted)
    assert graphs.frame_count <= 2  # one for the first length, one for all other lengths


@pytest.mark.parametrize("module", [FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss])
def test_modules_compile_with_every_number_symbolic(module: type[torch.nn.Module]) -> None:
    """All sizes and the numbers that the module stores can be symbolic."""
    loss = module(label_smoothing=0.1, logit_scale=1.5)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for N, V in ((37, 100), (50, 64)):
        x, target = randn(N, V).requires_grad_(), targets(N, V, N)
        extra = (randn(V, V),) if module is FusedLinearCrossEntropyLoss else ()
        with torch._dynamo.config.patch(error_on_recompile=N == 50):
            found = [(total, *torch.autograd.grad(total, x))
                     for total in (call(x, target, *extra) for call in (compiled, loss))]
        torch.testing.assert_close(*found)


def test_compiled_calls_name_a_target_out_of_range() -> None:
    compiled = torch.compile(lambda x: flashlin.cross_entropy_loss(x, OUT)[0], fullgraph=True,
                             backend="aot_eager")
    with pytest.raises(ValueError,
                       match=r"cross_entropy_loss called at .*test_cross_entropy.py.*target: got 8 at "
                             r"position 1"):
        compiled(randn(4, 8))


@pytest.mark.parametrize("rows", [0, 1, 100, 10**7])
@pytest.mark.parametrize("V", [1, 3, 1000, 32000, 50257, 262144])
def test_no_size_needs_a_remedy_and_programs_cover_it(V: int, rows: int) -> None:
    planned = plan(Problem("cross_entropy_loss", "cross_entropy", "", 1, rows, 1, V, V, 1, "bfloat16", False,
                           True), H200)
    assert planned.path == "triton" and not planned.steps and not planned.refused
    forward, backward = planned.launches
    assert forward.grid[0] * forward.block("BT") >= rows
    assert backward.grid[0] == -(-rows // backward.block("BT")) * -(-V // backward.block("BV"))
