"""Mamba2 on the torch path; tests/interpret tests the kernels.

The tests cover gradients in float64, states that are views, errors that name the argument, modules and
torch.compile.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
import flashlin.mamba as mamba
from flashlin.kernels.mamba import reference
from flashlin.testing.cases.mamba import CASES, make_layer, make_scan, make_step, make_window
from flashlin.testing.compare import check

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def made(maker: Callable[..., Tensors], dtype: torch.dtype = torch.float32, **facts: Any) -> Tensors:
    return maker(dtype, torch.Generator().manual_seed(0), **facts)


scan_inputs = partial(made, make_scan, T=12, V=8, K=16)


@pytest.mark.parametrize("case",
                         [case for case in CASES if not case.id.startswith("real")
                          and (case.quick or case.id in (
"sequences", "packed", "everything", "groups", "tokens-together", "gate-first", "sequences-state",
"tokens-ring", "pool", "no-heads", "groups-gate-first"))], ids=str)
def test_float64_is_exact(case: Any) -> None:
    """Outputs and gradients in float64 agree with the recurrence to the last digits.

    torch differentiates the formulas here, so the gradients must be as exact as the outputs.
    """
    exact = case._replace(make=lambda *args: {name: x.double() if x.is_floating_point() else x
                                              for name, x in case.make(*args).items()})
    assert [verdict for verdict in check(exact, CPU, torch.float64) if not verdict.rms < 1e-11] == []


# States

def test_a_head_of_a_larger_state_is_written_through() -> None:
    """The state may be the view recurrent_state[:, head], as in Zamba."""
    given = made(make_step, tied=False, H=0)
    whole = torch.randn(3, 2, 20, 24)
    state, before = whole[:, 1], whole.clone()
    y = mamba.selective_state_update(state, *(given[name] for name in ("x", "dt", "A", "B", "C")),
                                     dt_softplus=True)
    wanted, after = reference.step(before[:, 1:],
                                   *(given[name].unsqueeze(at)
                                     for name, at in (("x", 1), ("dt", 1), ("A", 0), ("B", 1), ("C", 1))),
                                   softplus=True)
    torch.testing.assert_close(y, wanted[:, 0])
    torch.testing.assert_close(whole[:, 1], after[:, 0])
    assert torch.equal(whole[:, 0], before[:, 0])


def test_a_slice_of_a_larger_window_is_written_through() -> None:
    given = made(make_window)
    whole = torch.randn(5, 30, 4)
    state, before = whole[:, 7:27], whole.clone()
    mamba.causal_conv1d_update(given["x"][..., 0], state, given["weight"], given["bias"])
    assert torch.equal(state, torch.cat([before[:, 7:27, 1:], given["x"]], 2))
    assert torch.equal(whole[:, :7], before[:, :7]) and torch.equal(whole[:, 27:], before[:, 27:])


@pytest.mark.parametrize("index", [-1, 9], ids=["negative", "past the end"])
def test_a_sequence_without_a_state_touches_nothing(index: int) -> None:
    given = made(make_window)
    state = given.pop("conv_state")
    before, indices = state.clone(), torch.tensor([2, index, 0, 1, 4])
    y = mamba.causal_conv1d_update(given["x"], state, given["weight"], given["bias"],
                                   conv_state_indices=indices)
    assert not y[1].any() and y[0].any() and torch.equal(state[3], before[3]) and not torch.equal(state[0],
                                                                                                  before[0])


def test_decoding_continues_what_the_scan_began() -> None:
    given = scan_inputs(given=("D", "z", "dt_bias"), B=2)
    y, ht = mamba.mamba_chunk_scan_combined(**given, chunk_size=16, dt_softplus=True,
                                            return_final_states=True)
    state = torch.zeros_like(ht)
    H, P, N = state.shape[1:]
    A, D, bias = given["A"][:, None, None].expand(H, P, N), given["D"][:, None].expand(H,
                                                                                       P), given["dt_bias"][:,
                                                                                                            None].expand(H, P)
    rows = [mamba.selective_state_update(state, given["x"][:, t], given["dt"][:, t, :, None].expand(-1, H, P),
                                         A, given["B"][:, t], given["C"][:, t], D, given["z"][:, t], bias,
                                         True) for t in range(12)]
    torch.testing.assert_close(torch.stack(rows, 1), y)
    torch.testing.assert_close(state, ht)


def test_final_states_go_where_they_are_wanted() -> None:
    x, out = torch.randn(2, 6, 9), torch.zeros(2, 3, 6).mT
    y, found = mamba.causal_conv1d_fn(x, torch.randn(6, 4), None, None, None, True, out, "silu")
    assert found is out and torch.equal(out, x[..., -3:]) and y.is_contiguous()
    y = mamba.causal_conv1d_fn(x.mT.contiguous().mT, torch.randn(6, 4))
    assert isinstance(y, torch.Tensor) and y.stride(1) == 1, "channels last in, channels last out"


# Returned values

def test_returned_values_and_dtypes() -> None:
    given = scan_inputs(torch.bfloat16, edges=(0, 5, 12))
    bounds = given.pop("cu_seqlens")
    call = partial(mamba.mamba_chunk_scan_combined, **given, chunk_size=16, dt_softplus=True)
    y = call(cu_seqlens=bounds)
    assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16
    y, ht = call(return_final_states=True)
    assert ht.dtype == torch.float32 and ht.shape == (1, 4, 8, 16)
    y, states = call(return_varlen_states=True, cu_seqlens=bounds)
    assert states.dtype == torch.bfloat16 and states.shape == (2, 4, 8, 16)
    y, ht, both = call(return_final_states=True, return_varlen_states=True, cu_seqlens=bounds)
    assert torch.equal(both, states) and torch.equal(ht[0].bfloat16(), states[1])


@pytest.mark.parametrize("more", [{}, {"return_final_states": True}, {"D": None}, {"z": None, "D": None}])
def test_out_dtype_is_y_before_it_is_rounded(more: dict[str, Any]) -> None:
    given = {**scan_inputs(torch.bfloat16), "chunk_size": 16, **more}
    narrow, wide = (mamba.mamba_chunk_scan_combined(**given, out_dtype=dtype)  # type: ignore[arg-type]
                    for dtype in (None, torch.float32))
    narrow, wide = (y[0] if isinstance(y, tuple) else y for y in (narrow, wide))
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    assert torch.equal(wide.bfloat16(), narrow) and not torch.equal(wide, narrow.float())


def test_cu_seqlens_counts_only_with_its_states() -> None:
    given = scan_inputs(edges=(0, 5, 12))
    bounds = given.pop("cu_seqlens")
    call = partial(mamba.mamba_chunk_scan_combined, **given, chunk_size=16)
    assert torch.equal(call(cu_seqlens=bounds), call())


def test_nothing_to_do() -> None:
    for facts in ({"B": 0}, {"T": 0}):
        given = {name: x.requires_grad_() for name, x in scan_inputs(**facts).items()}
        y, ht = mamba.mamba_chunk_scan_combined(**given, chunk_size=16, return_final_states=True)
        assert y.shape == given["x"].shape and torch.equal(ht, given["initial_states"])
        (y.sum() + ht.sum()).backward()
        assert mamba.causal_conv1d_fn(torch.zeros(facts.get("B", 2), 6, facts.get("T", 3)), torch.zeros(6, 4),
                                      seq_idx=torch.zeros(facts.get("B", 2), facts.get("T", 3),
                                                          dtype=torch.int32)).numel() == 0
    x, groups = torch.zeros(0, 2, 3), torch.zeros(0, 1, 4)
    assert mamba.selective_state_update(torch.zeros(0, 2, 3, 4), x, x, torch.zeros(2, 3, 4), groups,
                                        groups).shape == (0, 2, 3)


def test_no_heads_are_no_error() -> None:
    given = {name: x.requires_grad_() for name, x in scan_inputs(H=0, G=0).items()}
    y, ht = mamba.mamba_chunk_scan_combined(**given, chunk_size=16, return_final_states=True)
    assert y.shape == given["x"].shape and ht.shape == given["initial_states"].shape
    (y.sum() + ht.sum()).backward()


def test_dt_is_clamped_to_zero_as_in_mamba_ssm() -> None:
    """The limit (0, inf) of dt also applies without softplus.

    A negative dt has no effect and gets no gradient.
    """
    given = scan_inputs(given=())
    given["dt"] = (-given["dt"].abs()).requires_grad_()
    y = mamba.mamba_chunk_scan_combined(**given, chunk_size=16)
    y.sum().backward()
    assert not y.any() and not given["dt"].grad.any()


# Wrong arguments

WRONG_SCANS = [
    ({"x": torch.zeros(2, 12, 4)}, ValueError, "x: got shape [2, 12, 4], need [b, T, H, P]"),
    ({"dt": torch.zeros(2, 12, 3)}, ValueError, "dt: got shape [2, 12, 3], need [b, T, H] = [2, 12, 4]"),
    ({"A": torch.zeros(3)}, ValueError, "A: got shape [3], need [H] = [4]"),
    ({"B": torch.zeros(2, 12, 3, 16)}, ValueError,
     "B: got shape [2, 12, 3, 16], need [b, T, G, N] with G a divisor of the 4 heads"),
    ({"C": torch.zeros(2, 12, 1, 16)}, ValueError, "C: got shape [2, 12, 1, 16], need B's shape"),
    ({"D": torch.zeros(5)}, ValueError, "D: got shape [5], need [H, P] or [H] = [4]"),
    ({"z": torch.zeros(2, 12, 4, 9)}, ValueError, "z: got shape"),
    ({"dt_bias": 1.0}, TypeError, "dt_bias: got float"),
    ({"initial_states": torch.zeros(2, 4, 16, 8)}, ValueError,
     "initial_states: got shape [2, 4, 16, 8], need [b, H, P, N] = [2, 4, 8, 16]"),
    ({"seq_idx": torch.zeros(2, 11).int()}, ValueError, "seq_idx: got shape [2, 11], need [b, T] = [2, 12]"),
    ({"seq_idx": torch.zeros(2, 12)}, TypeError, "seq_idx: got torch.float32, need a tensor of integers"),
    ({"chunk_size": 0}, ValueError, "chunk_size: got 0, need an integer"),
    ({"out_dtype": torch.float16}, ValueError,
     "out_dtype: got torch.float16, need None, x's torch.float32 or torch.float32"),
    ({"dt_limit": (1.0, 0.5)}, ValueError, "dt_limit: got (1.0, 0.5)"),
    ({"return_varlen_states": True}, ValueError, "cu_seqlens: got None with return_varlen_states"),
    ({"return_varlen_states": True, "cu_seqlens": torch.tensor([0, 12])}, ValueError,
     "x: The batch size is expected to be 1 rather than 2")]


@pytest.mark.parametrize(("change", "error", "text"), WRONG_SCANS, ids=[text for *_, text in WRONG_SCANS])
def test_wrong_scans(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        mamba.mamba_chunk_scan_combined(**{**scan_inputs(), "chunk_size": 16, **change})  # type: ignore[arg-type]
    assert str(raised.value).startswith(text)


WRONG_LAYERS = [
    ({"headdim": None}, "headdim: got None with D of shape [H], need P"),
    ({"ngroups": 3}, "ngroups: got 3, need a divisor of the 4 heads"),
    ({"zxbcdt": torch.zeros(2, 5, 197)}, "zxbcdt: got 197 columns, need 2 H P + 2 G N + H = 196"),
    ({"conv1d_weight": torch.zeros(67, 4)}, "conv1d_weight: got 67 channels, need H P + 2 G N = 64 + 4 N"),
    ({"rmsnorm_weight": torch.zeros(5)}, "rmsnorm_weight: got shape [5], need [H P] = [64]"),
    ({"outproj_weight": None, "outproj_bias": torch.zeros(24)},
     "outproj_bias: got a tensor without outproj_weight"),
    ({"outproj_weight": torch.zeros(24, 65)},
     "outproj_weight: got shape [24, 65], need [out, M + H P] = [any, 64]"),
    ({"activation": "gelu"}, "activation: got 'gelu'"),
    ({"conv1d_bias": torch.zeros(5)}, "conv1d_bias: got shape [5]")]


@pytest.mark.parametrize(("change", "text"), WRONG_LAYERS, ids=[text for _, text in WRONG_LAYERS])
def test_wrong_layers(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        mamba.mamba_split_conv1d_scan_combined(**{**made(make_layer, T=5), "chunk_size": 16, "headdim": 16,
                                                  "ngroups": 2, **change})  # type: ignore[arg-type]
    assert str(raised.value).startswith(text)


def step_inputs() -> dict[str, Any]:
    return made(make_step, tied=False)


WRONG_STEPS = [
    ({"state": torch.zeros(3, 4)}, ValueError, "state: got shape [3, 4], need [b, H, P, N] or [b, P, N]"),
    ({"state": None}, TypeError, "state: got NoneType"),
    ({"state": torch.zeros(2, 4, 20, 24)}, ValueError,
     "state: got 2 rows, need 3, as x (or state_batch_indices)"),
    ({"state": torch.zeros(3, 4, 20, 24, requires_grad=True)}, ValueError,
     "state: got a tensor that requires a gradient"),
    ({"x": torch.zeros(3, 4, 19)}, ValueError, "x: got shape [3, 4, 19], need [b, H, P] = [3, 4, 20]"),
    ({"A": torch.zeros(4, 20, 23)}, ValueError, "A: got shape [4, 20, 23], need [H, P, N] = [4, 20, 24]"),
    ({"B": torch.zeros(3, 3, 24)}, ValueError, "B: got 3 groups, need a divisor of the 4 heads"),
    ({"C": torch.zeros(3, 1, 24)}, ValueError, "C: got shape [3, 1, 24], need [3, 2, 24], as B"),
    ({"state_batch_indices": torch.zeros(3)}, TypeError, "state_batch_indices: got torch.float32"),
    ({"state_batch_indices": torch.zeros(2).int()}, ValueError,
     "state_batch_indices: got shape [2], need [b] = [3]")]


@pytest.mark.parametrize(("change", "error", "text"), WRONG_STEPS, ids=[text for *_, text in WRONG_STEPS])
def test_wrong_steps(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        mamba.selective_state_update(**{**step_inputs(), **change})
    assert str(raised.value).startswith(text)


X, W = torch.zeros(2, 6, 9), torch.zeros(6, 4)
WRONG_CONVOLUTIONS = [
    ("fn", {"x": X[0]}, "x: got shape [6, 9], need [b, D, T]"),
    ("fn", {"weight": W[:5]}, "weight: got shape [5, 4], need [D, W]"),
    ("fn", {"initial_states": torch.zeros(2, 6, 4)},
     "initial_states: got shape [2, 6, 4], need [b, D, W - 1] = [2, 6, 3]"),
    ("fn", {"seq_idx": torch.zeros(2, 9).int(), "return_final_states": True},
     "return_final_states: got True with seq_idx"),
    ("fn", {"activation": "relu"}, "activation: got 'relu'"),
    ("update", {"conv_state": torch.zeros(2, 6, 2)}, "conv_state: got 2 slots, need at least W - 1 = 3"),
    ("update", {"conv_state": torch.zeros(3, 6, 4)},
     "conv_state: got shape [3, 6, 4], need [b, D, L] = [2, 6, any]"),
    ("update", {"conv_state": torch.zeros(2, 6, 4, requires_grad=True)},
     "conv_state: got a tensor that requires a gradient"),
    ("update", {"cache_seqlens": torch.zeros(3).int()}, "cache_seqlens: got shape [3], need [b] = [2]")]


@pytest.mark.parametrize(("name", "change", "text"), WRONG_CONVOLUTIONS,
                         ids=[text for *_, text in WRONG_CONVOLUTIONS])
def test_wrong_convolutions(name: str, change: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"x": X, "weight": W,
                             **({"conv_state": torch.zeros(2, 6, 4)} if name == "update" else {}), **change}
    with pytest.raises(ValueError) as raised:
        getattr(mamba, f"causal_conv1d_{name}")(**given)
    assert str(raised.value).startswith(text)


def test_wrong_norms() -> None:
    x, weight = torch.zeros(3, 6), torch.zeros(6)
    with pytest.raises(ValueError, match="group_size: got 4, need a divisor of D = 6"):
        mamba.rmsnorm_fn(x, weight, None, group_size=4)
    with pytest.raises(ValueError, match=r"z: got shape \[3, 5\]"):
        mamba.layernorm_fn(x, weight, None, z=torch.zeros(3, 5))
    with pytest.raises(ValueError, match="group_size: got 4, need a divisor of hidden_size = 6"):
        mamba.RMSNorm(6, group_size=4)


# Names

def test_names_and_defaults() -> None:
    assert all(getattr(mamba, name) is not None for name in dir(mamba))
    assert mamba.causal_conv1d_update is flashlin.mamba_causal_conv1d_update is not flashlin.causal_conv1d_update
    assert mamba.RMSNormGated is mamba.RMSNorm is not flashlin.RMSNorm
    assert mamba.RMSNorm(8).norm_before_gate and not flashlin.RMSNormGated(8).norm_before_gate
    with pytest.raises(AttributeError, match=r"module 'flashlin\.mamba' has no attribute 'mamba_inner'"):
        mamba.mamba_inner  # noqa: B018


@pytest.mark.parametrize("before", [False, True])
def test_the_modules(before: bool) -> None:
    x, z = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    norm = flashlin.RMSNormGated(12, group_size=4, norm_before_gate=before)
    assert list(norm.state_dict()) == ["weight"]
    s = x if before else x * F.silu(z)
    y = F.rms_norm(s.unflatten(-1, (3, 4)), (4,), eps=1e-5).flatten(-2)
    torch.testing.assert_close(norm(x, z), y * F.silu(z) if before else y)
    centred = mamba.LayerNorm(12, norm_before_gate=before)
    assert list(centred.state_dict()) == ["weight", "bias"]
    y = F.layer_norm(s, (12,))
    torch.testing.assert_close(centred(x, z), y * F.silu(z) if before else y)


# torch.compile

@pytest.mark.alternate
def test_lengths_share_a_graph() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    graphs = CompileCounterWithBackend("aot_eager")

    def layer(given: Tensors) -> torch.Tensor:
        y = mamba.mamba_split_conv1d_scan_combined(**given, chunk_size=64, headdim=16, ngroups=2)
        assert isinstance(y, torch.Tensor)
        return y
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for T in (70, 100):
        given = {name: x.requires_grad_() for name, x in made(make_layer, T=T).items()}
        given["seq_idx"] = (torch.arange(T) > 30).int().expand(2, T)
        found = [[y, *torch.autograd.grad(y.sin().sum(), list(given.values())[:-1])]
                 for y in (compiled(given), layer(given))]
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert graphs.frame_count <= 2


@torch.no_grad()
def test_a_compiled_step_in_a_pool() -> None:
    given, columns = made(make_step, tied=False, pool=7), made(make_window, B=3, pool=7, ring=True)

    def layer(state: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        inputs = (given[name] for name in ("x", "dt", "A", "B", "C"))
        y = mamba.selective_state_update(state, *inputs, state_batch_indices=given["state_batch_indices"])
        return y.sum() + mamba.causal_conv1d_update(columns["x"], window, columns["weight"], None, None,
                                                    columns["cache_seqlens"], columns["conv_state_indices"])
    ours, theirs = ([x.clone() for x in (given["state"], columns["conv_state"])] for _ in range(2))
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(*ours),
                               layer(*theirs))
    torch.testing.assert_close(ours, theirs)
