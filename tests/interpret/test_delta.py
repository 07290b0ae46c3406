"""The chunked delta kernels in Triton's interpreter, beyond their cases.

The tests cover batches in slices, rows of no sequence, and the library operator.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin import dispatch
from flashlin.ops.delta_rule import FAMILY
from flashlin.testing.compare import poisoned


def leaves(B: int, T: int, N: int, H: int = 1, HV: int = 2, K: int = 16, V: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(2))
    made = [q, k, torch.randn(B, T, HV, V), F.logsigmoid(torch.randn(B, T, HV)), torch.rand(B, T, HV),
            torch.randn(N, HV, K, V)]
    return [x.requires_grad_() for x in made]


def results(tensors: list[torch.Tensor], bounds: torch.Tensor | None = None,
            call: Any = None) -> list[torch.Tensor]:
    q, k, v, g, beta, h0 = tensors
    with poisoned():
        o, ht = (call or flashlin.chunk_gated_delta_rule)(q, k, v, g, beta, initial_state=h0,
                                                          output_final_state=True, cu_seqlens=bounds)
        return [o, ht, *torch.autograd.grad(o.sin().sum() + ht.sin().sum(), tensors)]


def test_beta_in_the_dtype_of_q_gives_the_same_bits() -> None:
    q, k, v, g, beta, h0 = leaves(2, 37, 2)
    half = [x.detach().half().requires_grad_() for x in (q, k, v, beta)]
    own = results([*half[:3], g, half[3], h0])
    copied = results([*half[:3], g, half[3].detach().float().requires_grad_(), h0])
    for got, wanted in zip(own, copied, strict=True):
        assert torch.equal(got, wanted.to(got.dtype))


@pytest.mark.parametrize(("q", "beta", "read"), [
    (torch.float16, torch.float16, torch.float16), (torch.float16, torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32), (torch.float32, torch.float64, torch.float32)])
def test_kernels_read_beta_in_float32_or_in_the_dtype_of_q(q: torch.dtype, beta: torch.dtype,
                                                           read: torch.dtype) -> None:
    x = FAMILY.operator.tensors(*[x.to(q) for x in leaves(1, 4, 1)[:3]], torch.rand(1, 4, 2).to(beta), *[None] * 4)
    how = FAMILY.scalars(1.0, False, False, q, "chunk", False, "chunk_delta_rule")
    assert FAMILY.cast(x, how, "native")[0][3].dtype == read


@pytest.mark.parametrize("edges", [None, [0, 20, 20, 37, 70]], ids=["dense", "packed"])
def test_a_batch_in_parts_equals_the_whole(edges: list[int] | None, axis_limits: Callable[..., None]) -> None:
    tensors = leaves(3, 37, 3) if edges is None else leaves(1, 70, 4)
    bounds = None if edges is None else torch.tensor(edges)
    whole = results(tensors, bounds)
    axis_limits(8, 1, 1)
    for got, wanted in zip(results(tensors, bounds), whole, strict=True):
        assert torch.equal(got, wanted)


def test_rows_of_no_sequence_are_exact_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    # as on a GPU, where the host does not read the values of cu_seqlens
    monkeypatch.setattr("flashlin.guards.tensors.check_bounds", lambda edges, T: None)
    tensors = leaves(1, 40, 2)
    o, ht, *grads = results(tensors, torch.tensor([3, 20, 33]))
    for x in (o, *grads[:5]):
        assert not x[:, :3].any() and not x[:, 33:].any() and x[:, 3:33].any()


@pytest.mark.parametrize("K", [16, 24])
def test_gradients_are_summed_over_the_heads_that_share_q_and_k(K: int) -> None:
    x = leaves(B=2, T=21, N=2, H=2, HV=6, K=K)
    alone = [y.detach().repeat_interleave(3, 2).requires_grad_() if y.shape[2] == 2 else y for y in x]
    plans: list[flashlin.Plan] = []
    with dispatch.watching(plans.append):
        grouped, apart = results(x), results(alone)
    assert [plan.has("sum_heads") for plan in plans if plan.problem.needs_grad] == [True, False]
    for ours, right in zip(grouped, apart, strict=True):
        right = right if ours.shape == right.shape else right.unflatten(2, (2, 3)).sum(3)
        torch.testing.assert_close(ours, right)


def test_lengths_share_a_graph() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flashlin.chunk_gated_delta_rule, fullgraph=True, backend=graphs)
    for T in (20, 33, 7):
        tensors = leaves(2, T, 2)
        for got, wanted in zip(results(tensors, call=compiled), results(tensors), strict=True):
            torch.testing.assert_close(got, wanted)
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("gated", [True, False])
def test_the_library_operator(gated: bool) -> None:
    q, k, v, g, beta, h0 = leaves(1, 9, 1)
    arguments = (q, k, v, beta, g if gated else None, None, h0 if gated else None, None, 0.25, gated, False,
                 torch.float32, "chunk", True, "chunk_gated_delta_rule" if gated else "chunk_delta_rule")
    # The runs are not compared to the bit, because some columns of the tensors kept for backward are undefined.
    # The test above compares the results.
    torch.library.opcheck(torch.ops.flashlin.delta.default, arguments,
                          test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    # This forward has no windows. A backward with another plan must find none in the facts.
    facts = torch.ops.flashlin.delta(*arguments)[-1]
    assert facts.shape == ((2, 5, 1) if gated else (0,)) and (not gated or facts.isnan().all())


@pytest.mark.parametrize(("facts", "edges"), [
    ({"B": 0, "T": 5, "N": 0}, None), ({"B": 2, "T": 0, "N": 2}, None),
    ({"B": 2, "T": 5, "N": 2, "H": 0, "HV": 0}, None),
    ({"B": 1, "T": 0, "N": 0}, [0]), ({"B": 1, "T": 0, "N": 2}, [0, 0, 0])], ids=str)
def test_nothing_to_do(facts: dict[str, int], edges: list[int] | None) -> None:
    tensors = leaves(**facts)
    o, ht, *grads = results(tensors, None if edges is None else torch.tensor(edges))
    assert o.shape == tensors[2].shape and torch.equal(ht, tensors[5])
    assert not any(grad.any() for grad in grads[:5]) and torch.equal(grads[5], tensors[5].cos())
