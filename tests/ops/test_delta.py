"""Tests of the delta ops in addition to their cases.

They cover refused arguments, the choice of mode auto, gradients by finite differences, and torch.compile of
the torch path.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.guards.checks import FEW_TOKENS
from flashlin.ops import delta_rule, gated_delta_rule


def inputs(B: int = 2, T: int = 12, H: int = 2, HV: int = 4, K: int = 8, V: int = 5,
           dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(B, T, H, K, dtype=dtype), dim=-1) for _ in range(2))
    return {"q": q, "k": k, "v": torch.randn(B, T, HV, V, dtype=dtype),
            "g": F.logsigmoid(torch.randn(B, T, HV, dtype=dtype)), "beta": torch.rand(B, T, HV, dtype=dtype)}


def refused(match: str, error: type[Exception] = ValueError, op: str = "chunk_gated_delta_rule",
            **changes: Any) -> None:
    given = {**inputs(), **changes}
    if "gated" not in op:
        del given["g"]
    with pytest.raises(error, match=match):
        getattr(flashlin, op)(**given)


def test_value_heads_come_in_groups() -> None:
    given = inputs(HV=3)
    with pytest.raises(ValueError, match="v: got 3 heads, need a multiple of the 2 heads of q and k"):
        flashlin.chunk_gated_delta_rule(**given)


def test_what_does_not_fit_is_named() -> None:
    refused(r"beta: got shape \[2, 12, 4, 5\], need \[B, T, HV\] \(a beta per value channel needs "
            r"fused_recurrent\)", op="chunk_delta_rule",
            beta=torch.rand(2, 12, 4, 5))
    refused("beta: got NoneType", TypeError, op="chunk_delta_rule", beta=None)
    refused(r"g: got shape \[2, 12, 2\], need \[B, T, HV\]", g=torch.zeros(2, 12, 2))
    refused("chunk_size: got 48, need one of 16, 32, 64", chunk_size=48)
    refused(r"initial_state: got shape \[2, 4, 5, 8\], need", initial_state=torch.zeros(2, 4, 5, 8))
    refused("cp_context: got int without group, need what fla.ops.cp.build_cp_context makes", TypeError,
            cp_context=3)
    refused("got allow_neg_eigval without use_beta_sigmoid_in_kernel", allow_neg_eigval=True)
    refused("A_log: got None, need a tensor", use_gate_in_kernel=True)
    refused(r"A_log: got shape \[2\], need \[HV\]", use_gate_in_kernel=True, A_log=torch.zeros(2))
    refused("got A_log without use_gate_in_kernel", A_log=torch.zeros(4))
    refused("got both state_v_first and transpose_state_layout", state_v_first=True,
            transpose_state_layout=True)
    refused("cu_seqlens_cpu: got a tensor without cu_seqlens", cu_seqlens_cpu=torch.tensor([0, 12]))
    refused("mode: got 'fast', need one of auto, chunk, fused_recurrent", op="gated_delta_rule", mode="fast")


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_by_differences(packed: bool) -> None:
    given = inputs(B=1, T=70, H=1, HV=2, K=3, V=2)
    state = torch.randn(3 if packed else 1, 2, 3, 2, dtype=torch.float64)
    bounds = torch.tensor([0, 3, 3, 70]) if packed else None

    def call(q: Any, k: Any, v: Any, g: Any, beta: Any, h0: Any) -> Any:
        return flashlin.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0, output_final_state=True,
                                               cu_seqlens=bounds)
    tensors = [x.requires_grad_() for x in (*given.values(), state)]
    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


def test_options_are_what_they_say() -> None:
    given = inputs()
    raw = {**given, "g": torch.randn(2, 12, 4), "beta": torch.randn(2, 12, 4)}
    A_log, dt_bias = torch.randn(4), torch.randn(4)
    inside = flashlin.chunk_gdn(**raw, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True,
                                use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
                                use_qk_l2norm_in_kernel=True)[0]
    before = {**raw, "g": -A_log.exp() * F.softplus(raw["g"] + dt_bias), "beta": 2 * raw["beta"].sigmoid(),
              "q": flashlin.l2norm(given["q"]), "k": flashlin.l2norm(given["k"])}
    torch.testing.assert_close(inside, flashlin.chunk_gdn(**before)[0])
    assert inside.dtype == torch.float64 and flashlin.chunk_gdn is flashlin.chunk_gated_delta_rule


@pytest.mark.parametrize("op", ["delta_rule", "gated_delta_rule"])
def test_auto_takes_few_tokens_one_by_one(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    module = gated_delta_rule if op == "gated_delta_rule" else delta_rule
    for mode in ("chunk", "fused_recurrent"):
        def noting(*arguments: Any, _mode: str = mode, _real: Any = getattr(module, f"{mode}_{op}"),
                   **named: Any) -> Any:
            seen.append(_mode)
            return _real(*arguments, **named)
        monkeypatch.setattr(module, f"{mode}_{op}", noting)

    def call(T: int, grad: bool, **changes: Any) -> torch.Tensor:
        given = {name: x.requires_grad_(grad)
                 for name, x in inputs(T=T).items() if name != "g" or "gated" in op}
        found: torch.Tensor = getattr(module, op)(**{**given, **changes})[0]
        return found
    torch.testing.assert_close(call(FEW_TOKENS, False), call(FEW_TOKENS, True).detach())
    call(FEW_TOKENS + 1, False)
    call(5, True, beta=torch.rand(2, 5, 4, 5, dtype=torch.float64))
    call(40, False, mode="fused_recurrent")
    assert seen == ["fused_recurrent", "chunk", "chunk", "fused_recurrent", "fused_recurrent"]


def test_the_torch_path_compiles() -> None:
    def call(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return flashlin.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    tensors = [x.requires_grad_() for x in inputs(T=70, dtype=torch.float32).values()]
    results = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        o = function(*tensors)
        results.append([o, *torch.autograd.grad(o.sin().sum(), tensors)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
