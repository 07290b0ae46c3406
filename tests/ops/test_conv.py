"""The short convolution: drop-in rules, exact error texts, the module, continued states, torch.compile.

tests/ops/test_cases.py compares its results with the reference.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.compat.target import parse
from flashlin.dispatch import plan
from flashlin.guards.plan_types import Problem
from flashlin.kernels.conv.reference import convolve
from flashlin.modules import ShortConvolution

X, W = torch.zeros(2, 5, 8), torch.zeros(8, 4)
EDGES = torch.tensor([0, 2, 5])


pytestmark = pytest.mark.usefixtures("torch_path")


def test_it_is_torchs_grouped_convolution() -> None:
    x, weight, bias = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(6)
    y, ht = flashlin.causal_conv1d(x, weight, bias, activation="swish")
    assert ht is None
    torch.testing.assert_close(y, F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], bias, groups=6)).mT)


@pytest.mark.parametrize("lengths", [(3, 4, 5), (1, 1, 1, 9), (12,), (0, 12, 0)], ids=str)
def test_a_state_continues(lengths: tuple[int, ...]) -> None:
    x, weight = torch.randn(2, 12, 6), torch.randn(6, 4)
    whole, last = flashlin.causal_conv1d(x, weight, output_final_state=True)
    state, parts = None, []
    for part in x.split(lengths, 1):
        y, state = flashlin.causal_conv1d(part, weight, initial_state=state, output_final_state=True)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)
    torch.testing.assert_close(last, x[:, -4:].mT)
    cache = torch.zeros(2, 6, 4)
    for t, token in enumerate(x.unbind(1)):  # the same token by token, with the cache updated in place
        y, _ = flashlin.causal_conv1d_update(token, cache, None, weight)
        torch.testing.assert_close(y, whole[:, t])
    torch.testing.assert_close(cache, last)


def test_wide_filters_take_the_torch_path_and_say_so() -> None:
    x, weight = torch.randn(2, 40, 3), torch.randn(3, 20)
    y, _ = flashlin.causal_conv1d(x, weight)
    torch.testing.assert_close(y, F.conv1d(F.pad(x.mT, (19, 0)), weight[:, None], groups=3).mT)
    asked = Problem("causal_conv1d", "conv", "", 2, 40, 1, 64, 17, 2, "bfloat16")
    found = plan(asked, parse("triton=3.6.0,sm=90"))
    assert found.path == "torch" and [reason.code for reason, _ in found.steps] == ["width"]
    assert plan(asked._replace(V=16), parse("triton=3.6.0,sm=90")).path == "triton"


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    state = torch.randn(shape[0], 8, 4, requires_grad=True)
    y, ht = flashlin.causal_conv1d(x, weight, None, x, state, True, "silu")
    assert y.shape == shape and ht is not None
    torch.testing.assert_close(ht, state)
    ht.sum().backward()
    assert state.grad is not None and (state.grad == 1).all()


def test_dtypes() -> None:
    x, weight = torch.randn(2, 5, 8, dtype=torch.bfloat16, requires_grad=True), torch.randn(8, 4,
                                                                                            requires_grad=True)
    y, ht = flashlin.causal_conv1d(x, weight, initial_state=torch.randn(2, 8, 4), output_final_state=True)
    assert ht is not None and (y.dtype, ht.dtype) == (torch.bfloat16, torch.bfloat16)
    y.float().sum().backward()
    assert x.grad is not None and weight.grad is not None and (x.grad.dtype,
                                                               weight.grad.dtype) == (torch.bfloat16,
                                                                                      torch.float32)


def test_gradcheck() -> None:
    x, r, w, b, h = (torch.randn(*shape, dtype=torch.float64, requires_grad=True)
                     for shape in ((1, 7, 2), (1, 7, 2), (2, 3), (2,), (3, 2, 3)))
    bounds = torch.tensor([0, 1, 1, 7])
    assert torch.autograd.gradcheck(lambda x, w, b, r, h: flashlin.causal_conv1d(x, w, b, r, h, True, "silu",
                                                                                 cu_seqlens=bounds), (x, w, b,
                                                                                                      r, h))


def test_rows_that_belong_to_nobody_hold_the_residual() -> None:
    from flashlin.kernels.conv import torch_path
    x, weight, bias, residual = torch.randn(1, 9, 4), torch.randn(4, 3), torch.randn(4), torch.randn(1, 9, 4)
    y, ht = torch_path.compute(x, weight, bias, residual, None, torch.tensor([2, 5, 7]), True)
    expected, state = convolve(x[:, 2:7], weight, bias, residual[:, 2:7], None, "silu",
                               torch.tensor([0, 3, 5]))
    torch.testing.assert_close(y[:, 2:7], expected.float())
    torch.testing.assert_close(ht, state.float())
    assert (y[:, :2] == residual[:, :2]).all() and (y[:, 7:] == residual[:, 7:]).all()


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: flashlin.causal_conv1d([1.0], W), TypeError, "x: got list, need a tensor of shape [B, T, D]"),
    (lambda: flashlin.causal_conv1d(X[0], W), ValueError,
     "x: got shape [5, 8], need [B, T, D] with D of at least 1"),
    (lambda: flashlin.causal_conv1d(X.long(), W), TypeError,
     "x: got dtype torch.int64, need bfloat16, float16, float32 or float64"),
    (lambda: flashlin.causal_conv1d(X), TypeError, "weight: got NoneType, need a tensor of shape [D, W]"),
    (lambda: flashlin.causal_conv1d(X, W[:7]), ValueError,
     "weight: got shape [7, 4], need [D, W] = [8, any]"),
    (lambda: flashlin.causal_conv1d(X, W[:, None]), ValueError,
     "weight: got shape [8, 1, 4], need [D, W] = [8, any]"),
    (lambda: flashlin.causal_conv1d(X, W[:, :0]), ValueError,
     "weight: got shape [8, 0], need [D, W] with W of at least 1"),
    (lambda: flashlin.causal_conv1d(X, W, X), ValueError, "bias: got shape [2, 5, 8], need [D] = [8]"),
    (lambda: flashlin.causal_conv1d(X, W, None, X[:, 1:]), ValueError,
     "residual: got shape [2, 4, 8], need x's shape = [2, 5, 8]"),
    (lambda: flashlin.causal_conv1d(X, W.to("meta")), ValueError,
     "weight: got device meta, need cpu, where x is"),
    (lambda: flashlin.causal_conv1d(X, W, initial_state=torch.zeros(2, 4, 8)), ValueError,
     "initial_state: got shape [2, 4, 8], need [N, D, W] = [2, 8, 4]"),
    (lambda: flashlin.causal_conv1d(X, W, activation="gelu"), ValueError,
     "activation: got 'gelu', need None, 'silu' or 'swish'"),
    (lambda: flashlin.causal_conv1d(X, W, backend="cudnn"), ValueError,
     "backend: got 'cudnn', need one of triton, mix, cuda"),
    (lambda: flashlin.causal_conv1d(X, W, cp_context=1), TypeError,
     "cp_context: got int without group, need what fla.ops.cp.build_cp_context makes (without fla: "
     "process_group=)"),
    (lambda: flashlin.causal_conv1d(X, W, seq_idx=1), TypeError,
     "causal_conv1d: got unexpected keyword seq_idx"),
    (lambda: flashlin.causal_conv1d(X, W, cu_seqlens=EDGES), ValueError,
     "x: The batch size is expected to be 1 rather than 2 when using `cu_seqlens`; pack the sequences along T"),
    (lambda: flashlin.causal_conv1d(X[:1], W, cu_seqlens=EDGES + 1), ValueError,
     "cu_seqlens: got a first value of 1, need 0"),
    (lambda: flashlin.causal_conv1d(X[:1], W, cu_seqlens=EDGES.to("meta")), ValueError,
     "cu_seqlens: got device meta, need cpu, where x is"),
    (lambda: flashlin.causal_conv1d(X[:1], W, cu_seqlens=EDGES, initial_state=torch.zeros(1, 8, 4)),
     ValueError, "initial_state: got shape [1, 8, 4], need [N, D, W] = [2, 8, 4]"),
    (lambda: flashlin.causal_conv1d(X[:1], W, cu_seqlens_cpu=EDGES), ValueError,
     "cu_seqlens_cpu: got a tensor without cu_seqlens, need both"),
    (lambda: flashlin.causal_conv1d_update(X, torch.zeros(2, 8, 4), None, W), ValueError,
     "x: got shape [2, 5, 8], need [N, D], [N, 1, D] or [1, N, D] with D of at least 1"),
    (lambda: flashlin.causal_conv1d_update(X[:, 0], torch.zeros(2, 8, 3), None, W), ValueError,
     "cache: got shape [2, 8, 3], need [N, D, W] = [2, 8, 4]"),
    (lambda: flashlin.causal_conv1d_update(X[:, 0], None, None, W), TypeError,
     "cache: got NoneType, need a tensor of shape [N, D, W]"),
    (lambda: flashlin.causal_conv1d_update(X[:, 0], torch.zeros(2, 8, 4), W), TypeError,
     "weight: got NoneType, need a tensor of shape [D, W]"),
    (lambda: flashlin.causal_conv1d_update(X[:, 0], torch.zeros(2, 8, 4, requires_grad=True), None, W),
     ValueError,
     "cache: got a tensor that requires a gradient, need one that does not: it is updated in place. "
     "causal_conv1d with initial_state=cache has the gradient"),
    (lambda: ShortConvolution(8, 4, activation="gelu"), ValueError,
     "activation: got 'gelu', need None, 'silu' or 'swish'"),
    (lambda: ShortConvolution(8, 4, kernel=3), TypeError,
     "ShortConvolution: got unexpected keyword kernel; did you mean kernel_size?"),
    (lambda: ShortConvolution(8, 4)(X, mask=torch.ones(2, 4)), ValueError,
     "mask: got shape [2, 4], need [B, T] = [2, 5]"),
    (lambda: ShortConvolution(8, 4)(X[:1], mask=torch.ones(1, 5), cu_seqlens=EDGES), ValueError,
     "mask: got one with cu_seqlens; `mask` and `cu_seqlens` cannot be provided at the same time"),
])
def test_wrong_arguments_are_named(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize("shape", [(3, 8), (3, 1, 8), (1, 3, 8)], ids=str)
def test_an_update_is_in_place_and_leaves_x_alone(shape: tuple[int, ...]) -> None:
    x, cache, weight, residual = torch.randn(shape), torch.randn(4, 3, 8).permute(1, 2, 0), torch.randn(8,
                                                                                                        4), torch.randn(shape)
    x_before, before = x.clone(), cache.clone()
    y, returned = flashlin.causal_conv1d_update(x, cache, residual, weight, activation="silu")
    assert returned is cache and y.shape == x.shape and (x == x_before).all()
    torch.testing.assert_close(cache, torch.cat([before[..., 1:], x.view(3, 8, 1)], -1))
    torch.testing.assert_close(y, F.silu((cache * weight).sum(-1)).view(shape) + residual)


def test_an_update_has_gradients_and_its_cache_none() -> None:
    x, weight, cache = torch.randn(3, 8, requires_grad=True), torch.randn(8, 4,
                                                                          requires_grad=True), torch.randn(3,
                                                                                                           8,
                                                                                                           4)
    before = cache.clone()
    y, _ = flashlin.causal_conv1d_update(x, cache, None, weight)
    y.sum().backward()
    assert not cache.requires_grad and x.grad is not None and weight.grad is not None
    torch.testing.assert_close(x.grad, weight[:, -1].detach().expand(3, 8))
    torch.testing.assert_close(weight.grad, torch.cat([before[..., 1:], x.detach()[..., None]], -1).sum(0))


def test_the_module_is_torchs_conv1d_with_its_state_dict() -> None:
    made = ShortConvolution(6, 4, bias=True)
    assert list(made.state_dict()) == ["weight", "bias"] and made.weight.shape == (6, 1,
                                                                                   4) and made.state_size == 24
    assert repr(made) == "ShortConvolution(6, kernel_size=4, bias=True, activation=silu)"
    plain = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3)
    made.load_state_dict(plain.state_dict())
    x = torch.randn(2, 9, 6)
    y, state = made(x)
    assert state is None
    torch.testing.assert_close(y, F.silu(plain(x.mT)[..., :9]).mT)
    with pytest.warns(DeprecationWarning, match="use_fast_conv1d"):
        ShortConvolution(6, 4, use_fast_conv1d=True)


def test_the_modules_mask_leaves_x_alone() -> None:
    made, x, mask = ShortConvolution(6, 4), torch.randn(2, 9, 6), torch.ones(2, 9)
    mask[0, :3] = 0
    before = x.clone()
    y, _ = made(x, mask=mask)
    assert (x == before).all()
    torch.testing.assert_close(y, made(x * mask[..., None])[0])


def test_the_modules_decoding() -> None:
    made, cache = ShortConvolution(6, 4), torch.randn(3, 6, 4)
    x = torch.randn(3, 1, 6)
    # a call with gradients does not change the cache
    expected, state = made(x, cache=cache, output_final_state=True)
    assert (state != cache).any() and expected.requires_grad
    with torch.no_grad():
        ours = cache.clone()
        y, returned = made(x, cache=ours, output_final_state=True)
        assert returned is ours
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(ours, state)
        assert made(x)[1] is None and made(x, output_final_state=True)[1].shape == (3, 6, 4)
        packed = cache.clone()
        y, _ = made(x.view(1, 3, 6), cache=packed, cu_seqlens=torch.arange(4))
        torch.testing.assert_close(y.view(3, 1, 6), expected)
        torch.testing.assert_close(packed, state)


def test_as_many_packed_tokens_as_sequences_are_not_one_each() -> None:
    made, cache, x = ShortConvolution(6, 4), torch.randn(2, 6, 4), torch.randn(1, 2, 6)
    bounds = torch.tensor([0, 0, 2])
    before = cache.clone()
    with torch.no_grad():
        y, state = made(x, cache=cache, output_final_state=True, cu_seqlens=bounds)
    expected, expected_state = convolve(x, made.weight[:, 0], None, None, before, "silu", bounds)
    torch.testing.assert_close(y, expected.float())
    torch.testing.assert_close(state, expected_state.float())
    assert (cache == before).all()


def test_compiles_to_one_graph_for_all_lengths() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    graphs = CompileCounterWithBackend("aot_eager")

    def call(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> Any:
        return flashlin.causal_conv1d(x, weight, None, x, state, True, "silu")
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for T in (9, 20, 33):
        tensors = [torch.randn(*shape, requires_grad=True) for shape in ((2, T, 8), (8, 4), (2, 8, 4))]
        found = []
        for function in (compiled, call):
            y, ht = function(*tensors)
            found.append([y, ht, *torch.autograd.grad(y.sin().sum() + ht.sin().sum(), tensors)])
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted)
    assert graphs.frame_count <= 2


def test_strided_rows_are_not_copied() -> None:
    from flashlin.ops.conv import evenly_spaced
    qkv = torch.zeros(2, 5, 24)
    for x in (qkv[..., 8:16], qkv[:1, 1:, :8], qkv[:, 2:3, :8], qkv):
        assert evenly_spaced(x) is x
    for x in (qkv[:, 1:, :8], qkv[..., ::3], torch.zeros(2, 8, 5).mT):
        assert evenly_spaced(x) is not x and evenly_spaced(x).is_contiguous()
