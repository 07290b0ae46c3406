"""RWKV-6 on the kernels of gated linear attention in Triton's interpreter, beyond its cases.

The tests cover the strongest decays, batches in slices, rows of no sequence, and the library operator.
test_gla.py tests everything that it shares with gated linear attention.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.gla.reference import recurrence
from flashlin.testing.compare import judge, poisoned
from tests import strong


def leaves(B: int, T: int, N: int, H: int = 2, K: int = 16, V: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    r, k, v = (torch.randn(B, T, H, D) for D in (K, K, V))
    return [x.requires_grad_()
            for x in (r, k, v, F.logsigmoid(torch.randn(B, T, H, K)), torch.randn(H, K),
                      torch.randn(N, H, K, V))]


def results(tensors: list[torch.Tensor], bounds: torch.Tensor | None = None) -> list[torch.Tensor]:
    with poisoned():
        o, ht = flashlin.chunk_rwkv6(*tensors[:5], None, tensors[5], True, bounds)
        return [o, ht, *torch.autograd.grad(o.sin().sum() + ht.sin().sum(), tensors)]


def expected(tensors: list[torch.Tensor], bounds: torch.Tensor | None = None) -> list[torch.Tensor]:
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    o, ht = recurrence(*doubles[:4], u=doubles[4], h0=doubles[5], bounds=bounds,
                       scale=doubles[0].shape[3] ** -0.5)
    return [o, ht, *torch.autograd.grad(o.sin().sum() + ht.sin().sum(), doubles)]


NAMES = ("o", "ht", "dr", "dk", "dv", "dw", "du", "dh0")


def assert_right(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [verdict
            for name, x, y in zip(NAMES, got, wanted, strict=True)
            if not (verdict := judge(name, x, y, 2e-5)).ok] == []


@pytest.mark.parametrize("op", strong.OPS)
def test_no_decay_is_too_strong(op: str) -> None:
    assert strong.failures(op, torch.device("cpu"), torch.float32, T=75, K=16, V=16, H=1) == []


@pytest.mark.parametrize("edges", [None, [0, 20, 20, 37, 70]], ids=["dense", "packed"])
def test_a_batch_in_parts_equals_the_whole(edges: list[int] | None, axis_limits: Callable[..., None]) -> None:
    """A batch in slices gives the results of one launch, to the bit except for du.

    du, the gradient of the bonus, is a sum over the batch, which slices round once more.
    """
    tensors = leaves(3, 37, 3) if edges is None else leaves(1, 70, 4)
    bounds = None if edges is None else torch.tensor(edges)
    whole = results(tensors, bounds)
    axis_limits(8, 1, 1)
    for name, got, wanted in zip(NAMES, results(tensors, bounds), whole, strict=True):
        assert torch.equal(got, wanted) if name != "du" else torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert_right(whole, expected(tensors, bounds))


def test_rows_of_no_sequence_are_exact_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    # as on a GPU, where the host does not read the values of cu_seqlens
    monkeypatch.setattr("flashlin.guards.tensors.check_bounds", lambda edges, T: None)
    tensors, bounds = leaves(1, 40, 2), torch.tensor([3, 20, 33])
    found = results(tensors, bounds)
    for x in (found[0], *found[2:6]):
        assert not x[:, :3].any() and not x[:, 33:].any() and x[:, 3:33].any()
    assert_right(found, expected(tensors, bounds))


def test_neighbours_of_another_sequence_are_not_read() -> None:
    tensors = leaves(1, 41, 2)
    with torch.no_grad():
        tensors[1][:, 19] *= 1e6
        tensors[0][:, 20] *= 1e6
    whole = results(tensors, torch.tensor([0, 20, 41]))
    for rows, n in ((slice(0, 20), 0), (slice(20, 41), 1)):
        alone = results([x[:, rows] for x in tensors[:4]] + [tensors[4], tensors[5][n:n + 1]])
        for i in (0, 2, 3, 4, 5):
            assert torch.equal(whole[i][:, rows], alone[i])


@pytest.mark.parametrize("edges", [None, [0, 33, 70]], ids=["dense", "packed"])
def test_forgetting_everything(edges: list[int] | None) -> None:
    tensors = leaves(1, 70, 1 if edges is None else 2)
    bounds = None if edges is None else torch.tensor(edges)
    with torch.no_grad():
        tensors[3][:, 40:42] = -torch.inf
        tensors[3][:, 12, :, ::3] = -torch.inf
    assert_right(results(tensors, bounds), expected(tensors, bounds))


def test_nothing_to_do() -> None:
    for facts in ({"B": 0, "T": 5, "N": 0}, {"B": 2, "T": 0, "N": 2}, {"B": 2, "T": 5, "N": 2, "H": 0}):
        tensors = leaves(**facts)
        o, ht, *grads = results(tensors)
        assert o.shape == tensors[2].shape and torch.equal(ht,
                                                           tensors[5]) and not any(grad.any()
                                                                                   for grad in grads[:5])
        assert torch.equal(grads[5], tensors[5].cos())


def test_the_library_operators() -> None:
    r, k, v, w, u, h0 = leaves(1, 9, 1)
    how = (0.25, True, False, torch.float32, "chunk", True, "chunk_rwkv6")
    torch.library.opcheck(torch.ops.flashlin.gla.default, (r, k, v, w, u, h0, None, *how))
    with torch.no_grad():
        torch.library.opcheck(torch.ops.flashlin.gla_backward.default, (
            r, k, v, w, u, h0, None, None, None, torch.ones_like(v), h0 * 2, *how, "q k v g u h0"))
