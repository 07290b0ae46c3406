"""The kernels of gated linear attention in Triton's interpreter, beyond their cases.

The tests cover batches in slices, rows of no sequence, and the library operator.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.gla.reference import recurrence
from flashlin.testing.compare import judge, poisoned


def leaves(B: int, T: int, N: int, H: int = 2, K: int = 16, V: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D) for D in (K, K, V))
    return [x.requires_grad_()
            for x in (q, k, v, F.logsigmoid(torch.randn(B, T, H, K)), torch.randn(N, H, K, V))]


def results(tensors: list[torch.Tensor], bounds: torch.Tensor | None = None, call: Any = None,
            **extra: Any) -> list[torch.Tensor]:
    q, k, v, g, h0 = tensors
    with poisoned():
        o, ht = (call or flashlin.chunk_gla)(q, k, v, g, initial_state=h0, output_final_state=True,
                                             cu_seqlens=bounds, **extra)
        return [o, ht, *torch.autograd.grad(o.sin().sum() + ht.sin().sum(), tensors)]


def expected(tensors: list[torch.Tensor], bounds: torch.Tensor | None = None,
             scale: float | None = None) -> list[torch.Tensor]:
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    q, k, v, g, h0 = doubles
    o, ht = recurrence(q, k, v, g, h0=h0, bounds=bounds,
                       scale=q.shape[3] ** -0.5 if scale is None else scale)
    return [o, ht, *torch.autograd.grad(o.sin().sum() + ht.sin().sum(), doubles)]


NAMES = ("o", "ht", "dq", "dk", "dv", "dg", "dh0")


def assert_right(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [verdict
            for name, x, y in zip(NAMES, got, wanted, strict=True)
            if not (verdict := judge(name, x, y, 2e-5)).ok] == []


@pytest.mark.parametrize("edges", [None, [0, 20, 20, 37, 70]], ids=["dense", "packed"])
def test_a_batch_in_parts_equals_the_whole(edges: list[int] | None, axis_limits: Callable[..., None]) -> None:
    tensors = leaves(3, 37, 3) if edges is None else leaves(1, 70, 4)
    bounds = None if edges is None else torch.tensor(edges)
    whole = results(tensors, bounds)
    axis_limits(8, 1, 1)
    for got, wanted in zip(results(tensors, bounds), whole, strict=True):
        assert torch.equal(got, wanted)
    assert_right(whole, expected(tensors, bounds))


def test_rows_of_no_sequence_are_exact_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    # as on a GPU, where the host does not read the values of cu_seqlens
    monkeypatch.setattr("flashlin.guards.tensors.check_bounds", lambda edges, T: None)
    tensors, bounds = leaves(1, 40, 2), torch.tensor([3, 20, 33])
    o, ht, *grads = results(tensors, bounds)
    for x in (o, *grads[:4]):
        assert not x[:, :3].any() and not x[:, 33:].any() and x[:, 3:33].any()
    assert_right([o, ht, *grads], expected(tensors, bounds))


def test_a_row_before_a_sequence_is_not_its_own() -> None:
    """The gate's gradient in the first row of a sequence adds nothing of the row above."""
    tensors = leaves(1, 41, 2)
    with torch.no_grad():
        tensors[1][:, 19] *= 1e6
    apart = [results([x[:, :20] if n < 4 else x[:1] for n, x in enumerate(tensors)]),
             results([x[:, 20:] if n < 4 else x[1:] for n, x in enumerate(tensors)])]
    whole = results(tensors, torch.tensor([0, 20, 41]))
    for n in (0, 2, 3, 4, 5):
        torch.testing.assert_close(whole[n][:, 20:], apart[1][n], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_any_scale(scale: float) -> None:
    tensors = leaves(1, 20, 1)
    assert_right(results(tensors, scale=scale), expected(tensors, scale=scale))


@pytest.mark.parametrize("edges", [None, [0, 33, 70]], ids=["dense", "packed"])
def test_forgetting_everything(edges: list[int] | None) -> None:
    """A gate of -inf cuts the sequence. Later tokens give the same results alone, and no gradient is NaN."""
    tensors = leaves(1, 70, 1 if edges is None else 2)
    bounds = None if edges is None else torch.tensor(edges)
    with torch.no_grad():
        tensors[3][:, 40] = -torch.inf
        tensors[3][:, 12, :, ::3] = -torch.inf
    got = results(tensors, bounds)
    wanted = expected(tensors, bounds)
    assert_right(got, wanted)


@pytest.mark.parametrize("which", [0, 1], ids=["output", "state"])
def test_gradients_of_one_of_both(which: int) -> None:
    tensors = leaves(1, 37, 1)
    q, k, v, g, h0 = tensors
    with poisoned():
        found = flashlin.chunk_gla(q, k, v, g, initial_state=h0, output_final_state=True)[which]
        grads = torch.autograd.grad(found.sin().sum(), tensors, allow_unused=True, materialize_grads=True)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    reference = recurrence(*doubles[:4], h0=doubles[4], scale=0.25)[which]
    wanted = torch.autograd.grad(reference.sin().sum(), doubles, allow_unused=True, materialize_grads=True)
    assert [verdict
            for name, x, y in zip(NAMES[2:], grads, wanted, strict=True)
            if not (verdict := judge(name, x, y, 2e-5)).ok] == []


def test_nothing_to_do() -> None:
    for facts in ({"B": 0, "T": 5, "N": 0}, {"B": 2, "T": 0, "N": 2}, {"B": 2, "T": 5, "N": 2, "H": 0}):
        tensors = leaves(**facts)
        o, ht, *grads = results(tensors)
        assert o.shape == tensors[2].shape and torch.equal(ht,
                                                           tensors[4]) and not any(grad.any()
                                                                                   for grad in grads[:4])
        assert torch.equal(grads[4], tensors[4].cos())


def test_lengths_share_a_graph() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flashlin.chunk_gla, fullgraph=True, backend=graphs)
    for T in (20, 33, 7):
        tensors = leaves(2, T, 2)
        for got, wanted in zip(results(tensors, call=compiled), results(tensors), strict=True):
            torch.testing.assert_close(got, wanted)
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.alternate
def test_the_library_operators(state: bool) -> None:
    q, k, v, g, h0 = leaves(1, 9, 1)
    how = (0.25, state, False, torch.float32, "chunk", True, "chunk_gla")
    torch.library.opcheck(torch.ops.flashlin.gla.default,
                          (q, k, v, g, None, h0 if state else None, None, *how))
    with torch.no_grad():
        torch.library.opcheck(torch.ops.flashlin.gla_backward.default, (
            q, k, v, g, None, h0 if state else None, None, None, None, torch.ones_like(v),
            h0 * 2 if state else None, *how, "q k v g h0" if state else "q k v g"))
