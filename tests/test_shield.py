"""Tests of shield on simulated GPUs: the launches that it makes from a user's launch.

The tensors are small, or meta tensors without memory.
"""
from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import triton

import flashlin
from flashlin.compat.releases import supported
from flashlin.compat.signatures import is_apply, signature_of
from flashlin.compat.target import parse, pretend
from flashlin.compat.traits import HALVES, with_operands
from flashlin.guards import checks
from flashlin.kernels.families import FAMILIES
from flashlin.kernels.remedies import REMEDIES
from flashlin.kernels.shield import source
from flashlin.kernels.shield.problem import Declared, problem_of
from flashlin.kernels.shield.views import fp32_copies, part_of
from flashlin.policy import Policy
from flashlin.shielding import function as functions
from flashlin.shielding import launcher as shielding
from tests import foreign

H100, T4, A100 = "triton=3.2.0,sm=90", "triton=3.2.0,sm=75", "triton=3.6.0,sm=80"
Starts = list[dict[str, Any]]


def watched(kernel: Any, target: str, **declared: Any) -> tuple[Any, Starts]:
    """Shield a kernel for a simulated machine; return it, and a list that receives its launches.

    Each launch is recorded as its arguments by name, including the grid; no kernel runs.
    """
    starts: Starts = []
    shielded = flashlin.shield(kernel, **declared)
    launcher = shielded
    while not isinstance(launcher, shielding.Launcher):
        launcher = launcher.fn

    def keep(*args: Any, **kwargs: Any) -> None:
        starts.append({**dict(zip(kernel.arg_names, args, strict=False)), **kwargs})
    launcher._start = keep
    pretend(parse(target))
    return shielded, starts


