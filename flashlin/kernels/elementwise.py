"""Helpers for recipes of kernels that multiply no matrices and are limited by memory.

Plain Python: this module imports neither torch nor triton.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashlin.guards.family import Sizes
from flashlin.guards.plan_types import Launch, Problem, traits_of


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def block(size: int, least: int = 1, most: int = 1 << 30) -> int:
    """Return the next power of two that is at least ``size``, clamped to least .. most (powers of two)."""
    return min(max(least, 1 << max(0, size - 1).bit_length()), most)


def moving(kernel: str, problem: Problem, programs: int, tile: dict[str, int], *, shared: int, span: int,
           num_warps: int = 4, num_stages: int = 1) -> Launch:
    """Return the launch of a kernel without matrix products, with this number of programs.

    shared: bytes of shared memory, an upper estimate. span: largest 32-bit offset, in elements.
    """
    # max_warps is 8 unless a remedy has lowered it. 8 is no limit for these kernels. Remedies lower it to
    # avoid certain matrix instructions. These kernels have none, but a lower limit applies to them as well.
    warps = num_warps if problem.max_warps >= 8 else min(num_warps, problem.max_warps)
    return Launch(kernel, (programs,), warps, num_stages, tuple(tile.items()), shared, span,
                  traits_of(problem))


def rows_of_heads(sizes: Sizes) -> Sizes:
    """Return sizes with one row for each token; a row has H heads of K columns."""
    return Sizes(T=sizes.B * sizes.T, H=sizes.H, K=sizes.K, V=sizes.K)


def heads_as_rows(sizes: Sizes) -> Sizes:
    """Return sizes with one row of K columns for each head of each token."""
    return Sizes(T=sizes.B * sizes.T * sizes.H, K=sizes.K, V=sizes.K)


def having(**fixed: Any) -> Callable[[Sizes], Sizes]:
    """Return a function that replaces the given fields of Sizes.

    Examples: H=1 for ops without heads, T=1 for decoding.
    """
    return lambda sizes: sizes._replace(**fixed)
