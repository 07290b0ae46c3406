"""What the recipes share whose kernels multiply no matrices and only move memory. Plain Python: no tensor, no
torch, no triton."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashlin.guards.family import Sizes
from flashlin.guards.plan_types import Launch, Problem, traits_of


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def block(size: int, least: int = 1, most: int = 1 << 30) -> int:
    """The power of two that holds ``size``, within least .. most, which are powers of two."""
    return min(max(least, 1 << max(0, size - 1).bit_length()), most)


def moving(kernel: str, problem: Problem, programs: int, tile: dict[str, int], *, shared: int, span: int,
           num_warps: int = 4, num_stages: int = 1) -> Launch:
    """The launch of so many programs. shared, span: as in a Launch."""
    # Limits on warps are about matrix instructions, of which there are none here: 8, where every problem
    # starts, is none.
    warps = num_warps if problem.max_warps >= 8 else min(num_warps, problem.max_warps)
    return Launch(kernel, (programs,), warps, num_stages, tuple(tile.items()), shared, span,
                  traits_of(problem))


def rows_of_heads(sizes: Sizes) -> Sizes:
    """A row for each token, of H heads of K columns."""
    return Sizes(T=sizes.B * sizes.T, H=sizes.H, K=sizes.K, V=sizes.K)


def heads_as_rows(sizes: Sizes) -> Sizes:
    """A row of K columns for each head of each token."""
    return Sizes(T=sizes.B * sizes.T * sizes.H, K=sizes.K, V=sizes.K)


def having(**fixed: Any) -> Callable[[Sizes], Sizes]:
    """Return what makes these sizes out of all others: H=1 of tokens without heads, T=1 of decoding."""
    def counted(sizes: Sizes) -> Sizes:
        return sizes._replace(**fixed)
    return counted
