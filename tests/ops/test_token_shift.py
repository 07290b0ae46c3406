"""The token shift: drop-in rules, caches, exact error texts and torch.compile.

It runs the kernels of the short convolution.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlin
from flashlin.compat.target import parse
from flashlin.kernels.conv.reference import shift
from flashlin.testing.cases.conv import CASES
from flashlin.testing.compare import Case, check

CPU = torch.device("cpu")
SHIFTS = [case for case in CASES if case.op == "token_shift"]


def tensor_of(found: Any) -> torch.Tensor:
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("case", SHIFTS, ids=str)
def test_torch_path_is_the_reference_in_float64(case: Case) -> None:
    assert all(verdict.ok for verdict in check(case, CPU, torch.float64))


def test_without_output_cache_there_is_one_result() -> None:
    x = torch.randn(2, 5, 4)
    y = tensor_of(flashlin.token_shift(x))
    torch.testing.assert_close(y, torch.cat([torch.zeros(2, 1, 4), x[:, :-1]], 1) - x, rtol=0, atol=0)
    with_cache, last = flashlin.token_shift(x, None, None, True)
    assert torch.equal(with_cache, y) and torch.equal(last, x[:, -1]) and last.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_differences_are_rounded_once(dtype: torch.dtype) -> None:
    x, cache = torch.randn(2, 9, 6).to(dtype), torch.randn(2, 6).to(dtype)
    y, last = flashlin.token_shift(x, cache=cache, output_cache=True)
    assert y.dtype == last.dtype == dtype
    torch.testing.assert_close(y, torch.cat([cache[:, None], x[:, :-1]], 1) - x, rtol=0, atol=0)


def test_token_by_token_is_the_whole() -> None:
    x = torch.randn(3, 7, 4)
    whole, cache, parts = tensor_of(flashlin.token_shift(x)), None, []
    for t in range(7):
        y, cache = flashlin.token_shift(x[:, t:t + 1], cache=cache, output_cache=True)
        parts.append(y)
    assert torch.equal(torch.cat(parts, 1), whole)


def test_decoding_packed_sequences_of_one_token_each() -> None:
    """Packed sequences of one token each update one cache row per sequence.

    fla treated such a call as a batch without packing.
    """
    x, cache, table = torch.randn(1, 3, 4), torch.randn(4, 4), torch.tensor([0, 1, 2, 2, 3])
    y, last = flashlin.token_shift(x, table, cache, True)
    torch.testing.assert_close(y[0], cache[[0, 1, 3]] - x[0])
    torch.testing.assert_close(last, torch.stack([x[0, 0], x[0, 1], cache[2], x[0, 2]]))


def test_gradients_are_those_of_differences_of_both_outputs() -> None:
    x, cache = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True), torch.randn(3, 3,
                                                                                          dtype=torch.float64,
                                                                                          requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, cache: flashlin.token_shift(x, torch.tensor([0, 2, 2, 6]),
                                                                          cache, True), (x, cache))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)], ids=str)
def test_nothing_to_shift(shape: tuple[int, ...]) -> None:
    x, cache = torch.randn(shape, requires_grad=True), torch.randn(shape[0], 4, requires_grad=True)
    y, last = flashlin.token_shift(x, cache=cache, output_cache=True)
    assert y.shape == shape and torch.equal(last, cache if shape[1] == 0 else torch.zeros(0, 4))
    (y.sum() + last.sum()).backward()
    assert x.grad is not None and cache.grad is not None and bool((cache.grad == 1).all())


X = torch.zeros(1, 6, 4)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: flashlin.token_shift(None), TypeError, "x: got NoneType, need a tensor of shape [B, T, D]"),
    (lambda: flashlin.token_shift(X[0]), ValueError,
     "x: got shape [6, 4], need [B, T, D] with at least 1 column"),
    (lambda: flashlin.token_shift(X.long()), TypeError,
     "x: got dtype torch.int64, need bfloat16, float16, float32 or float64"),
    (lambda: flashlin.token_shift(X, cache=X[0]), ValueError,
     "cache: got shape [6, 4], need [N, D] = [1, 4]"),
    (lambda: flashlin.token_shift(X, torch.tensor([0, 2, 6]), X[0, :1]), ValueError,
     "cache: got shape [1, 4], need [N, D] = [2, 4]"),
    (lambda: flashlin.token_shift(X, cache=torch.zeros(1, 4, device="meta")), ValueError,
     "cache: got device meta, need cpu, where x is"),
    (lambda: flashlin.token_shift(X, torch.tensor([0, 2, 5])), ValueError,
     "cu_seqlens: got a last value of 5, need T = 6: sequences must cover the packed tensor"),
    (lambda: flashlin.token_shift(X.expand(2, 6, 4), torch.tensor([0, 6])), ValueError,
     "x: The batch size is expected to be 1 rather than 2 when using `cu_seqlens`; pack the sequences along T"),
])
def test_wrong_arguments_are_named(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize("table", [None, [0, 1, 1, 3]], ids=["dense", "packed"])
def test_compiles_to_one_graph_for_all_lengths(table: list[int] | None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flashlin.token_shift, fullgraph=True, backend=graphs)
    for T in (3, 5, 9, 13):
        bounds = None if table is None else torch.tensor([*table[:-1], T])
        x, cache = torch.randn(1, T, 4, requires_grad=True), torch.randn(1 if table is None else 3, 4,
                                                                         requires_grad=True)
        y, last = compiled(x, bounds, cache, True)
        expected, expected_last = shift(x, cache, bounds)
        torch.testing.assert_close(y.double(), expected)
        torch.testing.assert_close(last.double(), expected_last)
        dy = torch.randn(1, T, 4)
        for got, wanted in zip(torch.autograd.grad(y, (x, cache), dy),
                               torch.autograd.grad(expected, (x, cache), dy.double()), strict=True):
            torch.testing.assert_close(got, wanted)
    assert graphs.frame_count <= 2  # one for the first length, one for all other lengths


def test_a_shift_starts_what_it_plans() -> None:
    """A token shift launches exactly its planned kernels.

    There is no kernel for the gradient of the filters, because they are fixed.
    """
    from matrix import workload
    for call in workload.calls():
        if call.op == "token_shift":
            seen = workload.seen(call, parse("triton=3.6.0,sm=90"))
            planned = {launch.kernel for plan in seen.plans for launch in plan.launches}
            assert planned == {launch.kernel
                               for launch in seen.launches} and "conv_backward_weights" not in planned
    assert "conv_backward_weights" not in flashlin.explain("token_shift", target="triton=3.6.0,sm=90")
