"""The kernels of the short convolution and of the group norms, beyond their cases.

Run with TRITON_INTERPRET=1, see test_cases.py.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch

import flashlin
from flashlin import dispatch
from flashlin.compat.target import probe
from flashlin.kernels.conv.reference import convolve
from flashlin.ops import conv, norm
from flashlin.ops._common import pipeline
from flashlin.ops._common.pipeline import planned
from flashlin.testing.cases import CASES
from flashlin.testing.compare import check, judge, poisoned

CPU = torch.device("cpu")


@pytest.fixture
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend one multiprocessor, so that each program has several blocks of rows."""
    def on_a_small_card(problem: Any, device: torch.device) -> Any:
        planned(problem, device)
        return dispatch.plan(problem, probe(device)._replace(sms=1))
    monkeypatch.setattr(pipeline, "planned", on_a_small_card)


@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize("name",
                         ["causal_conv1d-long", "causal_conv1d-D=300", "causal_conv1d-packed",
                          "group_norm-odd-groups", "rms_norm_gated-heads", "group_norm-only-bias"])
def test_programs_that_share_out_many_rows(name: str) -> None:
    case = next(case for case in CASES if str(case) == name)
    assert [verdict for verdict in check(case, CPU, torch.float32) if not verdict.ok] == []


def test_each_programs_rows_are_many_on_one_multiprocessor(one_multiprocessor: None) -> None:
    """Check that the tests above cover programs with several blocks."""
    x, weight = torch.zeros(1, 1100, 8), torch.zeros(8, 4)
    launch = pipeline.planned(conv.problem_of(conv.Tensors(x, weight, None, None, None, None), conv.Scalars(
        False, False, True, "causal_conv1d float32")), CPU).launch("conv_backward_weights")
    assert launch.grid[0] * launch.block("BT") < 1100


