"""The norms followed by a linear layer.

The tests cover the tensors that forward keeps for backward, autocast, modules, exact error texts and
torch.compile.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
import flashlin.modules
from flashlin.testing.cases.norm_linear import CASES
from flashlin.testing.compare import Case, check

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("torch_path")


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape,
                       generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_path_is_the_reference_in_float64(case: Case) -> None:
    assert all(verdict.ok for verdict in check(case, CPU, torch.float64))


def test_gradients_are_those_of_differences() -> None:
    tensors = [randn(*shape, dtype=torch.float64, grad=True)
               for shape in ((3, 6), (6,), (6,), (4, 6), (4,), (3, 6))]
    assert torch.autograd.gradcheck(lambda *all: flashlin.group_norm_linear(*all, prenorm=True, num_groups=2),
                                    tensors)
    x, *rest = tensors
    assert torch.autograd.gradcheck(lambda g, *all: flashlin.layer_norm_swish_gate_linear(x, g, *all,
                                                                                          prenorm=True),
                                    (tensors[-1], *rest))


@pytest.mark.parametrize("gated", [False, True])
def test_the_normalised_rows_are_not_kept_and_the_product_is_not_made_again(gated: bool,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlin.ops import norm_linear
    x, w, weight = randn(50, 16, grad=True), randn(16, grad=True), randn(8, 16, grad=True)
    given, kept = {t.data_ptr() for t in (x, w, weight)}, []

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in given:
            kept.append(t)
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = flashlin.rms_norm_swish_gate_linear(x, x, w, None, weight,
                                                  None) if gated else flashlin.rms_norm_linear(x, w, None,
                                                                                               weight, None)
    assert not [t for t in kept if t.numel() >= x.numel()]
    made = []

    def noting(*arguments: Any) -> torch.Tensor:
        made.append(arguments)
        found = torch._C._nn.linear(*arguments)
        made.append("done")
        return found
    monkeypatch.setattr(norm_linear.F, "linear", noting)
    out.sum().backward()
    assert "done" not in made and x.grad is not None and w.grad is not None and weight.grad is not None


def test_nothing_is_set_aside_where_nothing_wants_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlin.ops import norm_linear
    monkeypatch.setattr(norm_linear, "checkpoint", None)
    flashlin.rms_norm_linear(randn(5, 16), randn(16), None, randn(8, 16), None)
    with torch.no_grad():
        flashlin.rms_norm_linear(randn(5, 16, grad=True), randn(16), None, randn(8, 16), None)


@pytest.mark.parametrize("gated", [False, True])
def test_the_autocast_dtype_is_the_linear_layers_in_backward_too(gated: bool) -> None:
    x, w, weight, bias = randn(50, 16, grad=True), randn(16, grad=True), randn(8, 16, grad=True), randn(8,
                                                                                                        grad=True)
    extra = (x,) if gated else ()
    with torch.autocast("cpu", torch.bfloat16):
        out = (flashlin.rms_norm_swish_gate_linear if gated else flashlin.rms_norm_linear)(x, *extra, w, None,
                                                                                           weight, bias)
    y = flashlin.rms_norm_gated(x, x, w, None) if gated else flashlin.rms_norm(x, w, None)
    expected = F.linear(y.bfloat16(), weight.bfloat16(), bias.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    for got, wanted in zip(*(torch.autograd.grad(o.float().sin().sum(), (x, w, weight, bias))
                             for o in (out, expected)), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted)


def test_weights_of_another_dtype_are_used_in_that_of_x() -> None:
    x, weight = randn(5, 16, dtype=torch.bfloat16), randn(8, 16, grad=True)
    out, total = flashlin.layer_norm_linear(x, randn(16), randn(16), weight, None, randn(5, 16), prenorm=True)
    assert out.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.autograd.grad(out.sum(), weight)[0].dtype == torch.float32


# Modules

LINEAR = {"LayerNormLinear": "layer_norm_linear", "RMSNormLinear": "rms_norm_linear",
          "FusedLayerNormGatedLinear": "layer_norm_swish_gate_linear",
          "FusedRMSNormGatedLinear": "rms_norm_swish_gate_linear",
          "FusedLayerNormSwishGateLinear": "layer_norm_swish_gate_linear",
          "FusedRMSNormSwishGateLinear": "rms_norm_swish_gate_linear"}


@pytest.mark.parametrize("name", LINEAR)
def test_modules_call_their_function(name: str) -> None:
    module = getattr(flashlin.modules, name)(16, eps=0.1)
    assert list(module.state_dict()) == ["weight"] and getattr(flashlin, name) is type(module)
    torch.nn.init.normal_(module.weight)
    x, g, weight, bias = randn(5, 16), randn(6, 16)[:5], randn(8, 16), randn(8)
    gate = (g,) if "Gate" in name else ()
    got = module(x, *gate, weight, bias, residual=g, prenorm=True)
    expected = getattr(flashlin, LINEAR[name])(x, *gate, module.weight, None, weight, bias, residual=g,
                                               prenorm=True, eps=0.1)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert getattr(flashlin.modules, name)(16, elementwise_affine=False).weight is None


def test_group_norm_linear_module() -> None:
    module = flashlin.GroupNormLinear(4, 16, bias=True, is_rms_norm=True)
    x, weight = randn(5, 16), randn(8, 16)
    assert list(module.state_dict()) == ["weight", "bias"]
    expected = F.linear(flashlin.group_norm(x, module.weight, module.bias, is_rms_norm=True, num_groups=4),
                        weight)
    torch.testing.assert_close(module(x, weight, None), expected)


@pytest.mark.parametrize(("name", "parameters"),
                         [("FusedLayerNormSwishGate", ["weight", "bias"]),
                          ("FusedRMSNormSwishGate", ["weight"])])
def test_swish_gates_are_the_gated_norms(name: str, parameters: list[str]) -> None:
    bias = {"bias": True} if len(parameters) == 2 else {}
    module = getattr(flashlin, name)(16, **bias)
    plain = getattr(flashlin, name.replace("SwishGate", "Gated"))(16, **bias)
    assert list(module.state_dict()) == parameters
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(randn(5, 16), randn(6, 16)[:5]), plain(randn(5, 16), randn(6, 16)[:5]),
                               rtol=0, atol=0)


X, W, LINES = torch.zeros(3, 8), torch.zeros(8), torch.zeros(4, 8)
plain, gated = flashlin.layer_norm_linear, flashlin.rms_norm_swish_gate_linear


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: plain([1.0], W, W, LINES, None), TypeError, "x: got list, need a tensor of shape [..., D]"),
    (lambda: plain(X, W[:7], W, LINES, None), ValueError, "norm_weight: got shape [7], need [D] = [8]"),
    (lambda: plain(X, W, X, LINES, None), ValueError, "norm_bias: got shape [3, 8], need [D] = [8]"),
    (lambda: plain(X, W, W, None, None), TypeError,
     "linear_weight: got NoneType, need a tensor of shape [E, D]"),
    (lambda: plain(X, W, W, LINES[:, :7], None), ValueError,
     "linear_weight: got shape [4, 7], need [E, D] = [any, 8]"),
    (lambda: plain(X, W, W, LINES.int(), None), TypeError,
     "linear_weight: got dtype torch.int32, need bfloat16, float16, float32 or float64"),
    (lambda: plain(X, W, W, LINES.to("meta"), None), ValueError,
     "linear_weight: got device meta, need cpu, where x is"),
    (lambda: plain(X, W, W, LINES, W), ValueError, "linear_bias: got shape [8], need [E] = [4]"),
    (lambda: plain(X, W, W, LINES, None, X[:2]), ValueError,
     "residual: got shape [2, 8], need x's shape = [3, 8]"),
    (lambda: plain(X, W, W, LINES, None, num_groups=3), ValueError,
     "num_groups: got 3, need a divisor of D = 8"),
    (lambda: plain(X, W, W, LINES, None, eps=-1), ValueError, "eps: got -1, need a number of at least 0"),
    (lambda: gated(X, X[0], W, None, LINES, None), ValueError, "g: got shape [8], need x's shape = [3, 8]"),
    (lambda: gated(X, None, W, None, LINES, None), TypeError,
     "g: got NoneType, need a tensor of shape x's shape"),
])
def test_wrong_arguments_are_named(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_compiles_to_one_graph_for_all_numbers_of_rows() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    graphs = CompileCounterWithBackend("aot_eager")
    module = flashlin.FusedRMSNormSwishGateLinear(8)
    weight = randn(5, 8, grad=True)
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for N in (3, 5, 9, 40):
        x = randn(N, 8, grad=True)
        found = [(out, *torch.autograd.grad(out.sin().sum(), (x, weight)))
                 for out in (f(x, x, weight) for f in (compiled, module))]
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted)
    assert graphs.frame_count <= 2
