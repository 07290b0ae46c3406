"""The ``entry`` decorator of the public functions (ops/_common/entry.py).

Autocast does not change the result of an op. Lazily negated or conjugated tensors are read with their true
values. tests/autocast.py has the helpers.
"""
from __future__ import annotations

import gc
import inspect
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashlin
from flashlin import mamba, serving
from flashlin.compat import launch as door
from flashlin.compat import target as machine
from flashlin.compat.target import parse
from flashlin.kernels.families import PUBLIC
from flashlin.ops._common import ranks
from flashlin.ops._common.entry import is_entry
from tests import hostile
from tests.autocast import (
    BF16,
    F16,
    WRITTEN,
    Call,
    calls,
    changed,
    differences,
    misread,
    negated,
    results,
    tensors_of,
)

HOPPER = parse("triton=3.6.0,sm=90")


# --- every public function has the entry decorator ---

def functions() -> dict[str, Callable[..., Any]]:
    places: list[tuple[Any, list[str]]] = [(flashlin, [*PUBLIC]), (mamba, mamba.__all__),
                                           (serving, serving.__all__)]
    found = {f"{module.__name__}.{name}": getattr(module, name) for module, names in places for name in names}
    return {name: x for name, x in found.items() if not inspect.isclass(x)}


@pytest.mark.parametrize("name", functions())
def test_every_public_function_has_the_entry(name: str) -> None:
    function = functions()[name]
    assert is_entry(function), f"{name}: put @entry before it (flashlin/ops/_common/entry.py)"
    within = inspect.unwrap(function)
    assert inspect.signature(function) == inspect.signature(within) and function.__doc__ == within.__doc__
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_function_without_the_entry_is_found() -> None:
    assert not is_entry(inspect.unwrap(flashlin.chunk_gla)) and not is_entry(F.linear)


# --- autocast ---

@pytest.mark.parametrize("call", [*calls()], ids=str)
@pytest.mark.alternate
def test_autocast_changes_nothing(call: Call) -> None:
    assert changed(call) == []


@pytest.mark.parametrize("op", [op for op in hostile.OPS if "norm_linear" in op or "gate_linear" in op])
def test_only_the_product_of_a_linear_layer_is_in_the_autocast_dtype(op: str) -> None:
    torch.manual_seed(0)
    given = {**hostile.arguments(op), "prenorm": False}
    if op == "layer_norm_linear":
        given["num_groups"] = 1
    weight, bias = given.pop("linear_weight"), given.pop("linear_bias")
    norm = op.removesuffix("_linear").replace("_swish_gate", "_gated")
    named = {name.removeprefix("norm_"): x for name, x in given.items()}
    accepted = inspect.signature(getattr(flashlin, norm)).parameters
    y = getattr(flashlin, norm)(**{name: x for name, x in named.items() if name in accepted})
    for dtype in (BF16, F16):
        with torch.autocast("cpu", dtype):
            out = getattr(flashlin, op)(**given, linear_weight=weight, linear_bias=bias)
            assert out.dtype == dtype and torch.equal(out, F.linear(y, weight, bias))