def tokens(B: int, H: int, T: int = 1,
           dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(B, H, T, dtype=dtype), torch.zeros(B, H, T, dtype=dtype)


BATCH = dict(batch={"x": 0, "o": 0}, batch_axis=1, batch_size="B")


# --- grids ---

def test_a_launch_without_objections_is_handed_on_as_it_is() -> None:
    shielded, starts = watched(foreign.scaled, H100)
    x, o = tokens(2, 3)
    shielded[(1, 6)](x, o, 1, 2, H=3, BT=16, num_warps=2)
    assert starts == [dict(x=x, o=o, T=1, B=2, H=3, BT=16, num_warps=2, grid=(1, 6), warmup=False)]


def test_too_many_programs_are_launched_in_parts_of_the_batch() -> None:
    shielded, starts = watched(foreign.scaled, H100, **BATCH)
    x, o = tokens(10923, 6)
    shielded[lambda meta: (triton.cdiv(meta["T"], meta["BT"]), meta["B"] * meta["H"])](x, o, 1, 10923, H=6,
                                                                                       BT=16)
    assert [(start["grid"], start["B"], start["x"].shape[0])
            for start in starts] == [((1, 32772), 5462, 5462), ((1, 32766), 5461, 5461)]
    assert starts[1]["x"].data_ptr() == x[5462:].data_ptr() and starts[1]["o"].data_ptr() == o[
        5462:].data_ptr()
    assert {start["T"] for start in starts} == {1}


@pytest.mark.parametrize(("declared", "says"), [
    ({}, 'do       declare the batch with shield(..., batch={"tensor": dimension, ...}, batch_axis=1, '
         'batch_size="argument")'),
    (dict(batch={"x": 0, "o": 0}, batch_axis=0),
     "batch_axis=0 has 1 programs, which is not a multiple of the batch size 10923"),
    (dict(batch={"x": 0}, batch_axis=1),
     'o has a dimension of 10923, the batch size, and is not declared: add batch={"o": 0}'),
    (dict(batch={"x": 0, "o": 1}, batch_axis=1, batch_size="B"),
     "o: dimension 1 has 6 elements, need a multiple of the batch of 10923")])
def test_a_grid_that_cannot_be_split_is_refused_and_says_how_to_declare_it(declared: dict[str, Any],
                                                                           says: str) -> None:
    shielded, starts = watched(foreign.scaled, H100, **declared)
    with pytest.raises(flashlin.UnsupportedError) as refused:
        shielded[(1, 65538)](*tokens(10923, 6), 1, 10923, H=6, BT=16)
    assert "scaled starts 65538 programs on grid axis 1, need at most 65535" in str(
        refused.value) and says in str(refused.value)
    assert not starts


@pytest.mark.parametrize(("batch", "x", "o", "says"), [
    ({"x": 0}, torch.zeros(100, 2, 1), torch.zeros(200),
     "o has a dimension of 200, which may contain the batch of 100, and is not declared"),
    ({"x": 0}, torch.zeros(100, 2, 1), torch.zeros(2, 101), 'add batch={"o": 1} if it is the batch'),
    ({"x": 0}, None, torch.zeros(2, 102), "none of x is a tensor with the batch in this call"),
    ({"x": 0, "o": None}, None, torch.zeros(200), "none of x, o is a tensor with the batch in this call")])
def test_what_parts_of_the_batch_would_not_reach_is_not_split(
        axis_limits: Callable[..., None], batch: dict[str, Any], x: Any, o: Any, says: str) -> None:
    axis_limits(2**31 - 1, 80, 80)
    shielded, starts = watched(foreign.scaled, "triton=3.7.2,sm=90", batch=batch, batch_axis=1,
                               batch_size="B")
    with pytest.raises(flashlin.UnsupportedError) as refused:
        shielded[(1, 200)](x, o, 1, 100, H=2, BT=16)
    assert says in str(refused.value) and not starts


def test_a_batch_size_that_is_left_out_is_its_default(axis_limits: Callable[..., None]) -> None:
    axis_limits(2, 2, 2)
    shielded, starts = watched(foreign.usual, "triton=3.7.3,sm=90", batch={"x": 0, "o": 0}, batch_axis=0,
                               batch_size="B")
    shielded[(4,)](torch.zeros(4), torch.zeros(4))
    assert [(start["grid"], start["B"], start["x"].shape[0]) for start in starts] == [((2,), 2, 2)] * 2


def test_an_empty_batch_is_launched_as_it_is() -> None:
    shielded, starts = watched(foreign.scaled, H100, **BATCH)
    shielded[(1, 0)](*tokens(0, 3), 1, 0, H=3, BT=16)
    assert [(start["grid"], start["B"]) for start in starts] == [((1, 0), 0)]


def test_an_axis_that_does_not_count_the_batch_is_refused_in_its_own_words() -> None:
    shielded, _ = watched(foreign.scaled, H100, batch={"x": 0, "o": 0}, batch_axis=1)
    with pytest.raises(flashlin.UnsupportedError, match="axis 2, need at most 65535"):
        shielded[(1, 12, 70000)](*tokens(2, 6), 1, 2, H=6, BT=16)


def test_boundaries_of_sequences_overlap_by_one() -> None:
    edges = torch.arange(6)
    assert part_of(edges, 0, 5, 2, 2).tolist() == [2, 3, 4] and part_of(torch.arange(10), 0, 5, 2,
                                                                        2).tolist() == [4, 5, 6, 7]


# --- offsets ---

def test_a_view_that_reaches_beyond_32_bits_counts_however_few_elements_it_has() -> None:
    x = torch.empty_strided((3, 1, 4), (2**30, 4, 1), device="meta")
    shielded, starts = watched(foreign.scaled, A100)
    with pytest.raises(flashlin.UnsupportedError,
                       match="reaches element 2147483651 with 32-bit offsets, need at most 2147483647"):
        shielded[(1, 3)](x, x, 4, 3, H=1, BT=16)
    shielded, starts = watched(foreign.scaled, A100, **BATCH)
    shielded[(1, 3)](x, x, 4, 3, H=1, BT=16)
    assert [start["grid"] for start in starts] == [(1, 2), (1, 1)]


def test_a_long_tensor_is_not_split_where_the_batch_cannot_be() -> None:
    x = torch.empty_strided((3, 1, 4), (2**30, 4, 1), device="meta")
    shielded, starts = watched(foreign.scaled, A100, **BATCH)
    with pytest.raises(flashlin.UnsupportedError,
                       match="batch_axis=1 has 4 programs, which is not a multiple of the batch size 3"):
        shielded[(1, 4)](x, x, 4, 3, H=1, BT=16)
    assert not starts


def test_a_kernel_with_64_bit_offsets_is_trusted_with_them() -> None:
    x = torch.empty_strided((2, 64), (2**31, 1), device="meta")
    shielded, starts = watched(foreign.precise, A100)
    shielded[(1,)](x, x, BN=64)
    assert len(starts) == 1


# --- warps ---

@pytest.mark.parametrize(("target", "asked", "planned"), [
    ("triton=3.2.0,sm=90", 8, 4), ("triton=3.3.1,sm=90", 8, 4), ("triton=3.2.0,sm=90", 16, 4),
    ("triton=3.2.0,sm=90", 4, 4), ("triton=3.2.0,sm=80", 8, 8), ("triton=3.6.0,sm=90", 8, 8),
    ("triton=3.6.0,sm=100", 8, 2)])
def test_warps_are_limited_where_the_compiler_or_the_card_fails(target: str, asked: int,
                                                                planned: int) -> None:
    shielded, starts = watched(foreign.states, target)
    k = torch.zeros(1, 64, 64, dtype=torch.bfloat16)
    shielded[(1,)](k, k, k, k, torch.zeros(1, 1), 64, K=64, V=64, BT=64, num_warps=asked)
    assert starts[0]["num_warps"] == planned


def test_a_matmul_is_no_recurrence_and_a_kernel_without_dots_has_no_limit() -> None:
    a = torch.zeros(64, 64, dtype=torch.bfloat16)
    shielded, starts = watched(foreign.product, "triton=3.6.0,sm=100")
    shielded[(1, 1)](a, a, a, 64, BN=64, num_warps=8)
    assert starts[0]["num_warps"] == 8
    shielded, starts = watched(foreign.scaled, H100)
    shielded[(1, 6)](*tokens(2, 3), 1, 2, H=3, BT=16, num_warps=8)
    assert starts[0]["num_warps"] == 8


def test_settings_are_obeyed_and_a_changed_one_is_noticed() -> None:
    shielded, starts = watched(foreign.through_a_helper, H100)
    x = torch.zeros(64, 64)
    for ignore in ("", "reshape-outs-32", ""):
        with flashlin.settings(ignore=ignore):
            shielded[(1,)](x, x, BN=64, num_warps=8)
    with flashlin.settings(policy="off"):
        shielded[(1,)](x, x, BN=64, num_warps=8)
    with flashlin.settings(path="torch"):
        shielded[(1,)](x, x, BN=64)
    assert [start.get("num_warps") for start in starts] == [4, 8, 4, 8, None]


# --- dtypes ---

def test_bf16_below_sm_80_goes_by_way_of_fp32_if_the_outputs_are_declared() -> None:
    shielded, starts = watched(foreign.scaled, T4, outputs=["o"])
    x, o = tokens(2, 3, 5, torch.bfloat16)
    x += torch.arange(5)
    kept = shielded._start

    def fill(*args: Any, **kwargs: Any) -> None:
        kept(*args, **kwargs)
        kwargs["o"].copy_(kwargs["x"] * 2)
    shielded._start = fill
    with pytest.warns(UserWarning, match="scaled runs on fp32 copies here. bf16-pre-ampere-32"):
        shielded[(1, 6)](x, o, 5, 2, H=3, BT=16)
    assert {starts[0][name].dtype for name in "xo"} == {torch.float32}
    assert torch.equal(o, 2 * x) and o.dtype == torch.bfloat16


def test_without_declared_outputs_it_is_refused_with_the_remedy() -> None:
    shielded, starts = watched(foreign.scaled, T4)
    with pytest.raises(flashlin.UnsupportedError,
                       match=r'do       shield\(..., outputs=\["name", ...\]\) names the tensors'):
        shielded[(1, 6)](*tokens(2, 3, 5, torch.bfloat16), 5, 2, H=3, BT=16)
    assert not starts


def test_strict_takes_no_fp32_copies_and_says_who_would() -> None:
    shielded, starts = watched(foreign.scaled, T4, outputs=["o"])
    with flashlin.settings(policy="strict"), pytest.raises(flashlin.UnsupportedError,
                                                           match="do       FLASHLIN_POLICY=auto allows fp32 "
                                                                 "copies"):
        shielded[(1, 6)](*tokens(2, 3, 5, torch.bfloat16), 5, 2, H=3, BT=16)
    assert not starts


def test_fp32_dots_on_a_t4_need_ieee_products() -> None:
    x = torch.zeros(64, 64)
    shielded, starts = watched(foreign.precise, T4)
    shielded[(1,)](x, x, BN=64)
    assert len(starts) == 1
    shielded, starts = watched(foreign.through_a_helper, T4)
    with pytest.raises(flashlin.UnsupportedError, match="tf32-dot-turing-32"):
        shielded[(1,)](x, x, BN=64)


def test_fp32_copies_keep_strides_and_shared_memory() -> None:
    packed = torch.randn(4, 6, dtype=torch.bfloat16)
    q, k, every, other = packed[:, :3], packed[:, 3:], packed[:1].expand(4, 6), torch.zeros(2)
    found = fp32_copies({"q": q, "k": k, "every": every, "other": other})
    assert set(found) == {"q", "k", "every"}
    for name, original in (("q", q), ("k", k), ("every", every)):
        assert found[name].stride() == original.stride() and torch.equal(found[name], original.float())
    assert found["q"].data_ptr() + 3 * 4 == found["k"].data_ptr()


def test_all_remedies_at_once() -> None:
    shielded, starts = watched(foreign.scaled, T4, outputs=["o"], **BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shielded[(1, 65538)](*tokens(10923, 6, 1, torch.bfloat16), 1, 10923, H=6, BT=16)
    assert [(start["grid"], start["x"].dtype) for start in starts] == [((1, 32772), torch.float32),
                                                                       ((1, 32766), torch.float32)]


# --- traits that are read from a kernel's source ---

def test_traits_are_read_from_the_source_and_from_what_it_calls() -> None:
    helper, scan, product, precise = (source.of(getattr(foreign, name))
                                      for name in ("through_a_helper", "states", "product", "precise"))
    assert helper.traits == product.traits == {"dot", "any_precision"}
    assert scan.traits == {"dot", "any_precision", "rmw_acc", "fresh_acc"}
    assert precise.wide and "any_precision" not in precise.traits and not scan.wide
    assert "dot" not in source.of(foreign.scaled).traits


def test_traits_of_operands_follow_from_their_types_and_the_tile() -> None:
    scan, product = (source.of(getattr(foreign, name)).traits for name in ("states", "product"))
    halves = frozenset({"bfloat16"})
    assert with_operands(scan, halves, tile=(("K", 256),)) == scan | {"half_dot", "bf16", "tall_state"}
    assert with_operands(product, frozenset({"float32"}), tile=(("K", 64),)) == product | {"fp32_dot", "tf32_dot"}
    assert with_operands(product, HALVES) == product | {"half_dot", "bf16", "both_halves"}
    # These are the traits on fp32 copies, and then the traits of a kernel that makes its own 16-bit operands.
    copied = with_operands(with_operands(product, HALVES), frozenset({"float32"}))
    assert copied == product | {"fp32_dot", "tf32_dot"}
    assert with_operands(product, frozenset(), half=True) == product | {"half_dot"}


@pytest.mark.parametrize(("loop", "state"), [
    ("h = h * d\n    o = tl.dot(q, h)", True), ("h *= d\n    s = h.to(t)\n    o += tl.dot(q, s)", True),
    ("x = tl.dot(q, k)\n    x = x * c\n    o = tl.dot(x, v)", False),
    ("o = o * a\n    o = tl.dot(p, v, o)", False), ("o += tl.dot(q, k)", False),
    ("h = d * h\n    o = tl.dot(input=h, other=q)", True)])
def test_a_recurrence_is_a_state_that_is_scaled_and_multiplied_by(loop: str, state: bool) -> None:
    assert ("rmw_acc" in source.read(f"def f():\n  for i in range(3):\n    {loop}").traits) is state


@pytest.mark.parametrize(("loop", "summed", "peeked"), [
    ("o += tl.sum(tl.load(x), 1)", True, False), ("o = tl.sum(tl.load(x), axis=-1) + o", True, False),
    ("b = tl.load(x)\n    o = tl.maximum(o, tl.max(input=b, axis=1))", True, False),
    ("r = tl.sum(tl.load(x), 1)\n    o += r", True, False),
    ("tl.store(p, o)\n    o += tl.sum(tl.load(x), 1)", True, True),
    ("o += tl.sum(tl.load(x), 1)\n    s = s + o", True, True),
    ("r = tl.sum(tl.load(x), 1)\n    o += r\n    tl.store(p, r)", True, False),
    ("b = tl.load(x)\n    o += tl.sum(b * b, 1)\n    tl.store(p, o)", False, False),
    ("o += tl.sum(tl.load(x))", False, False),
    ("o += tl.sum(tl.load(x), 0)\n    tl.store(p, o)", False, False),
    ("o = tl.sum(tl.load(x), 1)", False, False),
    ("o += tl.load(x)\n    tl.store(p, tl.sum(o, 1))", False, False),
    ("o = o * a + tl.sum(tl.load(x), 1)", False, False),
    # The inner loop's sum does not begin with a constant.
    ("for j in range(3):\n      o += tl.sum(tl.load(x), 1)\n    tl.store(p, o)", True, False)])
def test_sums_of_rows_that_a_loop_adds_up(loop: str, summed: bool, peeked: bool) -> None:
    found = source.read(f"def f():\n  for i in range(3):\n    {loop}").traits
    assert ("row_sums" in found, "read_row_sums" in found) == (summed, peeked)


def test_a_sum_that_its_loop_reads_is_refused_where_it_would_be_wrong() -> None:
    """A kernel whose loop reads a running sum of rows is refused where Triton computes it wrongly.

    It runs if the user ignores the known issue, or on a release without it.
    """
    x = torch.zeros(64, 64)
    shielded, starts = watched(foreign.running, A100)
    with pytest.raises(flashlin.UnsupportedError, match="row-sums-read-inside"):
        shielded[(1,)](x, x, 2, N=16)
    assert not starts
    with flashlin.settings(ignore="row-sums-read-inside"):
        shielded[(1,)](x, x, 2, N=16)
    shielded, later = watched(foreign.running, "triton=3.9.0,sm=80")
    shielded[(1,)](x, x, 2, N=16)
    assert len(starts) == len(later) == 1


# --- declarations, devices, errors ---

@pytest.mark.parametrize(("declared", "error", "says"), [
    (dict(batch={"y": 0}, batch_axis=1), ValueError,
     "batch: got 'y' as names of arguments, need one of x, o, T"),
    (dict(batch={"x": 0}), ValueError, "batch_axis: got None, need 0, 1 or 2"),
    (dict(batch={"x": 0}, batch_axis=3), ValueError, "batch_axis: got 3, need 0, 1 or 2"),
    (dict(outputs=["y"]), ValueError, "outputs: got 'y' as names"),
    (dict(outputs="o"), TypeError, "outputs: got the string 'o'"),
    (dict(batch_size="N"), ValueError, "batch_size: got 'N' as names"),
    (dict(batch=["x"], batch_axis=1), TypeError,
     r"batch: got \['x'\], need a dict of dimensions by name of the argument"),
    (dict(batch={"x": "0"}, batch_axis=1), TypeError,
     "batch: got '0' for x, need the number of a dimension, or None"),
    (dict(batch={"x": None, "o": None}, batch_axis=1), ValueError,
     "batch: got None for x, o, need the dimension of one tensor at least")])
def test_a_wrong_declaration_is_an_error_that_names_it(declared: dict[str, Any], error: type[Exception],
                                                       says: str) -> None:
    with pytest.raises(error, match=says):
        flashlin.shield(foreign.scaled, **declared)


def test_what_is_no_kernel_is_an_error() -> None:
    with pytest.raises(TypeError, match="kernel: got int, need a Triton kernel or a function"):
        flashlin.shield(3)
    with pytest.raises(ValueError, match="batch_axis: got 1, need none: <lambda> is a function"):
        flashlin.shield(lambda q: q, batch={"q": 0}, batch_axis=1)


@pytest.mark.parametrize(("declared", "error", "says"), [
    (dict(batch=["x"]), TypeError, r"batch: got \['x'\], need a dict"),
    (dict(batch={"y": 0}), ValueError, "batch: got 'y' as names of arguments, need one of x, n"),
    (dict(batch={"x": None}, batch_size="n"), ValueError, "batch: got None for x, need the dimension"),
    (dict(batch={"x": 0}, batch_size="m"), ValueError,
     "batch_size: got 'm' as names of arguments, need one of x, n")])
def test_a_wrong_declaration_for_a_function_is_the_same_error(declared: dict[str, Any],
                                                              error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        flashlin.shield(lambda x, n: x, **declared)


def test_a_function_without_a_signature_is_an_error() -> None:
    with pytest.raises(TypeError,
                       match=r"kernel: got <built-in method add of type .*, whose arguments Python cannot list, "
                             r"need a Triton kernel or"):
        flashlin.shield(torch.add)


def test_a_batch_that_the_argument_of_a_call_does_not_have_is_an_error() -> None:
    shielded, starts = watched(foreign.scaled, H100, batch={"x": 7}, batch_axis=1)
    with pytest.raises(ValueError,
                       match=r"batch: got dimension 7 of x, need one of the 3 of its shape \(2, 3, 1\)"):
        shielded[(1, 6)](*tokens(2, 3), 1, 2, H=3, BT=16)
    shielded, starts = watched(foreign.scaled, H100, batch={"T": 0}, batch_axis=1)
    with pytest.raises(TypeError, match="batch: got dimension 0 of T, which is of type int, need a tensor"):
        shielded[(1, 6)](*tokens(2, 3), 1, 2, H=3, BT=16)
    for dimension in (7, -2):
        with pytest.raises(ValueError,
                           match=rf"batch: got dimension {dimension} of x, need one of the 1 of its shape "
                                 r"\(4,\)"):
            flashlin.shield(lambda x: x, batch={"x": dimension})(torch.zeros(4))
    assert not starts


# --- shielded functions; tests/interpret tests their launches ---

def test_a_function_of_an_empty_batch_is_called_once() -> None:
    calls: list[int] = []

    def twice(x: torch.Tensor, n: int = 0) -> Any:
        calls.append(n)
        return 2 * x, {"sum": x.sum(1)}
    for size in (None, "n"):
        found, rest = flashlin.shield(twice, batch={"x": 0}, batch_size=size)(torch.zeros(0, 3))
        assert found.shape == (0, 3) and rest["sum"].shape == (0,)
    assert calls == [0, 0]


def test_a_function_without_any_tensor_that_has_the_batch_is_called_as_it_is() -> None:
    calls: list[int] = []

    def count(n: int, x: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(n)
        return torch.arange(n)
    assert flashlin.shield(count, batch={"x": 0}, batch_size="n")(5).tolist() == [0, 1, 2, 3,
                                                                                  4] and calls == [5]


class Nested(torch.autograd.Function):
    """A function whose backward runs another backward, as checkpoints do; it raises if ``fails`` is set."""
    seen: ClassVar[list[int]] = []
    fails = False

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, do: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = do.detach().requires_grad_()
            inner = Noting.apply(x)
        grad, = torch.autograd.grad(inner, x, do)
        if Nested.fails:
            raise RuntimeError("out of luck")
        return 2 * grad


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(context: Any, do: torch.Tensor) -> torch.Tensor:
        Nested.seen.append(functions._inside.depth)
        return do * 1


def test_backward_is_inside_while_it_runs_and_after_a_failure_no_more(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nested, "seen", [])
    shielded, x = flashlin.shield(lambda x: Nested.apply(x) * 3), torch.ones(4, requires_grad=True)
    shielded(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6] * 4 and Nested.seen == [
        1] and functions._inside.depth == 0
    monkeypatch.setattr(Nested, "fails", True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            shielded(x).sum().backward()
        assert functions._inside.depth == 0
    Noting.apply(x).sum().backward()
    assert Nested.seen == [1, 1, 1, 0]


def test_a_graph_does_not_outlive_its_tensors() -> None:
    gc.disable()
    try:
        o = flashlin.shield(Nested.apply)(torch.ones(4, requires_grad=True))
        node = weakref.ref(o.grad_fn)
        del o
        assert node() is None
    finally:
        gc.enable()


class WithoutContext(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.scale = inputs[1]


@pytest.mark.parametrize(("kind", "names"), [(Nested, ["x"]), (WithoutContext, ["x", "scale"])])
def test_apply_of_an_autograd_function_has_the_arguments_of_its_forward(kind: Any, names: list[str]) -> None:
    """Torch 2.14 made ``apply`` a builtin, for which Python lists no arguments."""
    assert is_apply(kind.apply) and not is_apply(kind.forward) and not is_apply(torch.ones)
    assert [*signature_of(kind.apply).parameters] == names
    x = torch.ones(4)
    assert torch.equal(flashlin.shield(kind.apply, batch={"x": 0})(x), kind.apply(x))
    with pytest.raises(ValueError, match="batch: got 'y' as names of arguments, need one of"):
        flashlin.shield(kind.apply, batch={"y": 0})


def test_a_launch_happens_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Device:
        def __init__(self, card: int) -> None:
            self.card = card

        def __enter__(self) -> None:
            entered.append(self.card)

        def __exit__(self, *error: object) -> None:
            entered.append(-self.card)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for card in (3, 0):
        shielded, starts = watched(foreign.scaled, H100)
        monkeypatch.setattr(shielded, "_device", lambda tensors, card=card: torch.device("cuda", card))
        shielded._start = lambda *args, **kwargs: entered.append(100)
        shielded[(1, 6)](*tokens(2, 3), 1, 2, H=3, BT=16)
        shielded.warmup(*tokens(2, 3), 1, 2, H=3, BT=16, grid=(1, 6))
    assert entered == [3, 100, -3, 100, 100, 100]


def test_an_amd_card_has_the_limits_of_grids_only() -> None:
    shielded, starts = watched(foreign.scaled, "triton=3.6.0,sm=94,backend=hip", **BATCH)
    shielded[(1, 65538)](*tokens(10923, 6), 1, 10923, H=6, BT=16, num_warps=16)
    assert [(start["grid"], start["num_warps"]) for start in starts] == [((1, 32772), 16), ((1, 32766), 16)]


def test_a_shield_can_be_copied() -> None:
    assert copy.copy(flashlin.shield(foreign.scaled)).kernel is foreign.scaled


def test_a_shield_around_a_shield_replaces_it() -> None:
    once = flashlin.shield(foreign.scaled)
    again = flashlin.shield(once, outputs=["o"])
    assert again.kernel is foreign.scaled and again.declared.outputs == ("o",) and not once.declared.outputs


def test_tensors_on_two_devices_are_named() -> None:
    shielded, _ = watched(foreign.scaled, H100)
    with pytest.raises(ValueError, match="scaled: got o on meta, x on cpu, need all tensors on one device"):
        shielded[(1, 6)](torch.zeros(6), torch.zeros(6, device="meta"), 1, 2, H=3, BT=16)


def test_cpu_tensors_are_refused_by_the_plan_not_by_the_driver() -> None:
    with pytest.raises(flashlin.UnsupportedError, match="tensors on the CPU"):
        flashlin.shield(foreign.scaled)[(1, 6)](*tokens(2, 3), 1, 2, H=3, BT=16)


# --- cached decisions ---

def test_a_decision_is_made_once_per_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    shielded, starts = watched(foreign.scaled, H100, **BATCH)
    asked = []
    monkeypatch.setattr(shielding, "planned",
                        lambda *call, plan=shielding.planned: asked.append(call[0]) or plan(*call))
    for B in (2, 2, 3, 2):
        shielded[(1, 3 * B)](*tokens(B, 3), 1, B, H=3, BT=16)
    assert [problem.B for problem in asked] == [2, 3] and len(starts) == 4
    pretend(parse("triton=3.6.0,sm=90"))
    shielded[(1, 6)](*tokens(2, 3), 1, 2, H=3, BT=16)
    assert len(asked) == 3
    monkeypatch.setattr(shielding, "REMEMBERED", 2)
    shielded[(1, 12)](*tokens(4, 3), 1, 4, H=3, BT=16)
    assert len(shielded._decided) == 1


def test_a_launch_in_parts_is_looked_at_each_time() -> None:
    shielded, starts = watched(foreign.scaled, H100, **BATCH)
    shielded[(1, 65538)](*tokens(10923, 6), 1, 10923, H=6, BT=16)
    with pytest.raises(flashlin.UnsupportedError,
                       match="o: dimension 0 has 10923 elements, need a multiple of the batch of 32769"):
        shielded[(1, 65538)](tokens(32769, 2)[0], tokens(10923, 6)[0], 1, 32769, H=6, BT=16)
    assert len(starts) == 2


def test_the_limit_is_the_one_of_the_checks(axis_limits: Callable[..., None]) -> None:
    axis_limits(2**31 - 1, 4, 4)
    shielded, starts = watched(foreign.scaled, "triton=3.7.0,sm=90", **BATCH)
    shielded[(1, 10)](*tokens(5, 2), 1, 5, H=2, BT=16)
    assert [start["grid"] for start in starts] == [(1, 4), (1, 4), (1, 2)]


def test_what_is_around_a_kernel_stays_and_the_kernel_itself_is_untouched() -> None:
    inner = triton.autotune([triton.Config({}, num_warps=8)], key=["T"])(foreign.scaled)
    tuned = triton.heuristics({"BT": lambda given: 16 if given["T"] < 64 else 64})(inner)
    shielded, starts = watched(tuned, H100, **BATCH)
    assert type(shielded) is type(tuned) and shielded is not tuned and tuned.fn.fn is foreign.scaled
    shielded[(1, 6)](*tokens(2, 3), 1, 2, H=3)
    assert (starts[0]["BT"], starts[0]["num_warps"], starts[0]["grid"]) == (16, 8, (1, 6))


def test_on_every_machine_a_planned_launch_answers_every_check_and_a_refusal_has_no_remedy_left() -> None:
    declared = Declared({"k": 0}, 0, None, ("h",))
    k = torch.zeros(70000, 64, 64, dtype=torch.bfloat16, device="meta")
    named = dict(k=k, h=k, K=256, V=64, BT=64, num_warps=16)
    asked = problem_of("states", source.of(foreign.states), declared, named, ["K", "V", "BT"], (70000, 70000))
    seen = set()
    for triton_version in supported():
        for sm in (60, 70, 75, 80, 89, 90, 100, 103, 120):
            for problem in (asked,
                            asked._replace(given=asked.given._replace(
                                    launch=asked.given.launch._replace(grid=(70000, 1))))):
                plan = flashlin.plan(problem, parse(f"triton={triton_version},sm={sm}"))
                seen.add(plan.path)
                draft = checks.Draft(plan.problem, FAMILIES["shield"], plan.launches, plan.target, Policy())
                for check in checks.CHECKS:
                    assert plan.refused or not list(check(draft))
                for reason in plan.refused:
                    for name in reason.remedies:
                        assert REMEDIES[name].rewrite(plan.problem, plan.target, reason) is None, reason
                    assert str(flashlin.UnsupportedError(plan))
    assert seen == {"triton", "refused"}
