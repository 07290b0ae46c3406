"""Checks of values in debug mode (ops/_common/numerics.py), and of one step (diagnostics/one_step.py)."""
from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashlin
from flashlin.ops._common import numerics
from tests.autocast import Call, calls, results

B, T, H, K = 2, 32, 2, 16
FULL = (B, T, H, K)


@pytest.fixture
def debug() -> Iterator[None]:
    with flashlin.settings(debug=True), warnings.catch_warnings():
        warnings.simplefilter("error", numerics.NumericsWarning)
        yield


def inputs(**changed: Any) -> dict[str, Any]:
    """Return valid inputs of the gated delta rule with some of them replaced."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(FULL, generator=draw) for _ in range(3))
    g, beta = (torch.randn(B, T, H, generator=draw) for _ in range(2))
    return {"q": q, "k": F.normalize(k, dim=-1), "v": v, "g": F.logsigmoid(g),
            "beta": beta.sigmoid()} | changed


def spoiled(x: Tensor, *index: int, by: float = float("nan")) -> Tensor:
    x = x.clone()
    x[index] = by
    return x


# --- calls that are right ---

@pytest.mark.parametrize("call", [*calls("quick beside")], ids=str)
@pytest.mark.filterwarnings("ignore::flashlin.ops._common.numerics.NumericsWarning")
def test_debug_mode_changes_no_result(call: Call) -> None:
    normal = results(call)
    with flashlin.settings(debug=True):
        checked = results(call)
    assert len(normal) == len(checked)
    assert all(torch.equal(x, y) for x, y in zip(normal, checked, strict=True))


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_valid_inputs_raise_and_warn_nothing(dtype: torch.dtype) -> None:
    given = {name: x.to(dtype).requires_grad_() for name, x in inputs().items()}
    o, _ = flashlin.chunk_gated_delta_rule(**given)
    o.sum().backward()
    assert all(x.grad is not None for x in given.values())
    flashlin.chunk_gated_delta_rule(**inputs(g=torch.full((B, T, H), -torch.inf)))  # forgets everything
    flashlin.chunk_gated_delta_rule(**inputs(k=torch.randn(FULL), beta=torch.randn(B, T, H)),
                                    use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    flashlin.chunk_gated_delta_rule(**inputs(k=3 * inputs()["k"], beta=torch.full((B, T, H), 0.2)))
    flashlin.rms_norm_gated(torch.randn(4, 8), torch.ones(4, 8), torch.ones(8), None)  # its g is no log decay


def test_nothing_is_checked_outside_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "watched", lambda *_: pytest.fail("watched"))
    o, _ = flashlin.chunk_gated_delta_rule(**inputs(v=spoiled(inputs()["v"], 0, 0, 0, 0)))
    assert o.isnan().any()


# --- values that are not finite ---

@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(("name", "index", "by", "told"), [
    ("k", (1, 17, 1, 3), float("nan"),
     "the input k is nan at batch 1, token 17, head 1, channel 3, and not finite in 1 of 2048 values "
     "(float32, [2, 32, 2, 16]): the layer or the parameter that made it went wrong first"),
    ("g", (0, 5, 1), float("nan"), "the input g is nan at batch 0, token 5, head 1,"),
    ("g", (0, 5, 1), torch.inf, "the input g is inf at batch 0, token 5, head 1,"),
    ("beta", (0, 5, 1), -torch.inf, "the input beta is -inf at batch 0, token 5, head 1,")])
def test_an_input_that_is_not_finite_is_named_with_its_token_and_head(
        name: str, index: tuple[int, ...], by: float, told: str) -> None:
    with pytest.raises(FloatingPointError) as raised:
        flashlin.chunk_gated_delta_rule(**inputs(**{name: spoiled(inputs()[name], *index, by=by)}))
    assert str(raised.value).startswith("chunk_gated_delta_rule: " + told)
    assert numerics.own.busy is False


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(("call", "told"), [
    (lambda x: flashlin.chunk_gla(x, x, x, -x.abs(),
                                  initial_state=spoiled(torch.zeros(B, H, K, K), 1, 0, 2, 3)),
     "the input initial_state is nan at sequence 1, head 0,"),
    (lambda x: flashlin.chunk_hgrn(spoiled(x[..., 0], 1, 4, 1), -x[..., 0].abs()),
     "the input x is nan at batch 1, token 4, channel 1,"),
    (lambda x: flashlin.causal_conv1d_fn(spoiled(x[..., 0].mT, 1, 1, 4), torch.ones(2, 4)),
     "the input x is nan at batch 1, channel 1, token 4,"),
    (lambda x: flashlin.rms_norm(spoiled(x, 0, 2, 1, 3), torch.ones(K), None),
     "the input x is nan at index [0, 2, 1, 3],")])
def test_the_place_follows_the_layout_of_the_op(call: Any, told: str) -> None:
    with pytest.raises(FloatingPointError, match=r"nan at") as raised:
        call(torch.randn(FULL))
    assert told in str(raised.value)


@pytest.mark.usefixtures("debug")
def test_an_output_that_overflows_names_the_largest_input_and_the_dtype() -> None:
    x = torch.full(FULL, 300.0, dtype=torch.float16)
    with pytest.raises(FloatingPointError, match=(
            r"chunk_gla: the output is inf at batch 0, token 0, head 0, channel 0, .* its inputs are finite, "
            r"the largest is 300 in [qkv], and float16 ends at 6.55e\+04; .* use bfloat16 instead of float16")):
        flashlin.chunk_gla(x, x, x, -x.abs())


def test_an_output_that_overflows_by_growth_says_why() -> None:
    told = r"the output is (inf|nan) at .*: got g of 60 at .* grow without bound"
    with (flashlin.settings(debug=True), pytest.warns(numerics.NumericsWarning, match="got g of 60"),
          pytest.raises(FloatingPointError, match=told)):
        flashlin.chunk_gated_delta_rule(**inputs(g=torch.full((B, T, H), 60.0)))


@pytest.mark.usefixtures("debug")
def test_a_gradient_that_arrives_or_leaves_is_checked() -> None:
    given = {name: x.requires_grad_() for name, x in inputs().items()}
    o, _ = flashlin.chunk_gated_delta_rule(**given)
    with pytest.raises(FloatingPointError, match=r"the gradient that arrives at the output is inf at batch"):
        (o.sum() / 0).backward()
    q, k = (torch.full(FULL, size, dtype=torch.float16, requires_grad=True) for size in (1e-3, 100.0))
    o, _ = flashlin.chunk_gla(q, k, k.detach(), torch.full(FULL, -0.01))
    with pytest.raises(FloatingPointError, match=r"the gradient of q is inf at batch 0, .*: the incoming "):
        o.sum().backward()


# --- inputs with which a state grows ---

@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(("call", "told"), [
    (lambda x: flashlin.chunk_gated_delta_rule(**inputs(g=spoiled(inputs()["g"], 1, 3, 0, by=0.5))),
     "got g of 0.5 at batch 1, token 3, head 0, need log decays of at most 0"),
    (lambda x: flashlin.chunk_gated_delta_rule(**inputs(k=spoiled(inputs()["k"], 1, 3, 0, by=2.0),
                                                        beta=torch.ones(B, T, H))),
     "got k of length 8 at batch 1, token 3, head 0, need length 1: a rate beta |k|^2 of 64, above 2,"),
    (lambda x: flashlin.chunk_delta_rule(x, F.normalize(x, dim=-1), x, torch.full((B, T, H), 3.0)),
     "got beta of 3 at batch 0, token 0, head 0, need at most 2 (1 without negative eigenvalues)"),
    (lambda x: flashlin.chunk_rwkv7(x, -x.abs(), x, x, x, x), "got a and b with a scalar product of "),
    (lambda x: flashlin.chunk_rwkv6(x, x, x, x.abs(), torch.ones(H, K)), "got w of "),
    (lambda x: flashlin.chunk_gla(x, x, x, spoiled(-x.abs().half(), 0, 2, 1, 5, by=-torch.inf)),
     "got g of -inf at batch 0, token 2, head 1, channel 5: the gate left float16's range"),
    (lambda x: flashlin.chunk_kda(x, x, x, torch.full(FULL, -9.0), inputs()["beta"], safe_gate=True,
                                  use_qk_l2norm_in_kernel=True),
     "got g of -9 at batch 0, token 0, head 0, channel 0 with safe_gate, which promises at least -5"),
    (lambda x: flashlin.chunk_gated_delta_rule(**inputs(), A_log=torch.full((H,), 90.0),
                                               use_gate_in_kernel=True),
     "got A_log of 90 at index [0], need at most 88"),
    (lambda x: flashlin.mamba_chunk_scan_combined(x, torch.ones(B, T, H), torch.ones(H), x[:, :, :1],
                                                  x[:, :, :1], 16),
     "got A of 1 at index [0], need rates below 0")])
def test_inputs_that_make_the_state_grow_are_named(call: Any, told: str) -> None:
    with pytest.raises(numerics.NumericsWarning) as raised:
        call(torch.randn(FULL))
    assert told in str(raised.value)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0, 2.0, 2.5])
def test_a_rate_is_reported_exactly_if_the_state_grows(rate: float) -> None:
    """A recurrence in float64 grows along a repeated key if and only if debug mode warns."""
    key = F.normalize(torch.randn(K), dim=-1).expand(1, 200, 1, K)
    x, beta = key.clone() * rate ** 0.5, torch.ones(1, 200, 1)
    state = torch.ones(K, dtype=torch.float64)
    for _ in range(200):
        state = state - (x[0, 0, 0].double() @ state) * x[0, 0, 0].double()
    with flashlin.settings(debug=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flashlin.chunk_delta_rule(x, x, x, beta)
    assert any(one.category is numerics.NumericsWarning for one in caught) == (state.norm().item() > 1e3)


def test_the_variable_turns_debug_mode_on() -> None:
    code = ("import torch, flashlin; x = torch.full((1, 4, 1, 16), float('nan')); "
            "flashlin.chunk_gla(x, x, x, x)")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                           env={**os.environ, "FLASHLIN_DEBUG": "1"})
    assert ended.returncode == 1 and "FloatingPointError: chunk_gla: the input q is nan" in ended.stderr


# --- one step of a model ---

class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(H * K, 3 * H * K), nn.Linear(H * K, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, K)).unbind(2)
        g, beta = self.gates(x).chunk(2, -1)
        o, _ = flashlin.chunk_gated_delta_rule(q, k, v, F.logsigmoid(g), beta.sigmoid(),
                                               use_qk_l2norm_in_kernel=self.training)
        return x + o.flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, H * K), nn.Linear(H * K, 50)
        self.layers, self.dropout = nn.ModuleList([Layer(), Layer()]), nn.Dropout(0.1)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.dropout(layer(x))
        logits = self.head(x)
        return logits if labels is None else {"logits": logits}


def step(model: nn.Module, batch: Any) -> list[tuple[str, str]]:
    checks = flashlin.doctor(model, batch).checks
    return [(one.status, one.detail) for one in checks if one.name == "one step"]


TOKENS = torch.arange(64).reshape(2, 32) % 50


@pytest.mark.parametrize("batch", [TOKENS, (TOKENS,), {"tokens": TOKENS, "labels": TOKENS}],
                         ids=["one", "tuple", "mapping"])
def test_one_step_of_a_right_model_changes_nothing(batch: Any) -> None:
    model = Model()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state = torch.get_rng_state()
    [(status, detail)] = step(model, batch)
    assert status == "ok" and detail.startswith("every value is finite, the loss is ")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.embedding.weight.grad is None
    assert not model._forward_hooks and not model._forward_pre_hooks and numerics.own.layer == ""


def test_one_step_names_the_first_layer_that_goes_wrong() -> None:
    model = Model()
    with torch.no_grad():
        model.layers[1].qkv.weight[5, 5] = torch.nan  # type: ignore[union-attr,operator]
    [(status, detail)] = step(model, TOKENS)
    assert status == "problem"
    told = "the output of layer layers.1.qkv (Linear) is nan at index [0, 0, 5] of [2, 32, 96]: "
    assert detail == told + "its input is finite"
    assert flashlin.doctor(model, TOKENS).verdict.startswith(f"broken. one step: {told}")


def test_one_step_names_the_layer_of_an_op() -> None:
    model = Model().eval()  # without the norm of k
    with torch.no_grad():
        model.layers[0].qkv.weight *= 30  # type: ignore[union-attr,operator]
    found = step(model, TOKENS)
    assert found[0][0] == "degraded"
    assert found[0][1].startswith("chunk_gated_delta_rule in layer layers.0: got k of length ")


def test_one_step_names_the_layer_of_a_bad_gradient() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * 0).sqrt()
    [(status, detail)] = step(Root(), torch.ones(2, 4))
    assert status == "problem"
    assert detail.startswith("the gradient that arrives at the output of layer inner is ")


def test_one_step_of_a_model_that_raises_is_no_verdict() -> None:
    [(status, detail)] = step(Model(), {"tokens": TOKENS, "wrong": 1})
    assert status == "could not check" and detail.startswith("TypeError: ")


def test_a_batch_needs_a_model() -> None:
    with pytest.raises(ValueError, match=r"batch: got Tensor without a model, need doctor\(model, batch\)"):
        flashlin.doctor(batch=TOKENS)
