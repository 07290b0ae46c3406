"""Every case on the torch path of the CPU, compared with its float64 reference.

Other tests break a correct op on purpose and check that the comparison finds the error.
"""
from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlin
from flashlin.guards.plan_types import Plan
from flashlin.kernels.gla.reference import recurrence
from flashlin.ops._common.pipeline import planned
from flashlin.testing.cases import CASES
from flashlin.testing.cases.inputs import Draw, Input, Maker
from flashlin.testing.cases.op import WITHOUT_EFFECT, Op, options_of
from flashlin.testing.compare import Case, Tensors, check, judge, poisoned, results

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Return a list to which every call of an op adds its plan."""
    made: list[Plan] = []

    def noting(*arguments: Any) -> Plan:
        made.append(planned(*arguments))
        return made[-1]
    for name in flashlin.__all__:  # load all ops
        getattr(flashlin, name)
    for module in [x
                   for name, x in sys.modules.items() if name.startswith("flashlin.ops.")
                   and vars(x).get("planned") is planned]:
        monkeypatch.setattr(module, "planned", noting)
    return made


# Cases that differ from others only in segments or strips, which the torch path does not have.
STRIPS = ("in-parts-64", "in-parts-wide", "in-parts-256", "in-parts-forward-64", "in-parts-forward-128",
          "narrow-strips", "narrow-strips-parts", "windows-64", "windows-128", "windows-64-128",
          "windows-128-128", "no-windows", "bounded-windows-64")


# The torch path computes in fp32 for both 16-bit dtypes. With bf16 tested, most cases would show nothing new
# in fp16.
@pytest.mark.parametrize(("case", "dtype"),
                         [pytest.param(case, dtype, id=f"{case}-{dtype}") for case in CASES
                          if case.id not in STRIPS for dtype in DTYPES
                          if case.quick or dtype == torch.float32
                          or (dtype == torch.bfloat16 and "in-parts" not in case.id)])
@pytest.mark.alternate
def test_case(case: Case, dtype: torch.dtype, plans: list[Plan]) -> None:
    failed = [verdict for verdict in check(case, CPU, dtype) if not verdict.ok]
    assert not failed
    assert {plan.path for plan in plans} == {"torch"} and {plan.target.backend for plan in plans} == {"cpu"}


@pytest.mark.parametrize("case", [case for case in CASES if case.quick], ids=str)
def test_a_float64_call_is_computed_in_float64(case: Case) -> None:
    """A float64 call computes everything in float64, also constants, gates and float32 tensors."""
    found = results(case, CPU, torch.float64)
    assert {name: error for name, (ours, theirs) in found.items()
            if ours.dtype == torch.float64 and (error := judge(name, ours, theirs, 0).rms) > 1e-13} == {}


def test_cases_have_names_of_their_own_and_cover_every_op() -> None:
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.op for case in CASES if case.quick} == {name
                                                         for name in flashlin.dispatch.OPS if name not in (
   # these choose a mode and then call one of the other ops
   "simple_gla", "retention", "linear_attn", "delta_rule", "gated_delta_rule", "gla", "rwkv6", "kda",
   "rwkv7")}


def test_every_number_and_flag_is_chosen_by_a_case() -> None:
    """Each number or flag of an op is set by at least one case.

    Otherwise the op and its reference could have different defaults without a failing test.
    """
    chosen: dict[str, set[str]] = {}
    for case in CASES:
        chosen.setdefault(case.op, set()).update(options_of(case))
    every = {(op, one.name): one.default for op in chosen if hasattr(flashlin, op)
             for one in inspect.signature(getattr(flashlin, op)).parameters.values()}
    scalars = {called for called, default in every.items() if isinstance(default, (bool, float))}
    assert {(op, name) for op, name in scalars if name not in chosen[op]} == {
        (op, name) for op, name in scalars if name in WITHOUT_EFFECT - chosen[op]}
    assert WITHOUT_EFFECT <= {name for _, name in every}
    assert {"chunk_rwkv7-scale=2.0", "chunk_simple_gla-state_v_first=True"} <= {str(case) for case in CASES}


DECLARED = Maker({"x": Input("B T D", Draw.uniform), "gate": Input("T", dtype="own", when="gated"),
                  "bias": Input("D", when="given"), "weight": Input("D", when="given"),
                  "state": Input("N K V", dtype="float32")},
                 {"B": 2, "T": 3, "D": 4, "K": 5, "V": 6, "own": "float64", "gated": False})


def declared(**facts: Any) -> Tensors:
    return DECLARED(torch.bfloat16, torch.Generator().manual_seed(0), **facts)


def test_declared_tensors_have_their_shapes_and_dtypes() -> None:
    made = declared(gated=True)
    assert {name: (tuple(x.shape), x.dtype) for name, x in made.items()} == {
        "x": ((2, 3, 4), torch.bfloat16), "gate": ((3,), torch.float64), "bias": ((4,), torch.bfloat16),
        "weight": ((4,), torch.bfloat16), "state": ((2, 5, 6), torch.float32)}
    assert made["x"].min() >= 0 and set(declared()) == set(made) - {"gate"}
    packed = declared(edges=(0, 2, 7), state_v_first=True, own="float32")
    assert packed["x"].shape == (1, 7, 4) and packed["state"].shape == (2, 6, 5)
    assert packed["cu_seqlens"].tolist() == [0, 2, 7] and packed["cu_seqlens"].dtype == torch.int32


def test_a_tensor_that_is_not_given_leaves_the_others_as_they_are() -> None:
    every, some = declared(), declared(given=("weight",), without=("x",))
    assert set(some) == {"weight", "state"}
    assert torch.equal(some["weight"], every["weight"]) and torch.equal(some["state"], every["state"])


def test_a_fact_that_is_not_declared_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"facts: got H, need B, T, D, K, V, own, gated"):
        declared(H=3)


# Each test below breaks a correct op in one way.

def make(dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    made = {name: torch.randn(2, 400, 2, 8, generator=generator).to(dtype) for name in ("q", "k", "v")}
    return {**made, "initial_state": torch.randn(2, 2, 8, 8, generator=generator)}


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, initial_state: torch.Tensor) -> Tensors:
    o, ht = flashlin.chunk_retention(q, k, v, 1.0, initial_state, True)
    return {"o": o, "ht": ht}


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, initial_state: torch.Tensor) -> Tensors:
    o, ht = recurrence(q, k, v, gamma=simple_gla_gamma(), h0=initial_state)
    return {"o": o, "ht": ht}


def simple_gla_gamma() -> torch.Tensor:
    return torch.log(1 - 2.0 ** (-5 - torch.arange(2, dtype=torch.float64)))


def broken(call: Callable[..., Tensors], **changes: Any) -> Case:
    return Case("chunk_retention", "broken", make, call, reference, {"*": 0.005, "d*": 0.008}, **changes)


def failing(case: Case, dtype: torch.dtype = torch.float32) -> list[str]:
    return [verdict.tensor for verdict in check(case, CPU, dtype) if not verdict.ok]


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Tensors]:
    def call(**tensors: torch.Tensor) -> Tensors:
        found = right(**tensors)
        return {**found, name: change(found[name])}
    return call


class Passed(torch.autograd.Function):
    """An identity function of o whose backward applies ``change`` to the gradient."""
    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.change = change
        return o.clone()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(do.clone()), None


def with_row(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[1, 123, 1] += value
    return x


def test_the_right_op_passes() -> None:
    assert failing(broken(right)) == []
    assert failing(broken(right), torch.bfloat16) == []


def test_an_output_that_nobody_named_is_an_error() -> None:
    """An output without a name raises an error, because it would not be compared."""
    op = Op("chunk_retention", make, lambda **tensors: tuple(reference(**tensors).values()),
            {"*": 0.005, "d*": 0.008}, always={"scale": 1.0, "output_final_state": True})
    assert failing(op("both")) == []
    with pytest.raises(ValueError, match="longer"):
        failing(op._replace(outputs=("o",))("the first"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_error_confined_to_one_row_fails(dtype: torch.dtype) -> None:
    verdicts = {verdict.tensor: verdict
                for verdict in check(broken(changed("o", lambda o: with_row(o, 2.0))), CPU, dtype)}
    assert not verdicts["o"].ok and verdicts["ht"].ok
    if dtype == torch.bfloat16:
        assert verdicts["o"].rms < verdicts["o"].allowed  # the usual RMS metric alone would accept it


def test_a_row_of_nan_fails() -> None:
    assert failing(broken(changed("o", lambda o: with_row(o, float("nan"))))) == ["o"]
    assert failing(broken(changed("o", lambda o: with_row(o, float("inf"))))) == ["o"]


def test_a_wrong_final_state_fails() -> None:
    for wrong in (lambda ht: ht + (ht * 0.001).detach(), lambda ht: ht + (ht.flip(1) - ht).detach(),
                  torch.zeros_like):
        assert "ht" in failing(broken(changed("ht", wrong)))
    assert failing(broken(changed("ht", lambda ht: ht.detach()))) == ["dk", "dv", "dinitial_state"]


def test_a_state_of_the_wrong_shape_fails() -> None:
    assert "ht" in [v.tensor for v in [judge("ht", torch.zeros(2, 3), torch.zeros(3, 2), 1.0)] if not v.ok]


@pytest.mark.parametrize("name", ["q", "k", "v", "initial_state"])
def test_a_missing_gradient_fails(name: str) -> None:
    def call(**tensors: torch.Tensor) -> Tensors:
        return right(**{**tensors, name: tensors[name].detach()})
    assert failing(broken(call)) == ["d" + name]


def test_a_wrong_row_of_a_gradient_fails() -> None:
    def call(**tensors: torch.Tensor) -> Tensors:
        return right(**{**tensors, "v": Passed.apply(tensors["v"], lambda dv: with_row(dv, 1.0))})
    assert failing(broken(call)) == ["dv"]


def test_a_missing_output_fails() -> None:
    def call(**tensors: torch.Tensor) -> Tensors:
        return {"o": right(**tensors)["o"]}
    with pytest.raises(AssertionError, match="the reference has"):
        check(broken(call), CPU, torch.float32)


@pytest.mark.parametrize("new",
                         [lambda x: torch.empty(x.shape, dtype=x.dtype), lambda x: torch.empty_like(x)],
                         ids=["empty", "empty_like"])
def test_an_unwritten_element_fails(new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, o: torch.Tensor) -> torch.Tensor:
            out = new(o)
            out[:, :-1] = o[:, :-1]
            out[:, -1, :, 1:] = o[:, -1, :, 1:]
            return out

        @staticmethod
        def backward(ctx: Any, do: torch.Tensor) -> torch.Tensor:
            return do

    class ForgetfulBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
            return v.clone()

        @staticmethod
        def backward(ctx: Any, dv: torch.Tensor) -> torch.Tensor:
            out = new(dv)
            out[1:] = dv[1:]
            out[0, ..., 1:] = dv[0, ..., 1:]
            return out
    assert failing(broken(changed("o", Forgetful.apply))) == ["o"]
    assert failing(broken(lambda **tensors: right(**{**tensors,
                                                     "v": ForgetfulBackward.apply(tensors["v"])}))) == ["dv"]


def test_poison_ends_with_its_block_and_leaves_integers_alone() -> None:
    before = torch.empty, torch.empty_like
    with poisoned():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.zeros(2)).isnan().all()
        assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
    assert (torch.empty, torch.empty_like) == before


def test_a_case_without_gradients_for_a_tensor_says_so() -> None:
    named = {verdict.tensor for verdict in check(broken(right, constant=("initial_state",)), CPU,
                                                 torch.float32)}
    assert named == {"o", "ht", "dq", "dk", "dv"}
