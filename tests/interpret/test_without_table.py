"""Backward gives the same bits whether it stores gradients of states in dq and dk or in a table.

This holds for any tiles of the kernels that store and load these gradients. Run with TRITON_INTERPRET=1.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels import scans
from flashlin.kernels.simple_gla import recipe
from flashlin.testing.compare import poisoned

CHOOSE = recipe._without_table


def tiled(launch: Launch, **tile: int) -> Launch:
    return launch._replace(tile=tuple((dict(launch.tile) | tile).items()))


@pytest.mark.parametrize(("dtype", "T", "K", "V", "BV", "side", "parts", "edges"), [
    (torch.float16, 192, 64, 128, 32, 64, 0, None), (torch.float16, 170, 128, 96, 64, 32, 0, None),
    (torch.float16, 192, 64, 72, 16, 16, 2, None), (torch.float32, 161, 64, 64, 32, 32, 3, None),
    (torch.float32, 64, 96, 24, 16, 32, 0, None),
    (torch.float16, 200, 64, 128, 64, 64, 0, [0, 0, 70, 134, 200]),
    (torch.float16, 270, 64, 96, 32, 64, 2, [0, 1, 270])])
@pytest.mark.alternate
def test_the_same_as_with_a_table(
    dtype: torch.dtype, T: int, K: int, V: int, BV: int, side: int, parts: int, edges: list[int] | None,
    monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None],
) -> None:
    B, bounds = (2, None) if edges is None else (1, torch.tensor(edges))
    monkeypatch.setattr(scans, "forced_parts", parts)
    made: list[bool] = []

    def gradients(table: bool) -> tuple[torch.Tensor, ...]:
        def chosen(problem: Problem, target: object, dv: Launch, grads: Launch) -> tuple[Launch, Launch]:
            both = tiled(dv, BV=BV), tiled(grads, BK=side)
            both = both if table else CHOOSE(problem, target, *both)
            made.append(all("SIDE" in dict(launch.tile) for launch in both))
            return both
        monkeypatch.setattr(recipe, "_without_table", chosen)
        fresh()
        generator = torch.Generator().manual_seed(0)
        q, k, v, do = (torch.randn(B, T, 2, D, generator=generator).to(dtype) for D in (K, K, V, V))
        g = F.logsigmoid(torch.randn(B, T, 2, generator=generator))
        x = [one.requires_grad_() for one in (q, k, v, g)]
        with poisoned():
            o, _ = flashlin.chunk_simple_gla(*x, cu_seqlens=bounds)
            return torch.autograd.grad(o, x, do)
    with_table, without = gradients(True), gradients(False)
    assert made[0] is False and made[-1] is True
    assert all(torch.equal(one, two) for one, two in zip(with_table, without, strict=True))
