"""Triton's interpreter with the faster functions of tests/interpret/__init__.py."""
from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

LAST = 2 ** 31 - 1


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def arithmetic(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    one = tl.load(x + at)
    tl.store(y + at, doubled(one) - (one * 3 + at).to(one.dtype))


@triton.jit
def overflowing(x, y, WAY: tl.constexpr):
    at = tl.arange(0, 4)
    n = tl.load(x + at)
    if WAY == "add":
        n = n + n
    if WAY == "sub":
        n = (-n - 1) - n
    if WAY == "mul":
        n = n * n
    if WAY == "none":
        n = n - at
    tl.store(y + at, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8])
def test_numbers_of_every_kind_and_a_function_inside(dtype: torch.dtype) -> None:
    x, y = torch.tensor([0, 1, 5, 7]).to(dtype), torch.empty(4, dtype=torch.int64)
    arithmetic[(1,)](x, y, 4)
    assert torch.equal(y, -x.long() - torch.arange(4))


@pytest.mark.parametrize("way", ["add", "sub", "mul"])
def test_an_integer_that_does_not_fit_is_an_error(way: str) -> None:
    x = torch.tensor([0, 1, LAST, 3], dtype=torch.int32)
    with pytest.raises(Exception, match=f"int32 overflow detected for operation {way}"):
        overflowing[(1,)](x, torch.empty_like(x), way)


def test_one_that_fits_is_not() -> None:
    x, y = torch.tensor([0, 1, LAST, 3], dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    overflowing[(1,)](x, y, "none")
    assert y.tolist() == [0, 0, LAST - 2, 0]
    long = x.long()
    overflowing[(1,)](long, long, "mul")
    assert long[2] == LAST ** 2
