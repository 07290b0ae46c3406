"""Tests of the HGRN recurrence on the torch path, in addition to its cases.

They cover errors that name the argument, gradients by finite differences, strong decays and torch.compile.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.compat.target import Target, parse
from flashlin.guards.plan_types import Problem
from flashlin.kernels.hgrn import recipe
from flashlin.kernels.hgrn.reference import recurrence
from flashlin.ops._common import arguments
from flashlin.testing.compare import Tensors

META = torch.device("meta")
BOTH = pytest.mark.parametrize("op", [flashlin.chunk_hgrn, flashlin.fused_recurrent_hgrn],
                               ids=lambda op: op.__name__)


def inputs(B: int = 2, T: int = 11, D: int = 5, N: int | None = None) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(B, T, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"x": x, "g": F.logsigmoid(g),
            "initial_state": torch.randn(B if N is None else N, D, generator=generator, dtype=torch.float64)}


def t(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": 3}, TypeError, "x: got int, need a tensor of shape [B, T, D]"),
    ({"x": t(2, 11)}, ValueError, "x: got shape [2, 11], need [B, T, D]"),
    ({"x": t(2, 11, 0)}, ValueError, "x: got shape [2, 11, 0], need [B, T, D] with D of at least 1"),
    ({"x": t(2, 11, 5, dtype=torch.int32)}, TypeError, "x: got dtype torch.int32, need bfloat16"),
    ({"g": None}, TypeError, "g: got NoneType, need a tensor of shape [B, T, D]"),
    ({"g": t(2, 11, 1)}, ValueError, "g: got shape [2, 11, 1], need [B, T, D] = [2, 11, 5]"),
    ({"g": t(2, 11, 5, device=META)}, ValueError, "g: got device meta, need cpu, where x is"),
    ({"initial_state": t(1, 5)}, ValueError, "initial_state: got shape [1, 5], need [N, D] = [2, 5]"),
    ({"initial_state": t(2, 5, device=META)}, ValueError,
     "initial_state: got device meta, need cpu, where x is"),
    ({"cu_seqlens": torch.tensor([0, 11])}, ValueError,
     "x: The batch size is expected to be 1 rather than 2 when using `cu_seqlens`"),
    ({"head_first": True}, TypeError, "")]


@BOTH
@pytest.mark.parametrize(("changes", "error", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments(op: Any, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        op(**{**inputs(), **changes})
    assert str(raised.value).startswith(text)


@BOTH
@pytest.mark.parametrize("edges", [None, [0, 0, 4, 5, 5, 11]], ids=["dense", "packed"])
def test_the_function_and_its_gradients_by_differences(op: Any, edges: list[int] | None) -> None:
    bounds = None if edges is None else torch.tensor(edges)
    given = list(inputs(D=2).values()) if edges is None else list(inputs(B=1, D=2, N=5).values())
    for got, wanted in zip(op(*given, True, cu_seqlens=bounds), recurrence(*given, bounds), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *tensors: op(*tensors, True, bounds),
                                    [x.requires_grad_() for x in given])


def test_what_forgets_everything_passes_no_gradient_on() -> None:
    given = inputs()
    given["g"][:, 6] = float("-inf")
    leaves = [x.requires_grad_() for x in given.values()]
    o, _ = flashlin.chunk_hgrn(*leaves)
    dx, dg, dh0 = torch.autograd.grad(o[:, 6:].sum(), leaves)
    assert torch.equal(o[:, 6], given["x"][:, 6])
    assert not dx[:, :6].any() and dx[:, 6:].all() and not dg[:, :7].any() and dg[:,
                                                                                  7:].all() and not dh0.any()


def test_rows_of_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows outside of all sequences give zeros, even if their inputs are NaN.

    The test disables the check of cu_seqlens, because the host does not read cu_seqlens on a GPU.
    """
    monkeypatch.setattr(arguments, "check_cu_seqlens", lambda bounds, *rest: bounds)
    given, bounds = inputs(B=1, N=2), torch.tensor([2, 6, 9])
    given["x"][:, :2] = given["g"][:, 9:] = float("nan")
    leaves = [x.requires_grad_() for x in given.values()]
    o, ht = flashlin.chunk_hgrn(*leaves, True, bounds)
    wanted, states = recurrence(*(x[:, 2:9] for x in leaves[:2]), leaves[2], bounds - 2)
    torch.testing.assert_close(o[:, 2:9], wanted)
    torch.testing.assert_close(ht, states)
    dx, dg, _ = torch.autograd.grad(o.sum() + ht.sum(), leaves)
    for x in (o, dx, dg):
        assert not x[:, :2].any() and not x[:, 9:].any() and x[:, 2:9].any()


@BOTH
def test_nothing_to_do(op: Any) -> None:
    for given, bounds in ((inputs(T=0), None), (inputs(B=0), None),
                          (inputs(B=1, T=0, N=3), torch.tensor([0, 0, 0, 0])),
                          (inputs(B=1, T=0, N=0), torch.tensor([0]))):
        leaves = [x.requires_grad_() for x in given.values()]
        o, ht = op(*leaves, True, bounds)
        assert o.shape == given["x"].shape and torch.equal(ht, given["initial_state"])
        dx, dg, dh0 = torch.autograd.grad(o.sum() + ht.sum(), leaves, allow_unused=True,
                                          materialize_grads=True)
        assert torch.equal(dh0, torch.ones_like(dh0)) and not dx.any() and not dg.any()


@BOTH
def test_dtypes_in_and_out(op: Any) -> None:
    given = inputs()
    o, ht = op(given["x"].half(), given["g"].bfloat16(), given["initial_state"].half(), True)
    assert o.dtype == torch.float16 and ht.dtype == torch.float32
    o, ht = op(given["x"].half(), given["g"], None, True)
    assert o.dtype == torch.float16 and ht.dtype == torch.float64
    assert op(given["x"], given["g"])[1] is None


def test_torch_compile_makes_one_graph() -> None:
    leaves = [x.float().requires_grad_() for x in inputs().values()]

    def call(*given: torch.Tensor) -> Any:
        return flashlin.chunk_hgrn(*given, True)
    found = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        outputs = function(*leaves)
        found.append([*outputs, *torch.autograd.grad(sum(x.sin().sum() for x in outputs), leaves)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


H200 = parse("triton=3.6.0,sm=90,torch=2.9.0")


@pytest.mark.parametrize(("B", "T", "D", "split"),
                         [(64, 4096, 4096, 1), (16, 4096, 2048, 1), (4, 4096, 2048, 9), (1, 4096, 1024, 32),
                          (1, 100, 1024, 1), (1, 1, 64, 1), (0, 0, 64, 1)])
def test_few_sequences_are_split_until_the_card_is_full(B: int, T: int, D: int, split: int) -> None:
    problem = Problem("chunk_hgrn", "hgrn", "", B, T, 1, D, D, B, "bfloat16", False, True)
    card: Target = H200._replace(sms=132)
    assert recipe.segments(problem, card) == split
    assert [launch.kernel for launch in recipe.launches(problem,
                                                        card)] == ["hgrn_ends"] * (split
                                                                                   > 1) + ["hgrn_forward",
                                                                                           "hgrn_backward"]