def inner(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return arguments of mamba_inner_fn."""
    torch.manual_seed(0)
    D, N, R = 6, 4, 3
    return {"xz": torch.randn(2, 2 * D, 9, dtype=dtype), "conv1d_weight": torch.randn(D, 1, 4),
            "conv1d_bias": torch.randn(D), "x_proj_weight": torch.randn(R + 2 * N, D),
            "delta_proj_weight": torch.randn(D, R), "out_proj_weight": torch.randn(5, D),
            "out_proj_bias": None, "A": -torch.rand(D, N), "D": torch.randn(D), "delta_bias": torch.randn(D)}


def layer_by_ops(xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor, x_proj_weight: Tensor,
                 delta_proj_weight: Tensor, out_proj_weight: Tensor, out_proj_bias: None, A: Tensor,
                 D: Tensor, delta_bias: Tensor) -> Tensor:
    """Compute mamba_inner_fn by separate ops, as a model would."""
    x, z = xz.chunk(2, 1)
    u: Any = flashlin.causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    dt, B, C = F.linear(u.mT, x_proj_weight).split([3, 4, 4], -1)
    dt = F.linear(dt, delta_proj_weight)
    y: Any = flashlin.selective_scan_fn(u, dt.mT, A, B.mT, C.mT, D, z, delta_bias, True)
    return F.linear(y.mT, out_proj_weight)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("of_xz", [torch.float32, BF16], ids=str)
def test_a_mamba_layer_under_autocast_is_its_ops_and_linear_layers(dtype: torch.dtype,
                                                                   of_xz: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        assert torch.equal(mamba.mamba_inner_fn(**inner(of_xz)), layer_by_ops(**inner(of_xz)))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_mamba2_layer_under_autocast_rounds_its_product_alone(dtype: torch.dtype) -> None:
    op = "mamba_split_conv1d_scan_combined"
    given = {**hostile.arguments(op), "outproj_weight": None, "outproj_bias": None}
    weight, bias = torch.randn(5, hostile.H * hostile.D), torch.randn(5)
    y, states = flashlin.mamba_split_conv1d_scan_combined(**given)
    with torch.autocast("cpu", dtype):
        out, found = flashlin.mamba_split_conv1d_scan_combined(
            **{**given, "outproj_weight": weight, "outproj_bias": bias})
        assert out.dtype == dtype and torch.equal(out, F.linear(y, weight, bias))
        assert torch.equal(found, states)


def test_gradients_of_a_linear_layer_do_not_depend_on_autocast_in_backward() -> None:
    op = "rms_norm_linear"
    call = Call(op, "", partial(hostile.arguments, op), flashlin.rms_norm_linear)
    torch.manual_seed(0)
    wanted = results(call, forward=BF16)
    for backward in (BF16, F16):
        torch.manual_seed(0)
        assert differences(wanted, results(call, forward=BF16, backward=backward)) == []


@pytest.mark.parametrize("op", ["chunk_simple_gla", "chunk_gated_delta_rule", "rms_norm"])
def test_second_order_gradients_do_not_depend_on_autocast(op: str) -> None:
    names = ("q", "k", "v", "g", "beta", "x", "weight", "bias")
    given = {name: x for name, x in hostile.arguments(op).items() if name in names}
    leaves = [x.requires_grad_() for x in given.values()]

    def second(first: Any, last: Any) -> tuple[Tensor, ...]:
        o = tensors_of(getattr(flashlin, op)(**given))[0]
        with torch.autocast("cpu", first or BF16, enabled=first is not None):
            gradients = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
        with torch.autocast("cpu", last or BF16, enabled=last is not None):
            return torch.autograd.grad([x.square().sum() for x in gradients], leaves)
    wanted = second(None, None)
    for under in ((BF16, BF16), (None, F16)):
        assert differences([*wanted], [*second(*under)]) == [], under


class Around(nn.Module):
    """A model with an op between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.before(one).unflatten(-1, (2, 8)) for one in (x, x + 1, x - 1))
        o, _ = flashlin.chunk_simple_gla(q, k, v, -v.float().square().mean(-1))
        return self.after(o.flatten(2))


