"""The token-by-token ops kda, rwkv6, rwkv7, dplr and iplr on the torch path.

The tests cover errors that name the argument, gradients by finite differences and defaults. test_recurrent.py
tests the code that these ops share.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.testing.compare import Tensors

META = torch.device("meta")
GIVEN = {"fused_recurrent_rwkv6": "r k v w u", "fused_recurrent_rwkv7": "r w k v a b",
         "fused_mul_recurrent_rwkv7": "r w k v kk a", "fused_recurrent_dplr_delta_rule": "q k v a b gk",
         "fused_recurrent_iplr_delta_rule": "q k v a b", "fused_recurrent_kda": "q k v g beta"}
OPS = pytest.mark.parametrize("op", GIVEN)


def inputs(op: str, B: int = 2, T: int = 4, H: int = 2, K: int = 3, V: int = 2) -> Tensors:
    generator = torch.Generator().manual_seed(len(op))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)
    every = {name: randn(B, T, H, K) for name in ("q", "r", "k")} | {"v": randn(B, T, H, V), "u": randn(H, K),
                                                                     "beta": randn(B, T, H).sigmoid()}
    every.update((name, F.logsigmoid(randn(B, T, H, K))) for name in ("w", "g", "gk"))
    every.update((name, F.normalize(randn(B, T, H, K), dim=-1)) for name in ("kk", "a", "b"))
    return {name: every[name] for name in GIVEN[op].split()}


def t(*shape: int, dtype: torch.dtype = torch.float64, device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


GATE = {"use_gate_in_kernel": True}
WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("fused_recurrent_rwkv6", {"r": t(2, 4, 2)}, ValueError, "r: got shape [2, 4, 2], need [B, T, H, K]"),
    ("fused_recurrent_rwkv6", {"r": None}, TypeError, "r: got NoneType, need a tensor of shape [B, T, H, K]"),
    ("fused_recurrent_rwkv6", {"k": t(2, 4, 2, 3, device=META)}, ValueError,
     "k: got device meta, need cpu, where r is"),
    ("fused_recurrent_rwkv6", {"v": t(2, 4, 3, 2)}, ValueError,
     "v: got 3 heads, need a multiple of the 2 heads of r and k"),
    ("fused_recurrent_rwkv6", {"w": None}, TypeError,
     "w: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("fused_recurrent_rwkv6", {"w": t(2, 4, 2)}, ValueError,
     "w: got shape [2, 4, 2], need [B, T, HV, K] = [2, 4, 2, 3]"),
    ("fused_recurrent_rwkv6", {"u": t(3)}, ValueError, "u: got shape [3], need [HV, K] = [2, 3]"),
    ("fused_recurrent_rwkv6", {"u": t(2, 3, device=META)}, ValueError,
     "u: got device meta, need cpu, where r is"),
    ("fused_recurrent_rwkv6", {"initial_state": t(2, 2, 2, 3)}, ValueError,
     "initial_state: got shape [2, 2, 2, 3], need [N, H, K, V]"),
    ("fused_recurrent_rwkv6", {"cu_seqlens": torch.tensor([0, 4])}, ValueError,
     "r: The batch size is expected to be 1 rather than 2"),
    ("fused_recurrent_rwkv7", {"w": t(2, 4, 2, 2)}, ValueError,
     "w: got shape [2, 4, 2, 2], need [B, T, HV, K] = [2, 4, 2, 3]"),
    ("fused_recurrent_rwkv7", {"b": None}, TypeError,
     "b: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("fused_mul_recurrent_rwkv7", {"kk": None}, TypeError,
     "kk: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("fused_mul_recurrent_rwkv7", {"a": t(2, 4, 2)}, ValueError,
     "a: got shape [2, 4, 2], need [B, T, HV, K] = [2, 4, 2, 3]"),
    ("fused_recurrent_dplr_delta_rule", {"gk": None}, TypeError,
     "gk: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("fused_recurrent_dplr_delta_rule", {"a": t(2, 4, 2, 3, dtype=torch.int32)}, TypeError,
     "a: got dtype torch.int32, need bfloat16"),
    ("fused_recurrent_iplr_delta_rule", {"a": None}, TypeError,
     "a: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("fused_recurrent_kda", {"g": None}, TypeError, "g: got NoneType, need a tensor of shape [B, T, HV, K]"),
    ("fused_recurrent_kda", {"g": t(2, 4, 2)}, ValueError,
     "g: got shape [2, 4, 2], need [B, T, HV, K] = [2, 4, 2, 3]"),
    ("fused_recurrent_kda", {"g": t(2, 4, 2), **GATE}, ValueError,
     "g: got shape [2, 4, 2], need [B, T, HV, K]"),
    ("fused_recurrent_kda", {"beta": None}, TypeError,
     "beta: got NoneType, need a tensor of shape [B, T, HV] or [B, T, HV, V]"),
    ("fused_recurrent_kda", {"A_log": t(2)}, ValueError,
     "fused_recurrent_kda: got A_log without use_gate_in_kernel, which alone reads it"),
    ("fused_recurrent_kda", {"dt_bias": t(6)}, ValueError,
     "fused_recurrent_kda: got dt_bias without use_gate_in_kernel"),
    ("fused_recurrent_kda", {"A_log": t(3), **GATE}, ValueError,
     "A_log: got shape [3], need HV = 2 elements"),
    ("fused_recurrent_kda", {"A_log": t(2), "dt_bias": t(2), **GATE}, ValueError,
     "dt_bias: got shape [2], need HV * K = 6 elements"),
    ("fused_recurrent_kda", {"lower_bound": 0.0, **GATE}, ValueError,
     "lower_bound: got 0.0, need a number below 0, or None"),
    ("fused_recurrent_kda", {"allow_neg_eigval": True}, ValueError,
     "fused_recurrent_kda: got allow_neg_eigval without use_beta_sigmoid"),
    ("fused_recurrent_kda", {"initial_state": t(2, 2, 3, 2), "state_v_first": True}, ValueError,
     "initial_state: got shape [2, 2, 3, 2], need [N, H, V, K] = [2, 2, 2, 3]"),
    ("fused_recurrent_kda", {"inplace_state": True}, ValueError,
     "initial_state: got None, need the states that inplace_state reads")]


@pytest.mark.parametrize(("op", "changes", "error", "text"), WRONG,
                         ids=[f"{op}-{text}" for op, _, _, text in WRONG])
def test_wrong_arguments(op: str, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        getattr(flashlin, op)(**{**inputs(op), **changes})
    assert str(raised.value).startswith(text)


@OPS
def test_what_every_op_refuses(op: str) -> None:
    with pytest.raises(TypeError, match=f"{op}: got unexpected keyword chunk_size$"):
        getattr(flashlin, op)(**inputs(op), chunk_size=64)
    with pytest.raises(TypeError, match=f"{op}: head_first is gone"):
        getattr(flashlin, op)(**inputs(op), head_first=True)


@OPS
def test_gradients_by_differences_and_of_a_strided_state(op: str) -> None:
    """The gradients pass gradcheck, also the gradient of a transposed state, which fla loses.

    The arguments are positional, in the order of fla.
    """
    given = [x.requires_grad_() for x in inputs(op, B=1, T=3).values()]
    state = torch.randn(1, 2, 2, 3, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(0)).requires_grad_()

    def call(state: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return getattr(flashlin, op)(*tensors, initial_state=state.mT, output_final_state=True)
    assert torch.autograd.gradcheck(call, (state, *given))


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gradients_of_the_gate_by_differences(bound: float | None) -> None:
    given = [x.requires_grad_()
             for x in (*inputs("fused_recurrent_kda", B=1, T=3).values(), 0.1 * t(2).add(1),
                       0.2 * t(6).add(1))]

    def call(*tensors: torch.Tensor) -> Any:
        o, ht = flashlin.fused_recurrent_kda(*tensors, None, None, True, True, True, True, True, bound)
        return o, ht
    assert torch.autograd.gradcheck(call, given)


def test_defaults_are_those_of_fla() -> None:
    given = inputs("fused_recurrent_rwkv7")
    o, ht = flashlin.fused_recurrent_rwkv7(**given)
    assert ht is not None and torch.equal(o, flashlin.fused_recurrent_rwkv7(**given, scale=3 ** -0.5)[0])
    mul = inputs("fused_mul_recurrent_rwkv7")
    o, ht = flashlin.fused_mul_recurrent_rwkv7(**mul)
    assert ht is None and torch.equal(o, flashlin.fused_mul_recurrent_rwkv7(**mul, scale=1.0)[0])
    assert flashlin.fused_recurrent_kda(**inputs("fused_recurrent_kda"))[1] is None


def test_a_lower_bound_without_the_gate_changes_nothing() -> None:
    given = inputs("fused_recurrent_kda")
    assert torch.equal(flashlin.fused_recurrent_kda(**given, lower_bound=-5.0)[0],
                       flashlin.fused_recurrent_kda(**given)[0])


@OPS
def test_nothing_to_do(op: str) -> None:
    for facts in ({"T": 0}, {"B": 0}):
        given = {name: x.requires_grad_() for name, x in inputs(op, **facts).items()}
        B, T, HV, V = given["v"].shape
        h0 = torch.ones(B, HV, 3, V, dtype=torch.float64, requires_grad=True)
        o, ht = getattr(flashlin, op)(**given, initial_state=h0, output_final_state=True)
        assert o.shape == (B, T, HV, V) and torch.equal(ht, h0)
        grads = torch.autograd.grad(o.sum() + ht.sum(), [*given.values(), h0], allow_unused=True,
                                    materialize_grads=True)
        assert torch.equal(grads[-1], torch.ones_like(h0)) and not any(grad.any() for grad in grads[:-1])


@OPS
def test_strong_decays_forget_and_stay_finite(op: str) -> None:
    decay = next((name for name in ("w", "gk", "g") if name in inputs(op)), None)
    if decay is None:
        return
    given = {name: x.requires_grad_() for name, x in inputs(op).items()}
    given[decay] = given[decay].detach().index_fill(1, torch.tensor([2]), float("-inf")).requires_grad_()
    o, ht = getattr(flashlin, op)(**given, output_final_state=True)
    grads = torch.autograd.grad(o.sum() + ht.sum(), list(given.values()))
    assert all(x.isfinite().all() for x in (o, ht, *grads))
