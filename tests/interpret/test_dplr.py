"""Delta rules with a decay per key channel in Triton's interpreter, beyond their cases.

The tests cover batches in slices, rows of no sequence, decays that forget everything, the library operator,
and the kernels for chunks of 16 tokens.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.compat.target import probe
from flashlin.guards.plan_types import Launch, Plan, Problem
from flashlin.kernels.batch import Batch
from flashlin.kernels.delta.reference import recurrence as recurrence_of_keys
from flashlin.kernels.dplr import recipe
from flashlin.kernels.dplr.forward import prepare
from flashlin.kernels.dplr.inputs import Inputs
from flashlin.kernels.dplr.raw import prepare_raw, sums_of_long_chunks
from flashlin.kernels.dplr.reference import recurrence
from flashlin.ops import dplr_delta_rule  # noqa: F401  registers the library operators
from flashlin.ops._common.pointwise import gradients_of_inputs
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


@pytest.mark.parametrize("kind", ["bounded", "float16", "any", "rates"])
@pytest.mark.parametrize("edges", [None, [0, 13, 13, 40]], ids=["dense", "packed"])
def test_chunks_of_16_tokens_give_the_operands_of_other_chunks(edges: list[int] | None, kind: str) -> None:
    """``prepare_raw`` and ``prepare`` give the same operands of both scans.

    Both have chunks of 16 tokens here, because heads have more than 64 channels in float32. In float16, the
    gates are weak, because larger factors do not fit. The kinds "any" and "rates" have gates of any strength,
    so that some channels of some chunks do not fit one decay reference. The kind "rates" has erase rates per
    channel.
    """
    torch.manual_seed(0)
    dtype = torch.float16 if kind == "float16" else torch.float32
    B, T, K = (2 if edges is None else 1), 40, 80
    q, k = (x.to(dtype) for x in (torch.randn(B, T, 1, K), F.normalize(torch.randn(B, T, 1, K) + 3, dim=-1)))
    x = Inputs(q.float(), k.float(), torch.randn(B, T, 2, 16), torch.rand(B, T, 2, K) * -0.4, None, None,
               torch.rand(B, T, 2), None, None, None, None if edges is None else torch.tensor(edges))
    if kind != "float16":
        x = x._replace(g=x.g * 12.5)
    if kind in ("any", "rates"):
        x.g[:, 3, 0, 70:], x.g[:, 20:, 1, :10], x.g[:, 25, 1, 1] = -90.0, -20.0, -math.inf
    if kind == "rates":
        x = x._replace(a=torch.rand(B, T, 2, K), beta=None)
    problem = Problem("chunk_kda", "dplr", "chunk", B, T, 2, K, 16, 3 if edges else B, "float32",
                      varlen=bool(edges), options=("a" if kind == "rates" else "beta", "gva"))
    target = probe(torch.device("cpu"))
    kinds = ("halves", "bounded" if kind in ("bounded", "float16") else "short")
    launches = [one for kind in kinds for one in recipe.planned(problem, target, False, kind)]
    plan = Plan(problem, problem, target, tuple(launches), ())
    right = next(Batch(plan, x).parts(plan.launch("dplr_prepare"), scale=0.3))
    ours = {**right, "q": q, "k": k}
    with poisoned():
        prepare(plan, right, backward=True)
        prepare_raw(plan, ours, -math.inf, G=torch.full(x.g.shape, math.inf))
    if dtype == torch.float16:
        assert (ours["T_"] - right["T_"]).abs().max() > 2e-4
        ours["T_"] = ours["T_"].float() + ours["T_low"]
        assert (ours["T_"] - right["T_"]).abs().max() < 1e-4
    last = [t for first, end in itertools.pairwise(edges or (0, T)) for t in range(first, end)
            if t == end - 1 or (t - first) % 16 == 15]
    if kind == "bounded":
        assert ours["G"].isfinite().all(-1).all(-1).any(0).nonzero().flatten().tolist() == last
    torch.testing.assert_close(ours["G"][:, last], right["G"][:, last])
    for name in ("q_in", "a_in", "b_out", "W", "M", "P", "T_"):
        torch.testing.assert_close(ours[name].float(), right[name], rtol=0, msg=name,
                                   atol=1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("gate", [False, True])
def test_sums_of_long_chunks(gate: bool) -> None:
    """``dplr_sums`` sums log decays, also of raw gates, and stores which chunks fit one decay reference.

    A chunk fits if no channel forgets more than 120 bits after the first token.
    """
    torch.manual_seed(0)
    B, T, HV, K, BT, lowest = 2, 48, 3, 20, 16, -700.0
    bits = -7.0 * torch.rand(B, T // BT, BT, HV, K)
    bits[0, 1, 9, 1, 19] = -130.0  # the last channel
    bits[1, 2, 15, 0, 3] -= 120.0  # the last token
    bits[1, 0, 0] -= 500.0  # the first token does not count
    bits[1, 1], bits[1, 1, 5] = 0.0, -119.99  # nearly at the limit
    g = (bits * math.log(2)).flatten(1, 2)
    x = dict(g=g, A_log=None, dt_bias=None)
    if gate:
        A_log, dt_bias = torch.randn(HV), torch.randn(HV, K)
        raw = (g / lowest).logit(eps=1e-30) / A_log.exp()[:, None] - dt_bias
        x = dict(g=raw, A_log=A_log, dt_bias=dt_bias)
    launch = Launch("dplr_sums", (), 1, 1, (("BT", BT), ("BK", 32)), 0, 0, frozenset())
    problem = Problem("chunk_kda", "dplr", "chunk", B, T, HV, K, K, B, "float32")
    plan = Plan(problem, problem, probe(torch.device("cpu")), (launch,), ())
    x |= dict(slots=B * (T // BT + 1), T=T, HV=HV, bounds=None)
    with poisoned():
        sums_of_long_chunks(plan, x, lowest)
    fits = (bits[:, :, 1:].sum(2).amin(-1) >= -120).int()
    assert fits.sum() == fits.numel() - 2
    assert torch.equal(x["served"].view(B, -1, HV)[:, :-1], fits)
    added = bits if gate else bits.clamp(min=-126)  # gates have a lower bound
    torch.testing.assert_close(x["G"], added.cumsum(2).flatten(1, 2), rtol=1e-4, atol=1e-4)


def test_backward_of_a_bounded_gate_in_plain_torch() -> None:
    """A plan for plain torch also runs the backward of a forward whose kernels computed the gate."""
    torch.manual_seed(0)
    given = [torch.randn(1, 20, 2, 16) for _ in "qkvg"] + [torch.rand(1, 20, 2), torch.randn(2),
                                                           torch.randn(32), torch.randn(1, 2, 16, 16)]
    found = []
    for before, after in (("auto", "torch"), ("auto", "auto"), ("torch", "torch")):
        q, k, v, g, beta, A_log, dt_bias, h0 = leaves = [x.clone().requires_grad_() for x in given]
        with flashlin.settings(path=before):
            o, _ = flashlin.chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=h0,
                                      use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, lower_bound=-5.0)
        with flashlin.settings(path=after):
            found.append(torch.autograd.grad(o.square().sum(), leaves))
    for name, *gradients in zip(("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0"), *found, strict=True):
        for one in gradients[:2]:
            torch.testing.assert_close(one, gradients[2], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("biased", [True, False])
def test_gradients_of_a_gate_without_its_output(path: str, biased: bool) -> None:
    """Kernels and plain torch give the gradients of a gate's inputs from the gradient of its output."""
    torch.manual_seed(0)
    g, A_log, dy = torch.randn(2, 5, 3, 16), torch.randn(3, 1), torch.randn(2, 5, 3, 16)
    given = (g, A_log, torch.randn(3, 16) if biased else None)
    doubles = [None if x is None else x.double().requires_grad_() for x in given]
    z = doubles[0] if doubles[2] is None else doubles[0] + doubles[2]
    (-5 * (doubles[1].exp() * z).sigmoid()).backward(dy.double())
    with flashlin.settings(path=path), poisoned():
        found = gradients_of_inputs("fused_kda_gate", 3, 16, dy, *given, bound=-5.0)
    for ours, right in zip(found, doubles, strict=True):
        assert (ours is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(ours.double(), right.grad, rtol=1e-4, atol=1e-5)


def test_debug_mode_allows_a_state_without_a_gradient() -> None:
    x = dict(zip(("q", "k", "v", "g", "beta", "initial_state"), leaves("chunk_kda", 1, 9, 1), strict=True))
    with flashlin.settings(debug=True):
        o, ht = flashlin.chunk_kda(**x, output_final_state=True)
        o.sum().backward()
    assert ht.requires_grad and torch.isfinite(x["q"].grad).all()
