"""A user's kernels through shield in Triton's interpreter.

Run with TRITON_INTERPRET=1, see test_cases.py.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton

import flashlin
from flashlin.shielding import function as functions
from flashlin.shielding import launcher as shielding
from tests import foreign

B, H, T = 5, 2, 20


@pytest.fixture
def small_grids(axis_limits: Callable[..., None]) -> Iterator[None]:
    """Limit grid axes 1 and 2 to 4 programs, so that 5 sequences of 2 heads are too many."""
    axis_limits(2**31 - 1, 4, 4)
    yield
    functions._launchers.clear()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the grids of all launches that the interpreter runs."""
    from triton.runtime.interpreter import GridExecutor
    seen: list[tuple[int, ...]] = []
    execute = GridExecutor.__call__

    def noting(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(() if callable(executor.grid) else tuple(executor.grid))
        return execute(executor, *args, **kwargs)
    monkeypatch.setattr(GridExecutor, "__call__", noting)
    return seen


def grid(meta: dict[str, Any]) -> tuple[int, int]:
    return triton.cdiv(meta["T"], meta["BT"]), meta["B"] * meta["H"]


def twice(x: torch.Tensor, kernel: Any = foreign.scaled) -> torch.Tensor:
    """A function in the style of users: 2 x + 1 of [B, H, T]."""
    o = torch.full_like(x, float("nan"))
    kernel[grid](x, o, x.shape[2], x.shape[0], H=x.shape[1], BT=16)
    return o


def test_a_grid_in_parts_gives_the_whole_result(small_grids: None, starts: list[tuple[int, ...]]) -> None:
    x = torch.randn(B, H, T)
    shielded = flashlin.shield(foreign.scaled, batch={"x": 0, "o": 0}, batch_axis=1, batch_size="B")
    assert torch.equal(twice(x, shielded), 2 * x + 1)
    assert starts == [(2, 4), (2, 4), (2, 2)]


def test_without_a_declaration_it_is_refused_and_nothing_starts(small_grids: None,
                                                                starts: list[tuple[int, ...]]) -> None:
    with pytest.raises(flashlin.UnsupportedError, match="10 programs on grid axis 1, need at most 4"):
        twice(torch.randn(B, H, T), flashlin.shield(foreign.scaled))
    assert not starts


def test_a_tuner_and_heuristics_keep_working_around_the_parts(small_grids: None,
                                                              starts: list[tuple[int, ...]]) -> None:
    asked = []

    def timer(call: Any, quantiles: Any) -> list[float]:
        call()
        asked.append(starts[-1])
        return [float(len(asked))] * 3
    tuned = flashlin.autotune([triton.Config({"BT": 16}), triton.Config({"BT": 32})], ["T"], do_bench=timer)(
        triton.heuristics({"H": lambda given: given["x"].shape[1]})(foreign.scaled))
    x, o = torch.randn(B, H, T), torch.zeros(B, H, T)
    shielded = flashlin.shield(tuned, batch={"x": 0, "o": 0}, batch_axis=1, batch_size="B")
    shielded[grid](x, o, T, B)
    assert torch.equal(o, 2 * x + 1) and asked == [(2, 2), (1, 2)] and starts[-3:] == [(2, 4), (2, 4), (2, 2)]


def test_bf16_goes_by_way_of_fp32_copies() -> None:
    x = torch.randn(B, H, T).bfloat16()
    with pytest.warns(UserWarning, match="scaled runs on fp32 copies here. interpreter-bf16"):
        found = twice(x, flashlin.shield(foreign.scaled, outputs=["o"]))
    assert torch.equal(found, (2 * x.float() + 1).bfloat16())


# --- functions ---

class Twice(torch.autograd.Function):
    """The function ``twice`` as an autograd function, whose backward also uses the kernel."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return twice(x)

    @staticmethod
    def backward(context: Any, do: torch.Tensor) -> torch.Tensor:
        return twice(do.contiguous()) - 1


def layer(x: torch.Tensor, other: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
    return Twice.apply(x * 3) * 1, {"sum": x.sum((1, 2)), "other": other}


def test_launches_inside_a_function_are_planned_and_it_runs_in_parts(small_grids: None,
                                                                     starts: list[tuple[int, ...]]) -> None:
    x = torch.randn(B, H, T, requires_grad=True)
    calls: list[int] = []

    def counted(x: torch.Tensor) -> Any:
        calls.append(x.shape[0])
        return layer(x)
    shielded = flashlin.shield(counted, batch={"x": 0})
    for tried in ([5, 3, 2, 2, 1], [2, 2, 1]):  # the result of the first call is cached
        del starts[:], calls[:]
        o, rest = shielded(x)
        assert calls == tried
        assert starts == [(2, 4), (2, 4), (2, 2)]
        torch.testing.assert_close(o, 6 * x + 1)
        torch.testing.assert_close(rest["sum"], x.sum((1, 2)))
        assert rest["other"] is None
        grad, = torch.autograd.grad(o.sum(), x)
        torch.testing.assert_close(grad, torch.full_like(x, 6))
    assert shielded.__name__ == "counted" and twice(
        x.detach()).isnan().sum() == 0, "outside of it nothing has changed"


def test_backward_inside_a_function_is_planned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []
    monkeypatch.setattr(shielding, "planned",
                        lambda problem, device, plan=shielding.planned: planned.append(
                            str(problem.given.launch.grid))
                        or plan(problem, device))
    functions._launchers.clear()
    x = torch.randn(1, 1, T, requires_grad=True)
    before = (x * 1).requires_grad_()
    o, _ = flashlin.shield(layer)(before)
    assert planned == ["(2, 1)"]
    functions._launchers.clear()
    (o * 2).sum().backward()
    assert planned == ["(2, 1)"] * 2
    torch.testing.assert_close(x.grad, torch.full_like(x, 12))
    functions._launchers.clear()
    twice(x.detach())
    assert len(planned) == 2 and functions._inside.depth == 0


def test_a_function_whose_batch_is_undeclared_is_refused(small_grids: None) -> None:
    with pytest.raises(flashlin.UnsupportedError, match="10 programs on grid axis 1"):
        flashlin.shield(layer)(torch.randn(B, H, T))


def test_a_function_must_return_the_batch_first(small_grids: None) -> None:
    with pytest.raises(ValueError,
                       match=r"<lambda>: returns a tensor of shape \(20, 2, 2\) for a batch of 2, need the "
                             r"batch first"):
        flashlin.shield(lambda x: twice(x).transpose(0, 2), batch={"x": 0})(torch.randn(B, H, T))
    with pytest.raises(ValueError, match="y: got 4 elements in dimension 0, need the batch of 3"):
        flashlin.shield(lambda x, y: x, batch={"x": 0, "y": 0})(torch.zeros(3), torch.zeros(4))


def test_a_tuner_inside_a_function_is_the_fixed_one(starts: list[tuple[int, ...]]) -> None:
    def timer(call: Any, quantiles: Any = None) -> list[float]:
        call()
        return [1.0] * 3
    bad = triton.Config({"BT": 16}, pre_hook=lambda given: 1 / 0)
    tuned = triton.autotune([bad, triton.Config({"BT": 32})], ["T"], do_bench=timer)(foreign.scaled)

    def tuned_twice(x: torch.Tensor) -> torch.Tensor:
        o = torch.zeros_like(x)
        tuned[grid](x, o, T, B, H=H)
        return o
    x = torch.randn(B, H, T)
    with pytest.raises(ZeroDivisionError):
        tuned_twice(x)
    with pytest.warns(UserWarning, match="BT: 16.* fails .ZeroDivisionError"):
        assert torch.equal(flashlin.shield(tuned_twice)(x), 2 * x + 1)
    with pytest.raises(ZeroDivisionError):
        tuned.cache.clear(), tuned_twice(x)
