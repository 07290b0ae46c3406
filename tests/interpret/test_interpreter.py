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


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def last_of_largest(x, i, y, j):
    right = (y > x) | ((y == x) & (j > i))
    return tl.where(right, y, x), tl.where(right, j, i)


@triton.jit
def reducing(x, most, value, place, AXIS: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tile = tl.load(x + at)
    best, where = tl.reduce((tile, at), AXIS, last_of_largest)
    to = tl.arange(0, 4 if AXIS else 8)
    tl.store(most + to, tl.reduce(tile, AXIS, larger))
    tl.store(most + 8, tl.reduce(tl.load(x + to), 0, larger))
    tl.store(value + to, best)
    tl.store(place + to, where)


@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_with_own_functions(axis: int) -> None:
    """NaN stays NaN, and a function of two numbers finds the last of several equal maxima."""
    torch.manual_seed(0)
    x = torch.randint(0, 5, (4, 8)).float()
    most, value, place = torch.empty(9), torch.empty(8), torch.empty(8, dtype=torch.int32)
    reducing[(1,)](x, most, value, place, axis)
    best = x.amax(axis)
    last = torch.where(x == best.unsqueeze(axis), torch.arange(32).view(4, 8), -1).amax(axis)
    assert torch.equal(most[:len(best)], best) and most[8] == x[0, :len(best)].max()
    assert torch.equal(value[:len(best)], best) and torch.equal(place[:len(best)], last.int())
    x[2, 5] = torch.nan
    reducing[(1,)](x, most, value, place, axis)
    assert torch.equal(most[:len(best)].isnan(), x.isnan().any(axis))


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
