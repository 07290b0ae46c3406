"""Delta rules with a decay per key channel in Triton's interpreter, beyond their cases.

The tests cover batches in slices, rows of no sequence, decays that forget everything, and the library
operator.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.delta.reference import recurrence as recurrence_of_keys
from flashlin.kernels.dplr.reference import recurrence
from flashlin.ops import dplr_delta_rule  # noqa: F401  registers the library operators
from flashlin.testing.compare import judge, poisoned

OPS = pytest.mark.parametrize("op", ["chunk_kda", "chunk_dplr_delta_rule"])


def leaves(op: str, B: int, T: int, N: int, H: int = 1, K: int = 16, V: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v, read, g = (torch.randn(B, T, H, D) for D in (K, K, V, K, K))
    k, read, g, rate = F.normalize(k, dim=-1), F.normalize(read, dim=-1), F.logsigmoid(g), torch.randn(B, T,
                                                                                                       H,
                                                                                                       1).sigmoid()
    own = [g, rate[..., 0]] if op == "chunk_kda" else [-read, read * rate, g]
    return [x.contiguous().requires_grad_() for x in (q, k, v, *own, torch.randn(N, H, K, V))]


def results(op: str, tensors: list[torch.Tensor], bounds: torch.Tensor | None = None, call: Any = None,
            **extra: Any) -> list[torch.Tensor]:
    *given, h0 = tensors
    with poisoned():
        o, ht = (call or getattr(flashlin, op))(*given, initial_state=h0, output_final_state=True,
                                                cu_seqlens=bounds, **extra)
        return [o, ht, *torch.autograd.grad(o.sin().sum() + ht.sin().sum(), tensors)]


def expected(op: str, tensors: list[torch.Tensor], bounds: torch.Tensor | None = None,
             scale: float = 0.25) -> list[torch.Tensor]:
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    if op == "chunk_kda":
        q, k, v, g, beta, h0 = doubles
        o, ht = recurrence_of_keys(q, k, v, beta, g, h0=h0, bounds=bounds, scale=scale)
    else:
        q, k, v, a, b, g, h0 = doubles
        o, ht = recurrence(q, k, v, a, b, g, h0=h0, bounds=bounds, scale=scale)
    return [o, ht, *torch.autograd.grad(o.sin().sum() + ht.sin().sum(), doubles)]


def assert_right(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [verdict for n, (x, y) in enumerate(zip(got, wanted, strict=True))
            if not (verdict := judge(str(n), x, y, 2e-5)).ok] == []


@OPS
@pytest.mark.parametrize("edges", [None, [0, 20, 20, 37, 40]], ids=["dense", "packed"])
def test_a_batch_in_parts_equals_the_whole(op: str, edges: list[int] | None,
                                           axis_limits: Callable[..., None]) -> None:
    tensors = leaves(op, 3, 19, 3) if edges is None else leaves(op, 1, 40, 4)
    bounds = None if edges is None else torch.tensor(edges)
    whole = results(op, tensors, bounds)
    axis_limits(4, 1, 1)
    for got, wanted in zip(results(op, tensors, bounds), whole, strict=True):
        assert torch.equal(got, wanted)
    assert_right(whole, expected(op, tensors, bounds))


@OPS
def test_rows_of_no_sequence_are_exact_zeros(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as on a GPU, where the host does not read the values of cu_seqlens
    monkeypatch.setattr("flashlin.guards.tensors.check_bounds", lambda edges, T: None)
    tensors, bounds = leaves(op, 1, 40, 2), torch.tensor([3, 20, 33])
    o, ht, *grads = results(op, tensors, bounds)
    for x in (o, *grads[:-1]):
        assert not x[:, :3].any() and not x[:, 33:].any() and x[:, 3:33].any()
    assert_right([o, ht, *grads], expected(op, tensors, bounds))


@OPS
def test_a_row_beside_a_sequence_is_not_its_own(op: str) -> None:
    """Gradients read the row above or below only within the sequence and the chunk."""
    tensors = leaves(op, 1, 80, 2)
    with torch.no_grad():
        for x in tensors[:3]:
            x[:, 39] *= 100
    whole = results(op, tensors, torch.tensor([0, 40, 80]))
    alone = results(op, [x[:, 40:] for x in tensors[:-1]] + [tensors[-1][1:]])
    for n in (0, *range(2, len(whole) - 1)):
        torch.testing.assert_close(whole[n][:, 40:],
                                   alone[n][:, 40:] if alone[n].shape[1] == 80 else alone[n], rtol=1e-5,
                                   atol=1e-5)


@OPS
@pytest.mark.parametrize("edges", [None, [0, 33, 70]], ids=["dense", "packed"])
def test_forgetting_everything(op: str, edges: list[int] | None) -> None:
    tensors = leaves(op, 1, 70, 1 if edges is None else 2)
    bounds = None if edges is None else torch.tensor(edges)
    with torch.no_grad():
        g = tensors[3 if op == "chunk_kda" else 5]
        g[:, 40] = -torch.inf
        g[:, 12, :, ::3] = -torch.inf
    assert_right(results(op, tensors, bounds), expected(op, tensors, bounds))


@OPS
@pytest.mark.parametrize("which", [0, 1], ids=["output", "state"])
def test_gradients_of_one_of_both(op: str, which: int) -> None:
    tensors = leaves(op, 1, 20, 1)
    *given, h0 = tensors
    with poisoned():
        found = getattr(flashlin, op)(*given, initial_state=h0, output_final_state=True)[which]
        grads = torch.autograd.grad(found.sum(), tensors, allow_unused=True, materialize_grads=True)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    q, k, v, *own, state = doubles
    right, own = (recurrence_of_keys, own[::-1]) if op == "chunk_kda" else (recurrence, own)
    loss = right(q, k, v, *own, h0=state, scale=0.25)[which].sum()
    wanted = torch.autograd.grad(loss, doubles, allow_unused=True, materialize_grads=True)
    assert_right(list(grads), list(wanted))


@OPS
def test_nothing_to_do(op: str) -> None:
    for facts in ({"B": 0, "T": 5, "N": 0}, {"B": 2, "T": 0, "N": 2}, {"B": 2, "T": 5, "N": 2, "H": 0}):
        tensors = leaves(op, **facts)
        o, ht, *grads = results(op, tensors)
        assert o.shape == tensors[2].shape and torch.equal(ht,
                                                           tensors[-1]) and not any(grad.any()
                                                                                    for grad in grads[:-1])
        assert torch.equal(grads[-1], tensors[-1].cos())


def test_heads_that_share_keys() -> None:
    """Gradients of heads that share keys are added in float32."""
    q, k, v, g, beta, h0 = leaves("chunk_kda", 1, 20, 1, H=4)
    tensors = [x.detach().contiguous().requires_grad_() for x in (q[:, :, :2], k[:, :, :2], v, g, beta, h0)]
    assert_right(results("chunk_kda", tensors, scale=-0.7), expected("chunk_kda", tensors, scale=-0.7))


@OPS
@pytest.mark.alternate
def test_lengths_share_a_graph(op: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(getattr(flashlin, op), fullgraph=True, backend=graphs)
    for T in (20, 7, 16):
        tensors = leaves(op, 2, T, 2)
        for got, wanted in zip(results(op, tensors, call=compiled), results(op, tensors), strict=True):
            torch.testing.assert_close(got, wanted)
    assert graphs.frame_count <= 2


def test_the_library_operators() -> None:
    q, k, v, g, beta, h0 = leaves("chunk_kda", 1, 9, 1)
    how = (torch.float32, "chunk", -math.inf, True, "chunk_kda")
    torch.library.opcheck(torch.ops.flashlin.dplr,
                          (q, k, v, g, None, None, beta, None, None, h0, None, 0.25, True, False, *how))
    q, k, v, a, b, g, _ = leaves("chunk_rwkv7", 1, 9, 1)
    torch.library.opcheck(torch.ops.flashlin.dplr,
                          (q, k, v, g, a, b, *[None] * 5, 0.25, False, False, *how))
    with torch.no_grad():
        torch.library.opcheck(torch.ops.flashlin.dplr_backward, (
            q, k, v, g, a, b, *[None] * 7, torch.ones_like(v), None, 0.25, False, False,
            *how, "q k v g a b"))


@pytest.mark.parametrize(("bound", "passes"), [(None, 1), (-87.4, 1), (-87.0, 0), (-5.0, 0)])
def test_a_gate_whose_bound_forgets_nothing_saves_a_pass_over_its_gradient(
        bound: float | None, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, g, beta, _ = leaves("chunk_kda", 1, 20, 1)
    launched = 0

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal launched
        launched += 1
        return launch(*given, **more)
    launch = torch.ops.aten.threshold_backward.grad_input
    monkeypatch.setattr(torch.ops.aten.threshold_backward, "grad_input", counted)
    o, _ = flashlin.chunk_kda(q, k, v, g * 100, beta, use_gate_in_kernel=True, A_log=torch.zeros(1),
                              lower_bound=bound)
    assert torch.autograd.grad(o.sum(), [g])[0].isfinite().all()
    assert launched == passes