def leaves(edges: list[int], T: int, D: int = 10, W: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    shapes = {"x": (1, T, D), "weight": (D, W), "bias": (D,), "residual": (1, T, D),
              "initial_state": (len(edges) - 1, D, W)}
    return {name: torch.randn(*shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def test_rows_outside_the_sequences_hold_the_residual_and_pass_no_gradient() -> None:
    """Rows outside of all sequences get the residual as output and no gradient.

    Such rows may exist on a GPU or under torch.compile, because the host does not read cu_seqlens there.
    """
    edges, T = [3, 5, 5, 18], 40
    tensors = leaves(edges, T)

    def call(**given: torch.Tensor) -> Any:
        return flashlin.causal_conv1d(**given, output_final_state=True, activation="silu",
                                      cu_seqlens=torch.tensor(edges))
    y, ht = torch.compile(call, fullgraph=True, backend="aot_eager")(**tensors)
    inside = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    rows = {**inside, **{name: inside[name][:, 3:18] for name in ("x", "residual")}}
    expected, state = convolve(**rows, activation="silu", cu_seqlens=torch.tensor([0, 2, 2, 15]))
    assert judge("y", y[:, 3:18], expected, 1e-4).ok and judge("ht", ht, state, 1e-4).ok
    for outside in (slice(0, 3), slice(18, T)):
        assert (y[:, outside] == tensors["residual"][:, outside]).all()
    got = torch.autograd.grad(y[:, 3:18].sin().sum() + ht.sum(), list(tensors.values()))
    wanted = torch.autograd.grad(expected.sin().sum() + state.sum(), list(inside.values()))
    for name, one, other in zip(tensors, got, wanted, strict=True):
        assert judge("d" + name, one, other, 1e-4).ok, name
    assert (got[0][:, :3] == 0).all() and (got[0][:, 18:] == 0).all()


@pytest.mark.parametrize("which", ["y", "ht"])
def test_gradients_of_one_output_alone(which: str) -> None:
    edges = [0, 2, 2, 20]
    tensors = leaves(edges, 20)
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    bounds = torch.tensor(edges)
    with poisoned():
        y, ht = flashlin.causal_conv1d(**tensors, output_final_state=True, activation="silu",
                                       cu_seqlens=bounds)
        assert ht is not None
        got = torch.autograd.grad((y if which == "y" else ht).sin().sum(), list(tensors.values()),
                                  allow_unused=True)
    expected = dict(zip(("y", "ht"), convolve(**exact, activation="silu", cu_seqlens=bounds), strict=True))
    wanted = torch.autograd.grad(expected[which].sin().sum(), list(exact.values()), allow_unused=True)
    for name, one, other in zip(tensors, got, wanted, strict=True):
        other = torch.zeros_like(exact[name]) if other is None else other
        assert judge("d" + name, torch.zeros_like(tensors[name]) if one is None else one, other,
                     1e-4).ok, name


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, state = torch.randn(shape, requires_grad=True), torch.randn(shape[0], 8, 4, requires_grad=True)
    weight = torch.randn(8, 4, requires_grad=True)
    with poisoned():
        y, ht = flashlin.causal_conv1d(x, weight, None, x, state, True, "silu")
        assert ht is not None and y.shape == shape
        (y.sum() + ht.sum()).backward()
    torch.testing.assert_close(ht, state)
    assert state.grad is not None and (state.grad == 1).all() and weight.grad is not None and (weight.grad
                                                                                               == 0).all()


@pytest.mark.filterwarnings("ignore:.*fp32 copies")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_through_any_strides(dtype: torch.dtype) -> None:
    x, cache, weight = torch.randn(3, 8).to(dtype), torch.randn(4, 3, 8).to(dtype).permute(1, 2,
                                                                                           0), torch.randn(8,
                                                                                                           4)
    before = cache.clone()
    for call in (flashlin.causal_conv1d_update,
                 torch.compile(flashlin.causal_conv1d_update, fullgraph=True, backend="aot_eager")):
        cache.copy_(before)
        y, returned = call(x, cache, None, weight)
        assert returned.data_ptr() == cache.data_ptr()
        torch.testing.assert_close(cache, torch.cat([before[..., 1:], x[..., None]], -1))
        torch.testing.assert_close(y.float(), (cache.float() * weight).sum(-1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("bare", [False, True], ids=["everything", "bare"])
def test_the_library_operators_of_the_convolution(packed: bool, bare: bool) -> None:
    given = [x.detach().requires_grad_() for x in leaves([0, 2, 2, 9] if packed else [0, 9], 9).values()]
    x, weight, bias, residual, h0 = given
    bounds = torch.tensor([0, 2, 2, 9]) if packed else None
    options: tuple[Any, ...] = (None, None, None) if bare else (bias, residual, h0)
    call = "causal_conv1d float32 silu" + (" final_state" if bare
                                           else " bias residual initial_state final_state")
    how = (True, not bare, True, call)
    torch.library.opcheck(torch.ops.flashlin.conv.default, (x, weight, *options, bounds, *how))
    optional = [None if t is None else t.detach() for t in (options[0], options[2])]
    kept = (x.detach(), weight.detach(), optional[0], None, optional[1], bounds, None, None)
    for wanted in ("x weight" if bare else "x weight bias initial_state", "weight"):
        torch.library.opcheck(torch.ops.flashlin.conv_backward.default, (
            *kept, torch.ones_like(x), None if bare else torch.ones_like(h0), *how, wanted))


def test_the_library_operator_of_the_update() -> None:
    arguments = (torch.randn(3, 8), torch.randn(8, 4), None, None, torch.randn(3, 8, 4), True)
    torch.library.opcheck(torch.ops.flashlin.conv_update.default, arguments)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_library_operators_of_gated_and_grouped_norms(groups: int) -> None:
    x, residual = (torch.randn(5, 3, 8, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(8 * groups, requires_grad=True) for _ in range(2))
    gate = torch.randn(5, 3, 8, requires_grad=True) if groups == 1 else None
    opening, call = (norm.SWISH, "layer_norm_gated float32 gate") if groups == 1 else (norm.NO_GATE,
                                                                                       "group_norm float32")
    call += " bias residual weight"
    how = (1e-5, norm.LAYER, opening, groups, *[torch.float32] * 4, True, call)
    torch.library.opcheck(torch.ops.flashlin.norm.default, (x, residual, weight, bias, gate, *how))
    kept = [None if t is None else t.detach()
            for t in (x, None, weight, None if gate is None else bias, gate, None, None)]
    stats, dy = torch.rand(5, 3), torch.rand(5, 3, 8)
    for wanted in ("x weight bias", "weight"):
        torch.library.opcheck(torch.ops.flashlin.norm_backward.default,
                              (*kept, stats, stats, dy, None, *how, wanted))


def test_norms_compile_to_the_kernels_they_run_eagerly() -> None:
    def call(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> Any:
        return flashlin.rms_norm_gated(flashlin.group_norm(x, w, w, num_groups=4), g, w, None, "sigmoid")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for rows in (3, 7):
        tensors = [torch.randn(rows, 16, requires_grad=True), torch.randn(rows, 16, requires_grad=True),
                   torch.randn(16, requires_grad=True)]
        found = [[y := function(*tensors), *torch.autograd.grad(y.sin().sum(), tensors)]
                 for function in (compiled, call)]
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted)
