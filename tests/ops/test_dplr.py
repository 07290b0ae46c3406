"""Tests of the chunked delta rules with one decay per key channel, in addition to their cases.

They cover errors that name the argument, gradients by finite differences, modes, intermediate states and
torch.compile, all on the torch path.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.guards.checks import FEW_TOKENS
from flashlin.kernels.delta.reference import recurrence as recurrence_of_keys
from flashlin.kernels.dplr.reference import recurrence
from flashlin.ops import kda, rwkv7
from flashlin.testing.compare import Tensors, judge
from tests.naive import recurrence as recurrence_of_others

META = torch.device("meta")
GIVEN = {"chunk_kda": "q k v g beta", "chunk_rwkv7": "r w k v a b", "chunk_dplr_delta_rule": "q k v a b gk",
         "chunk_iplr_delta_rule": "q k v a b"}
OPS = pytest.mark.parametrize("op", GIVEN)
TOKENS = {"chunk_kda": flashlin.fused_recurrent_kda, "chunk_rwkv7": flashlin.fused_recurrent_rwkv7,
          "chunk_dplr_delta_rule": flashlin.fused_recurrent_dplr_delta_rule,
          "chunk_iplr_delta_rule": flashlin.fused_recurrent_iplr_delta_rule}


def inputs(op: str, B: int = 2, T: int = 12, H: int = 3, K: int = 8, V: int = 5,
           dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)
    unit = F.normalize(randn(B, T, H, K), dim=-1)
    every = {name: randn(B, T, H, K) for name in ("q", "r")} | {"k": F.normalize(randn(B, T, H, K), dim=-1),
                                                                "v": randn(B, T, H, V)}
    every.update((name, F.logsigmoid(randn(B, T, H, K))) for name in ("w", "g", "gk"))
    every.update(beta=randn(B, T, H).sigmoid(), a=-unit, b=unit * randn(B, T, H, K).sigmoid())
    return {name: every[name].to(dtype) for name in GIVEN[op].split()}


def t(*shape: int, dtype: torch.dtype = torch.float64, device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


GATE = {"use_gate_in_kernel": True}
WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("chunk_kda", {"k": t(2, 12, 3, 4)}, ValueError,
     "k: got shape [2, 12, 3, 4], need [B, T, H, K] = [2, 12, 3, 8]"),
    ("chunk_kda", {"v": t(2, 12, 4, 5)}, ValueError,
     "v: got 4 heads, need a multiple of the 3 heads of q and k"),
    ("chunk_kda", {"g": t(2, 12, 3)}, ValueError,
     "g: got shape [2, 12, 3], need [B, T, HV, K] = [2, 12, 3, 8]"),
    ("chunk_kda", {"g": None}, TypeError, "g: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("chunk_kda", {"beta": None}, TypeError, "beta: got NoneType, need a tensor of shape [B, T, HV]"),
    ("chunk_kda", {"beta": t(2, 12, 3, 5)}, ValueError,
     "beta: got shape [2, 12, 3, 5], need [B, T, HV] (a beta per value channel needs fused"),
    ("chunk_kda", {"A_log": t(3)}, ValueError,
     "chunk_kda: got A_log without use_gate_in_kernel, which alone reads it"),
    ("chunk_kda", {"dt_bias": t(24)}, ValueError, "chunk_kda: got dt_bias without use_gate_in_kernel"),
    ("chunk_kda", {"A_log": t(4), **GATE}, ValueError, "A_log: got shape [4], need HV = 3 elements"),
    ("chunk_kda", {"g": t(2, 12, 3), **GATE}, ValueError, "g: got shape [2, 12, 3], need [B, T, HV, K]"),
    ("chunk_kda", {"allow_neg_eigval": True}, ValueError,
     "chunk_kda: got allow_neg_eigval without use_beta_sigmoid"),
    ("chunk_kda", {"lower_bound": 0.0, **GATE}, ValueError,
     "lower_bound: got 0.0, need a number below 0, or None"),
    ("chunk_kda", {"lower_bound": -6.0, "safe_gate": True, **GATE}, ValueError,
     "lower_bound: got -6.0, need -5 <= lower_bound < 0 with safe_gate"),
    ("chunk_kda", {"safe_gate": True, **GATE}, ValueError,
     "lower_bound: got None, need -5 <= lower_bound < 0 with safe_gate"),
    ("chunk_kda", {"chunk_size": 16}, ValueError, "chunk_size: got 16, need one of 32, 64"),
    ("chunk_kda", {"return_intermediate_states": True}, ValueError,
     "return_intermediate_states: got True, need torch.inference_mode()"),
    ("chunk_kda", {"initial_state": t(2, 3, 8, 5), "state_v_first": True}, ValueError,
     "initial_state: got shape [2, 3, 8, 5], need [N, H, V, K] = [2, 3, 5, 8]"),
    ("chunk_kda", {"state_v_first": True, "transpose_state_layout": True}, ValueError,
     "chunk_kda: got both state_v_first and transpose_state"),
    ("chunk_rwkv7", {"r": None}, TypeError, "r: got NoneType, need a tensor of shape [B, T, H, K]"),
    ("chunk_rwkv7", {"w": t(2, 12, 3, 7)}, ValueError,
     "w: got shape [2, 12, 3, 7], need [B, T, HV, K] = [2, 12, 3, 8]"),
    ("chunk_rwkv7", {"k": t(2, 12, 3, 8, device=META)}, ValueError,
     "k: got device meta, need cpu, where r is"),
    ("chunk_rwkv7", {"cu_seqlens": torch.tensor([0, 12])}, ValueError,
     "r: The batch size is expected to be 1 rather than 2"),
    ("chunk_rwkv7", {"chunk_size": 48}, ValueError, "chunk_size: got 48, need one of None, 16, 32, 64"),
    ("chunk_dplr_delta_rule", {"a": None}, TypeError,
     "a: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("chunk_dplr_delta_rule", {"gk": None}, TypeError,
     "gk: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("chunk_dplr_delta_rule", {"v": t(2, 12, 6, 5)}, ValueError,
     "v: got shape [2, 12, 6, 5], need [B, T, H, V] = [2, 12, 3, any]"),
    ("chunk_dplr_delta_rule", {"lower_bound": 0.5}, ValueError,
     "lower_bound: got 0.5, need a number below 0, or None"),
    ("chunk_iplr_delta_rule", {"b": t(2, 12, 3)}, ValueError,
     "b: got shape [2, 12, 3], need [B, T, HV, K] = [2, 12, 3, 8]"),
    ("chunk_iplr_delta_rule", {"b": None}, TypeError,
     "b: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("chunk_iplr_delta_rule", {"q": None}, TypeError, "q: got NoneType, need a tensor of shape [B, T, H, K]")]


@pytest.mark.parametrize(("op", "changes", "error", "text"), WRONG,
                         ids=[f"{op}-{text}" for op, _, _, text in WRONG])
def test_wrong_arguments(op: str, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        getattr(flashlin, op)(**{**inputs(op), **changes})
    assert str(raised.value).startswith(text)


@OPS
def test_what_every_op_refuses(op: str) -> None:
    function, given = getattr(flashlin, op), inputs(op)
    with pytest.raises(TypeError, match=rf"{op}: got unexpected keyword chunksize; "
                                         r"did you mean chunk_size\?$"):
        function(**given, chunksize=64)
    with pytest.raises(ValueError, match="cu_seqlens_cpu: got a tensor without cu_seqlens, need both"):
        function(**given, cu_seqlens_cpu=torch.tensor([0, 12]))
    with pytest.raises(TypeError, match=r"process_group: got object, need a group of torch.distributed"):
        function(**given, process_group=object())


@pytest.mark.parametrize("op", ["kda", "rwkv7"])
def test_an_unknown_mode(op: str) -> None:
    with pytest.raises(ValueError, match="mode: got 'fast', need one of auto, chunk, fused_recurrent"):
        getattr(flashlin, op)(**inputs("chunk_" + op), mode="fast")


@pytest.mark.parametrize("groups", [1, 3])
def test_references_agree(groups: int) -> None:
    q, k, v, a, b, gk = inputs("chunk_dplr_delta_rule", T=9).values()
    h0 = torch.randn(2, 3, 8, 5, dtype=torch.float64)
    other = recurrence_of_others(q, k, v, gk=gk, a=a, b=b, h0=h0, scale=0.5)
    for x, y in zip(recurrence(q, k, v, a, b, gk, h0=h0, scale=0.5), other, strict=True):
        torch.testing.assert_close(x, y)
    q, k, v, g, beta = inputs("chunk_kda", T=9).values()
    q, k = q[:, :, :3 // groups], k[:, :, :3 // groups]
    keys, rate = k.repeat_interleave(groups, 2), beta[..., None]
    other = recurrence_of_others(q, k, rate * v, gk=g, a=-g.exp() * keys, b=rate * keys, h0=h0, scale=0.5)
    for x, y in zip(recurrence_of_keys(q, k, v, beta, g, h0=h0, scale=0.5), other, strict=True):
        torch.testing.assert_close(x, y)


@OPS
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_by_differences(op: str, packed: bool) -> None:
    """The gradients pass gradcheck; the arguments are positional, in the order of fla."""
    given = list(inputs(op, B=1, T=70, H=1, K=3, V=2).values())
    state = torch.randn(3 if packed else 1, 1, 3, 2, dtype=torch.float64)
    bounds = torch.tensor([0, 3, 3, 70]) if packed else None

    def call(h0: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return getattr(flashlin, op)(*tensors, initial_state=h0, output_final_state=True, cu_seqlens=bounds)
    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (state, *given)], fast_mode=True)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gradients_of_the_gate_by_differences(bound: float | None) -> None:
    given = [x.requires_grad_()
             for x in (*inputs("chunk_kda", B=1, T=3, H=2, K=3, V=2).values(), 0.1 * t(2).add(1),
                       0.2 * t(6).add(1))]

    def call(*tensors: torch.Tensor) -> Any:
        *first, A_log, dt_bias = tensors
        return flashlin.chunk_kda(*first, None, None, True, True, True, True, True, bound is not None, bound,
                                  A_log=A_log, dt_bias=dt_bias)
    assert torch.autograd.gradcheck(call, given)


@OPS
def test_token_by_token_is_the_same_function(op: str) -> None:
    given, h0 = inputs(op, T=150), torch.randn(2, 3, 8, 5, dtype=torch.float64)
    shared: dict[str, Any] = dict(initial_state=h0, output_final_state=True, scale=0.4)
    for x, y in zip(getattr(flashlin, op)(**given, **shared), TOKENS[op](**given, **shared), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_defaults_are_those_of_fla() -> None:
    given = inputs("chunk_rwkv7")
    o, ht = flashlin.chunk_rwkv7(**given)
    assert ht is None and torch.equal(o, flashlin.chunk_rwkv7(**given, scale=1.0)[0])
    assert not torch.equal(o, flashlin.chunk_rwkv7(**given, scale=None)[0])
    given = inputs("chunk_dplr_delta_rule")
    assert torch.equal(flashlin.chunk_dplr_delta_rule(**given)[0],
                       flashlin.chunk_dplr_delta_rule(**given, scale=8 ** -0.5)[0])


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_rwkv7"])
@pytest.mark.parametrize("seed", range(3))
def test_random_shapes_and_strong_decays(op: str, seed: int) -> None:
    """Results in float32 have the precision of float32 for strong decays.

    The log decays are uniform in -20 .. 0. One channel is always -20, and the next one is always 0.
    """
    size = torch.randint(1, 150, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
    facts = {"B": 1 + size[0] % 3, "T": size[1], "H": 1 + size[2] % 3, "K": 2 + size[3] % 40,
             "V": 1 + size[4] % 40}
    given = inputs(op, **facts, dtype=torch.float32, seed=seed)
    gate = "g" if op == "chunk_kda" else "w"
    given[gate] = -20 * torch.rand(given[gate].shape, generator=torch.Generator().manual_seed(seed))
    given[gate][..., 0], given[gate][..., 1] = -20, 0
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
        call = getattr(flashlin, op) if dtype == torch.float32 else TOKENS[op]
        o, ht = call(**leaves, scale=0.3, output_final_state=True)
        weights = [torch.sin(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape).to(dtype)
                   for x in (o, ht)]
        results.append([o, ht, *torch.autograd.grad([o, ht], list(leaves.values()), weights)])
    assert [verdict
            for name, x, y in zip(("o", "ht", *given), *results, strict=True)
            if not (verdict := judge(name, x, y, 2e-6)).ok] == []


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_rwkv7", "chunk_dplr_delta_rule"])
def test_forgetting_everything_is_finite(op: str) -> None:
    given = {name: x.requires_grad_() for name, x in inputs(op, T=100).items()}
    gate = {"chunk_kda": "g", "chunk_rwkv7": "w"}.get(op, "gk")
    given[gate] = given[gate].detach().index_fill(1, torch.tensor([40]), float("-inf")).requires_grad_()
    o, ht = getattr(flashlin, op)(**given, output_final_state=True)
    wanted = TOKENS[op](**given, output_final_state=True, scale=1.0 if op == "chunk_rwkv7" else None)[0]
    torch.testing.assert_close(o, wanted, rtol=1e-9, atol=1e-10)
    assert all(x.isfinite().all()
               for x in (ht, *torch.autograd.grad(o.sum() + ht.sum(), list(given.values()))))


@pytest.mark.parametrize(("module", "op"), [(kda, "kda"), (rwkv7, "rwkv7")])
def test_auto_takes_few_tokens_one_by_one(module: Any, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for mode in ("chunk", "fused_recurrent"):
        def noting(*arguments: Any, _mode: str = mode, _real: Any = getattr(module, f"{mode}_{op}"),
                   **named: Any) -> Any:
            seen.append(_mode)
            return _real(*arguments, **named)
        monkeypatch.setattr(module, f"{mode}_{op}", noting)
    for T, grad in ((FEW_TOKENS, False), (FEW_TOKENS, True), (FEW_TOKENS + 1, False)):
        getattr(module, op)(**{name: x.requires_grad_(grad)
                               for name, x in inputs("chunk_" + op, T=T).items()})
    assert seen == ["fused_recurrent", "chunk", "chunk"]


def test_modes_of_kda_agree_in_all_their_options() -> None:
    given = inputs("chunk_kda", B=1, T=20)
    extra: dict[str, Any] = dict(
        initial_state=torch.randn(3, 3, 5, 8, dtype=torch.float64), output_final_state=True,
        state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=torch.randn(3),
        dt_bias=torch.randn(24), lower_bound=-3.0, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        cu_seqlens=torch.tensor([0, 7, 7, 20]), scale=0.7)
    found = [flashlin.kda(**given, **extra, mode=mode) for mode in ("auto", "chunk", "fused_recurrent")]
    for o, ht in found[1:]:
        torch.testing.assert_close(o, found[0][0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ht, found[0][1], rtol=1e-9, atol=1e-9)
    headwise = {**given, "beta": given["v"].sigmoid()}
    assert torch.equal(flashlin.kda(**headwise)[0], flashlin.fused_recurrent_kda(**headwise)[0])


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("edges", [None, (0, 3, 3, 40, 130)], ids=["dense", "packed"])
@torch.inference_mode()
def test_intermediate_states(size: int, edges: tuple[int, ...] | None) -> None:
    """The returned h contains the state that enters each chunk, in the order of the sequences."""
    given = inputs("chunk_kda", B=1 if edges else 2, T=130)
    bounds = None if edges is None else torch.tensor(edges)
    N = 2 if edges is None else len(edges) - 1
    for h0, v_first in ((None, False), (torch.randn(N, 3, 5, 8, dtype=torch.float64), True)):
        extra: dict[str, Any] = dict(state_v_first=v_first, output_final_state=True)
        o, ht, h = flashlin.chunk_kda(**given, **extra, initial_state=h0, return_intermediate_states=True,
                                      chunk_size=size, cu_seqlens=bounds)
        for x, y in zip((o, ht), flashlin.chunk_kda(**given, **extra, initial_state=h0, cu_seqlens=bounds),
                        strict=True):
            torch.testing.assert_close(x, y)
        wanted = []
        for n in range(N):
            row, first, last = (n, 0, 130) if edges is None else (0, edges[n], edges[n + 1])
            for t0 in range(first, last, size):
                before = {name: x[row:row + 1, first:t0] for name, x in given.items()}
                wanted.append(flashlin.fused_recurrent_kda(**before, **extra,
                                                           initial_state=None if h0 is None
                                                           else h0[n:n + 1])[1])
        torch.testing.assert_close(h, torch.cat(wanted).unflatten(0, (h.shape[0], -1)))
        assert h.shape[0] == (1 if edges else 2)
    o, ht, h = flashlin.chunk_kda(**inputs("chunk_kda", dtype=torch.bfloat16),
                                  return_intermediate_states=True)
    assert (h.dtype, h.shape, ht) == (torch.bfloat16, (2, 1, 3, 8, 5), None)


@OPS
def test_nothing_to_do(op: str) -> None:
    for facts in ({"T": 0}, {"B": 0}, {"H": 0}):
        given = {name: x.requires_grad_() for name, x in inputs(op, **facts).items()}
        B, T, H, V = given["v"].shape
        h0 = torch.randn(B, H, 8, V, dtype=torch.float64).requires_grad_()
        o, ht = getattr(flashlin, op)(**given, initial_state=h0, output_final_state=True)
        assert o.shape == (B, T, H, V) and torch.equal(ht, h0)
        grads = torch.autograd.grad(o.sum() + ht.sum(), [*given.values(), h0], allow_unused=True,
                                    materialize_grads=True)
        assert torch.equal(grads[-1], torch.ones_like(h0)) and not any(grad.any() for grad in grads[:-1])


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_rwkv7"])
def test_dtypes_in_and_out(op: str) -> None:
    given = inputs(op, dtype=torch.bfloat16)
    gate = "g" if op == "chunk_kda" else "w"
    given[gate] = given[gate].float().requires_grad_()
    h0 = torch.randn(2, 3, 8, 5).half().requires_grad_()
    o, ht = getattr(flashlin, op)(**given, initial_state=h0, output_final_state=True)
    assert (o.dtype, ht.dtype) == (torch.bfloat16, torch.float32)
    dg, dh0 = torch.autograd.grad(o.float().sum() + ht.sum(), [given[gate], h0])
    assert (dg.dtype, dh0.dtype) == (torch.float32, torch.float16)


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_rwkv7"])
def test_the_torch_path_compiles(op: str) -> None:
    given = {name: x.requires_grad_() for name, x in inputs(op, T=20, dtype=torch.float32).items()}
    results = []
    for function in (torch.compile(getattr(flashlin, op), fullgraph=True, backend="aot_eager"),
                     getattr(flashlin, op)):
        o = function(**given)[0]
        results.append([o, *torch.autograd.grad(o.sin().sum(), list(given.values()))])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