LONG = """
import threading
import torch
import flashlin

def run():
    k = torch.randn(1, 8000, 1, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        flashlin.fused_recurrent_delta_rule(k, k, k, beta=torch.rand(1, 8000, 1))[0].sum().backward()
    one, state = k[:, :1], None
    for _ in range(400):
        _, state = flashlin.fused_recurrent_delta_rule(one, one, one, initial_state=state, output_final_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        state.sum().backward()
    print("done")

threading.stack_size(2**18)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_a_long_graph_ends_without_a_crash() -> None:
    """The process frees the autograd graphs of a long op and of many ops without a crash.

    If Python code has held the nodes, newer torch frees them recursively. This can overflow the stack, which
    has 256 KiB here.
    """
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, timeout=100,
                          check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


class Kept:
    """An object in the metadata of an autograd node, which lives as long as the node."""


def test_a_graph_is_freed_at_once_after_backward_under_autocast() -> None:
    """The graph is freed without Python's garbage collector.

    No hook of a node may refer to that node, because only the collector could free such a graph.
    """
    q = torch.randn(1, 4, 1, 2, requires_grad=True)
    gc.disable()
    try:
        for again in ({}, {"retain_graph": True}, {"create_graph": True}):
            o = flashlin.fused_recurrent_gated_delta_rule(q, q, q)[0]
            assert o.grad_fn is not None
            o.grad_fn.metadata["kept"] = kept = Kept()
            gone = weakref.ref(kept)
            with torch.autocast("cpu", BF16):
                gradient, = torch.autograd.grad(o.sum(), q, **again)
            del o, gradient, kept
            assert gone() is None, again
    finally:
        gc.enable()


def test_autocast_of_what_is_around_an_op_stays() -> None:
    """Only the nodes of the op run without autocast.

    The layers of the model keep autocast in forward and backward.
    """
    torch.manual_seed(0)
    model, x = Around(), torch.randn(1, 6, 8)
    seen: list[bool] = []
    with torch.autocast("cpu", BF16):
        y = model(x)
        assert y.dtype == BF16 and torch.is_autocast_enabled("cpu")
        for layer in (model.before, model.after):
            layer.weight.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        y.float().sum().backward()
    assert seen == [True, True]


@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "chunk_simple_gla", "chunk_gla",
                                "fused_recurrent_delta_rule", "selective_scan_fn"])
def test_writing_into_an_output_does_not_bring_autocast_back(op: str, quick: dict[str, Call]) -> None:
    """Backward still runs without autocast after a write to an output.

    Outputs may be views, and torch replaces the node of a view after a write.
    """
    def written(**given: Any) -> Any:
        o = tensors_of(quick[op].function(**given))[0]
        o += 1
        o[:, :1].mul_(2)
        return o
    wanted = results(quick[op], function=written)
    assert differences(wanted, results(quick[op], function=written, backward=BF16)) == []


# --- lazily negated and conjugated tensors ---

def test_the_negated_tensors_of_users_are_such() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    assert z.conj().imag.is_neg() and negated(z.real).is_neg() and torch.equal(negated(z.real), z.real)


@pytest.fixture
def read() -> Iterator[list[Tensor]]:
    """Collect the tensors that kernels get on a simulated Hopper GPU. No kernel runs."""
    found: list[Tensor] = []

    def keep(launch: Any, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        found.extend(x for x in arguments.values() if isinstance(x, Tensor))
    machine.pretend(HOPPER)
    door.replace_starter(keep)
    yield found
    door.replace_starter(None)
    machine.pretend(None)


IN_TORCH = {"mamba.causal_conv1d_varlen_states"}  # uses only torch operations


def with_negated(call: Call, name: str) -> Callable[..., Any]:
    """Return the function of the call with the named argument lazily negated."""
    return lambda **given: call.function(**{**given, name: negated(given[name])})


@pytest.mark.parametrize("call", [*calls("arguments beside")], ids=str)
@pytest.mark.alternate
def test_no_kernel_reads_a_negated_tensor(call: Call, read: list[Tensor]) -> None:
    names = [name for name, x in call.make().items()
             if any(one.dtype != torch.bool for one in tensors_of(x))]
    for name in names:
        try:
            results(call, function=with_negated(call, name))
        except ValueError as error:
            assert name in WRITTEN or call.op == "rotary_embedding", error
            assert f"{name}: got a lazily negated or conjugated tensor" in str(error)
        assert not [x for x in read if x.is_neg()], name
    results(call, cotangent=negated)
    assert not [x for x in read if x.is_neg()], "gradients"
    assert read or call.op in IN_TORCH


@pytest.mark.parametrize("call", [*calls("quick beside")], ids=str)
def test_negated_tensors_are_their_numbers(call: Call) -> None:
    assert misread(call) == []


@pytest.mark.parametrize(("op", "name"), [
    ("selective_state_update", "state"), ("causal_conv1d_update", "cache"),
    ("mamba_causal_conv1d_update", "conv_state"), ("causal_conv1d_fn", "final_states_out")])
def test_a_negated_state_that_is_overwritten_is_an_error(op: str, name: str) -> None:
    given = hostile.arguments(op)
    for lazily in (torch._neg_view(given[name].clone()), torch.complex(given[name], given[name]).conj().imag):
        with pytest.raises(ValueError, match=rf"^{name}: got a lazily negated .*, need {name}\.resolve_neg"):
            getattr(flashlin, op)(**{**given, name: lazily})
        kept = lazily.resolve_neg()
        getattr(flashlin, op)(**{**given, name: kept})


def test_a_negated_pool_is_an_error_and_a_negated_state_that_is_only_read_is_not() -> None:
    q, g, state = torch.randn(1, 2, 2, 8), -torch.rand(1, 2, 2), torch.randn(3, 2, 8, 8)
    op = partial(flashlin.fused_recurrent_gated_delta_rule, q, q, q, g, initial_state=negated(state))
    with pytest.raises(ValueError, match="initial_state: got a lazily negated"):
        op(state_indices=torch.tensor([1]), state_v_first=True)
    with pytest.raises(ValueError, match="x: got a lazily negated"):
        flashlin.rotary_embedding(negated(q), torch.ones(2, 4), torch.ones(2, 4), inplace=True)


def test_complex_tensors_are_refused_conjugated_or_not() -> None:
    z = torch.randn(1, 4, 2, 8, dtype=torch.complex64)
    for q in (z, z.conj()):
        with pytest.raises(TypeError, match=r"q: got dtype torch\.complex64"):
            flashlin.chunk_delta_rule(q, z.real, z.real, torch.rand(1, 4, 2))


def test_warnings_of_an_op_name_the_line_of_the_user() -> None:
    q = torch.randn(1, 2, 2, 8)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is now called") as told:
        flashlin.chunk_gated_delta_rule(q, q, q, q[..., 0], q[..., 0], transpose_state_layout=True)
    assert told[0].filename == __file__


# --- torch.compile ---

COMPILED = ("chunk_gated_delta_rule", "chunk_simple_gla", "mamba3_siso_combined", "selective_state_update",
            "parallel_simple_gla", "rms_norm_gated")


@pytest.fixture(scope="module")
def quick() -> dict[str, Call]:
    return {call.op: call for call in reversed([*calls("quick")])}


@pytest.mark.parametrize("op", COMPILED)
@pytest.mark.alternate
def test_compiled_ops_are_the_same_under_autocast_and_of_negated_tensors(op: str,
                                                                         quick: dict[str, Call]) -> None:
    """Compiled ops give equal results under autocast and for lazily negated tensors.

    Autocast leads to another compiled graph, so the last bits of the results may differ.
    """
    call = quick[op]
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    wanted = results(call, function=compiled)

    def lazily(**given: Any) -> Any:
        return compiled(**{name: negated(x) for name, x in given.items()})
    for found in (results(call, function=compiled, forward=BF16),
                  results(call, function=lazily, cotangent=negated)):
        assert [x.dtype for x in found] == [x.dtype for x in wanted]
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * y.abs().max().item())


def test_a_compiled_norm_with_a_linear_layer_multiplies_in_the_autocast_dtype() -> None:
    torch.manual_seed(0)
    given = hostile.arguments("rms_norm_linear")
    call = Call("rms_norm_linear", "", lambda: given, flashlin.rms_norm_linear)
    compiled = torch.compile(flashlin.rms_norm_linear, fullgraph=True, backend="aot_eager")
    for x, y in zip(results(call, forward=BF16), results(call, forward=BF16, function=compiled), strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def test_an_exported_op_is_the_same_under_autocast() -> None:
    class Exported(nn.Module):
        def forward(self, q: Tensor, g: Tensor) -> Tensor:
            return flashlin.chunk_gla(q, q, q, g)[0]
    q, g = torch.randn(1, 70, 2, 8), -torch.rand(1, 70, 2, 8)
    wanted = Exported()(q, g)
    program = torch.export.export(Exported(), (q, g))
    with torch.autocast("cpu", BF16):
        within = torch.export.export(Exported(), (q, g))
        for exported in (program, within):
            torch.testing.assert_close(exported.module()(q, g), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(within.module()(q, g), wanted, rtol=1e-5, atol=1e-5)


def test_a_negated_gradient_is_exchanged_between_ranks_as_its_numbers() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = torch.randn(1, 3, requires_grad=True)
        y = ranks._Exchange.apply("op", None, x, None, None)
        dy = torch.randn(1, 3)
        gradient, = torch.autograd.grad(y, x, negated(dy))
        assert torch.equal(y, x) and torch.equal(gradient, dy)
    finally:
        torch.distributed.destroy_process_group()
