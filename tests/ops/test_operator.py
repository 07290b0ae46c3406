"""The factory of operators, tested with an operator whose kernels are torch functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import flashlin
from flashlin.compat.target import parse, pretend
from flashlin.guards.plan_types import Plan, Problem
from flashlin.ops._common import operator
from flashlin.ops._common.casting import as_planned, dtype_as_planned, name_of
from flashlin.ops._common.operator import Gradients, Kept, Operator
from flashlin.ops._common.pipeline import planned

computed: list[frozenset[str]] = []  # the gradients that were requested from the kernels


class Tensors(NamedTuple):
    a: Tensor
    unused: Tensor | None
    b: Tensor
    added: Tensor | None


class Scalars(NamedTuple):
    factor: float
    has_total: bool
    needs_grad: bool
    call: str


class Outputs(NamedTuple):
    y: Tensor
    total: Tensor | None
    product: Tensor | None


def problem(x: Tensors, how: Scalars) -> Problem:
    return Problem(
        "rms_norm",
        "norm",
        "",
        1,
        x.a.shape[0],
        1,
        x.a.shape[1],
        x.a.shape[1],
        1,
        name_of(x.a.dtype),
        needs_grad=how.needs_grad,
    )


def on_torch(x: Tensors, how: Scalars) -> tuple[Tensor, Tensor | None]:
    """Return y = factor (a b)^2 + added, and the sum of a b over its rows or None."""
    product = x.a * x.b
    return how.factor * product.square() + (0 if x.added is None else x.added), product.sum(
        0
    ) if how.has_total else None


def forward(plan: Plan, x: Tensors, how: Scalars) -> tuple[Tensor | None, ...]:
    return *on_torch(x, how), x.a * x.b if how.needs_grad else None


def backward(
    plan: Plan, x: Tensors, y: Outputs, grads: Outputs, how: Scalars, wanted: frozenset[str]
) -> Gradients:
    assert y.product is not None and x.added is None, "kept, and not kept"
    computed.append(wanted)
    slope = torch.zeros_like(y.product) if grads.y is None else grads.y * 2 * how.factor * y.product
    slope = slope if grads.total is None else slope + grads.total
    return {"a": slope * x.b, "b": slope * x.a, "unused": None}


def kept(x: Tensors, y: Outputs, how: Scalars) -> Kept:
    return x._replace(added=None), (None, None, y.product)


def empty(x: Tensors, how: Scalars) -> tuple[Tensor | None, ...]:
    return (
        torch.empty_like(x.a),
        x.a.new_empty(x.a.shape[1:]) if how.has_total else None,
        torch.empty_like(x.a) if how.needs_grad else None,
    )


OPERATOR = Operator(
    "test_operator",
    Tensors,
    Scalars,
    Outputs,
    2,
    family="norm",
    problem=problem,
    on_torch=on_torch,
    forward=forward,
    kept=kept,
    backward=backward,
    empty=empty,
    same=lambda how: {"added": "y"},
)


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    """Make every plan as on a GPU."""
    pretend(parse("triton=3.6.0,sm=90"))
    computed.clear()
    operator.emptied.clear()
    yield
    pretend(None)


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator).requires_grad_() for _ in range(3)]


def called(
    a: Tensor,
    b: Tensor,
    added: Tensor | None,
    traced: bool,
    has_total: bool = True,
    unused: Tensor | None = None,
    needs_grad: bool = True,
) -> tuple[Tensor, ...]:
    x, how = Tensors(a, unused, b, added), Scalars(0.5, has_total, needs_grad, "rms_norm float32")
    return OPERATOR(None if traced else planned(problem(x, how), a.device), x, how)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("path", ["auto", "torch"])
def test_gradients_find_their_tensors_by_name(traced: bool, path: str) -> None:
    a, b, added = leaves()
    wanted = on_torch(Tensors(a, None, b, added), Scalars(0.5, True, True, ""))
    found = called(a, b, added, traced)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)
    cotangents = [torch.ones_like(x) * (at + 2) for at, x in enumerate(found)]
    with flashlin.settings(path=path if traced else "auto"):  # an eager backward uses forward's plan
        grads = torch.autograd.grad(found, (a, b, added), cotangents)
    for got, expected in zip(grads, torch.autograd.grad(wanted, (a, b, added), cotangents), strict=True):
        torch.testing.assert_close(got, expected)
    assert computed == ([] if traced and path == "torch" else [frozenset("ab")]), (
        "the same gradient as another's is not computed"
    )


@pytest.mark.parametrize("traced", [False, True])
def test_only_wanted_gradients_are_asked_for(traced: bool) -> None:
    a, b, added = leaves()
    y, _ = called(a.detach(), b, None, traced)
    torch.autograd.grad(y.sum(), b)
    y, _ = called(a.detach(), b.detach(), added, traced)
    (grad,) = torch.autograd.grad(y.sum(), added)
    assert computed == [frozenset("b")] and torch.equal(grad, torch.ones_like(grad))


@pytest.mark.parametrize("traced", [False, True])
def test_a_gradient_of_none_is_zero_and_a_forgotten_one_an_error(
    traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, unused = leaves()
    (grad,) = torch.autograd.grad(
        called(a, b, None, traced, unused=unused)[0].sum(), unused, allow_unused=True
    )
    assert grad is None or not grad.any()
    monkeypatch.setattr(OPERATOR, "backward", lambda *_: {})
    with pytest.raises(KeyError, match="a"):
        torch.autograd.grad(called(a, b, None, traced)[0].sum(), a)


def test_what_plain_torch_did_not_keep_is_made_again() -> None:
    a, b, _ = leaves()
    with flashlin.settings(path="torch"):
        y, _ = called(a, b.detach(), None, traced=True)
    assert operator.emptied == {"test_operator"}
    (grad,) = torch.autograd.grad(y.sum(), a)
    torch.testing.assert_close(grad, a * b * b)
    assert computed == [frozenset("a")]


@pytest.mark.parametrize("has_total", [True, False])
def test_the_library_operators(has_total: bool) -> None:
    a, b, added = leaves()
    how = (0.5, has_total, True, "rms_norm float32")
    torch.library.opcheck(torch.ops.flashlin.test_operator.default, (a, None, b, added, *how))
    a, b, added = (x.detach() for x in (a, b, added))
    for wanted in ("a b", "b"):
        torch.library.opcheck(
            torch.ops.flashlin.test_operator_backward.default,
            (a, None, b, None, None, None, a * b, added, b[0] if has_total else None, *how, wanted),
        )


def test_a_schema_names_every_field() -> None:
    schema = str(torch.ops.flashlin.test_operator.default._schema)
    assert (
        "(Tensor a, Tensor? unused, Tensor b, Tensor? added, "
        "float factor, bool has_total, bool needs_grad, str call)"
        in schema
    )


def test_operands_are_as_planned() -> None:
    x = Tensors(
        torch.ones(2, 2, dtype=torch.bfloat16), None, torch.ones(2, dtype=torch.float16), torch.arange(2)
    )
    assert as_planned(x, "native") is x
    assert [None if t is None else t.dtype for t in as_planned(x, "fp32")] == [
        torch.float32,
        None,
        torch.float32,
        torch.int64,
    ]
    assert type(as_planned(x, "fp32")) is Tensors and type(as_planned(tuple(x), "fp32")) is tuple
    assert (
        dtype_as_planned(torch.bfloat16, "native") == torch.bfloat16
        and dtype_as_planned(torch.bfloat16, "fp32") == torch.float32
    )


def test_without_gradients_kernels_are_called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, added = (x.detach() for x in leaves())
    expected = called(a, b, added, traced=False)
    monkeypatch.setattr(operator._Eager, "apply", None)
    for got, wanted in zip(called(a, b, added, False, needs_grad=False), expected, strict=True):
        torch.testing.assert_close(got, wanted)


OWN_SCALAR = """
from typing import NamedTuple
import torch
from flashlin.kernels.simple_gla import torch_path
from flashlin.ops import simple_gla
from flashlin.ops._common.chunked import Chunked, Request, run_chunked


class Own(NamedTuple):
    scale: float
    has_ht: bool
    state_v_first: bool
    out_dtype: torch.dtype
    mode: str
    shift: float
    needs_grad: bool
    call: str


def shifted(x, scale, shift):
    o, ht = torch_path.compute(x, scale)
    return o + shift, ht


of = simple_gla.FAMILY
family = Chunked("simple_gla", of.tensors, of.arguments, shifted, scalars=Own, over_ranks=of.over_ranks)
q, k, v = torch.randn(3, 1, 20, 2, 8).unbind()


def call(shift):
    request = Request("chunk_simple_gla", None, None, False)
    return run_chunked(family, request, (q, k, v, None, None), shift=shift)[0]


whole = simple_gla.chunk_simple_gla(q, k, v)[0]
for f in (call, torch.compile(call, backend="eager", fullgraph=True)):
    for shift in (2.0, 3.0):
        torch.testing.assert_close(f(shift), whole + shift)
"""


@pytest.mark.alternate
def test_a_chunked_family_may_have_a_scalar_of_its_own() -> None:
    """A chunked family may have its own scalar argument.

    It replaces the library operators of its family, so the test runs in a new process.
    """
    done = subprocess.run([sys.executable, "-c", OWN_SCALAR], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
