"""The ops with one scalar decay per head, on the torch path.

The tests cover errors that name the argument, layouts, empty inputs, dtypes, states, modes and directions.
"""
from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlin
from flashlin.kernels.batch import Batch
from flashlin.kernels.gla.reference import recurrence
from flashlin.kernels.simple_gla import torch_path
from flashlin.ops._common.slopes import lightning_slopes, retention_slopes, slopes_dtype
from flashlin.testing.compare import Case, Tensors, check, judge

CPU, META = torch.device("cpu"), torch.device("meta")
Op = Callable[..., Any]
BOTH = pytest.mark.parametrize("op", [flashlin.chunk_simple_gla, flashlin.fused_recurrent_simple_gla],
                               ids=lambda op: op.__name__)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)),
                       dtype=torch.float64).to(dtype)


def inputs(B: int = 2, T: int = 12, H: int = 3, K: int = 8, V: int = 5,
           dtype: torch.dtype = torch.float64) -> Tensors:
    return {"q": randn(B, T, H, K, seed=1, dtype=dtype), "k": randn(B, T, H, K, seed=2, dtype=dtype),
            "v": randn(B, T, H, V, seed=3, dtype=dtype), "g": F.logsigmoid(randn(B, T, H, seed=4)).to(dtype)}


def expected(given: Tensors, h0: torch.Tensor | None = None, bounds: torch.Tensor | None = None,
             gamma: torch.Tensor | None = None, scale: float | None = None) -> tuple[torch.Tensor,
             torch.Tensor]:
    scale = given["q"].shape[3] ** -0.5 if scale is None else scale
    return recurrence(given["q"], given["k"], given["v"], given.get("g"), gamma, h0=h0, bounds=bounds,
                      scale=scale)


def assert_close(got: Any, wanted: Any, allowed: float | None = None) -> None:
    """Assert that results agree to the digits of float64, or within the relative error ``allowed``."""
    for x, y in zip(got if isinstance(got, tuple) else (got,),
                    wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        if allowed is None:
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
        else:
            assert judge("", x, y, allowed).ok, (x, y)


# Errors name the argument, the value that it got and the value that it needs.

def t(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, "q: got list, need a tensor of shape [B, T, H, K]"),
    ({"q": t(2, 12, 3)}, ValueError, "q: got shape [2, 12, 3], need [B, T, H, K] = [any, any, any, any]"),
    ({"q": t(2, 12, 3, 8, dtype=torch.int64)}, TypeError,
     "q: got dtype torch.int64, need bfloat16, float16, float32 or float64"),
    ({"k": None}, TypeError, "k: got NoneType, need a tensor of shape [B, T, H, K]"),
    ({"k": t(2, 12, 1, 8)}, ValueError, "k: got shape [2, 12, 1, 8], need [B, T, H, K] = [2, 12, 3, 8]"),
    ({"k": t(2, 12, 3, 8, device=META)}, ValueError, "k: got device meta, need cpu, where q is"),
    ({"k": t(2, 12, 3, 8, dtype=torch.complex64)}, TypeError, "k: got dtype torch.complex64, need"),
    ({"v": t(2, 12, 4, 5)}, ValueError, "v: got shape [2, 12, 4, 5], need [B, T, H, V] = [2, 12, 3, any]"),
    ({"v": t(2, 3, 12, 5)}, ValueError, "v: got shape [2, 3, 12, 5], need [B, T, H, V] = [2, 12, 3, any]"),
    ({"v": t(2, 12, 3, 0)}, ValueError, "v: got a head dimension of 0, need at least 1"),
    ({"q": t(2, 12, 3, 0), "k": t(2, 12, 3, 0)}, ValueError, "q: got a head dimension of 0, need at least 1"),
    ({"g": t(2, 12, 3, 8)}, ValueError, "g: got shape [2, 12, 3, 8], need [B, T, HV] = [2, 12, 3]"),
    ({"g": 0.9}, TypeError, "g: got float, need a tensor of shape [B, T, HV]"),
    ({"g": t(2, 12, 3, device=META)}, ValueError, "g: got device meta, need cpu, where q is"),
    ({"g": t(2, 12, 3, dtype=torch.int32)}, TypeError, "g: got dtype torch.int32, need"),
    ({"g_gamma": t(2)}, ValueError, "g_gamma: got shape [2], need [H] = [3]"),
    ({"chunk_size": 48}, ValueError, "chunk_size: got 48, need a power of two of at least 16"),
    ({"chunk_size": 8}, ValueError, "chunk_size: got 8, need a power of two of at least 16"),
    ({"initial_state": t(2, 3, 5, 8)}, ValueError,
     "initial_state: got shape [2, 3, 5, 8], need [N, H, K, V] = [2, 3, 8, 5]"),
    ({"initial_state": t(2, 3, 8, 5), "state_v_first": True}, ValueError,
     "initial_state: got shape [2, 3, 8, 5], need [N, H, V, K] = [2, 3, 5, 8]"),
    ({"initial_state": t(1, 3, 8, 5)}, ValueError,
     "initial_state: got shape [1, 3, 8, 5], need [N, H, K, V] = [2, 3, 8, 5]"),
    ({"initial_state": t(2, 3, 8, 5, dtype=torch.int8)}, TypeError,
     "initial_state: got dtype torch.int8, need"),
    ({"initial_state": t(2, 3, 8, 5, device=META)}, ValueError,
     "initial_state: got device meta, need cpu, where q is"),
    ({"initial_state": (t(2, 3, 8, 5),)}, TypeError,
     "initial_state: got tuple, need a tensor of shape [N, H, K, V]"),
    ({"cu_seqlens": ints(0, 12)}, ValueError,
     "q: The batch size is expected to be 1 rather than 2 when using `cu_seqlens`"),
    ({"cu_seqlens_cpu": ints(0, 12)}, ValueError,
     "cu_seqlens_cpu: got a tensor without cu_seqlens, need both"),
    ({"head_first": True}, TypeError,
     "chunk_simple_gla: head_first is gone; pass [B, T, H, D] tensors (x.transpose(1, 2)"),
    ({"head_first": False}, TypeError, "chunk_simple_gla: head_first is gone"),
    ({"gk": None, "cu_seqlen": None}, TypeError, "chunk_simple_gla: got unexpected keyword cu_seqlen, gk"),
    ({"state_v_first": True, "transpose_state_layout": True}, ValueError,
     "chunk_simple_gla: got both state_v_first and transpose_state_layout, need one of them"),
]
WRONG_TABLES: list[tuple[Any, Any, type[Exception], str]] = [
    ([0, 12], None, TypeError, "cu_seqlens: got list, need an int32 or int64 tensor of shape [N + 1]"),
    (t(2), None, TypeError, "cu_seqlens: got torch.float32, need an int32 or int64 tensor"),
    (ints(0, 12, dtype=torch.int16), None, TypeError,
     "cu_seqlens: got torch.int16, need an int32 or int64 tensor"),
    (ints(0, 12)[None], None, ValueError, "cu_seqlens: got shape [1, 2], need [N + 1]"),
    (ints(), None, ValueError, "cu_seqlens: got shape [0], need [N + 1]"),
    (t(2, dtype=torch.int32, device=META), None, ValueError,
     "cu_seqlens: got device meta, need cpu, where q is"),
    (ints(2, 12), None, ValueError, "cu_seqlens: got a first value of 2, need 0"),
    (ints(0, 7, 5, 12), None, ValueError,
     "cu_seqlens: got 5 after 7 at position 2, need values that never fall"),
    (ints(0, 7), None, ValueError,
     "cu_seqlens: got a last value of 7, need T = 12: sequences must cover the packed tensor"),
    (ints(0, 100), None, ValueError, "cu_seqlens: got a last value of 100, need T = 12"),
    (ints(0), None, ValueError, "cu_seqlens: got a last value of 0, need T = 12"),
    (ints(0, -1, 12), None, ValueError, "cu_seqlens: got -1 after 0 at position 1"),
    (ints(0, 12), [0, 12], TypeError, "cu_seqlens_cpu: got list, need an int32 or int64 tensor"),
    (ints(0, 12), t(2, dtype=torch.int32, device=META), ValueError,
     "cu_seqlens_cpu: got device meta, need cpu"),
    (ints(0, 12), ints(0, 5, 12), ValueError, "cu_seqlens_cpu: got shape [3], need [2], as cu_seqlens"),
]


@pytest.mark.parametrize(("changes", "error", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        flashlin.chunk_simple_gla(**{**inputs(dtype=torch.float32), **changes})
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize(("table", "on_host", "error", "text"), WRONG_TABLES,
                         ids=[text for *_, text in WRONG_TABLES])
def test_wrong_tables_of_sequences(table: Any, on_host: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        flashlin.chunk_simple_gla(**inputs(B=1), cu_seqlens=table, cu_seqlens_cpu=on_host)
    assert str(raised.value).startswith(text)


def test_wrong_number_of_states() -> None:
    with pytest.raises(ValueError,
                       match="initial_state: The number of initial states is expected to be equal to the "
                             "number of input "
                                         "sequences, got 1 states, need 2"):
        flashlin.chunk_simple_gla(**inputs(B=1), cu_seqlens=ints(0, 5, 12), initial_state=randn(1, 3, 8, 5))


def test_a_wrong_mode_lists_the_right_ones() -> None:
    with pytest.raises(ValueError, match="mode: got 'parallel', need one of auto, chunk, fused_recurrent"):
        flashlin.simple_gla(**inputs(), mode="parallel")
    with pytest.raises(ValueError, match="mode: got 'fast', need one of"):
        flashlin.linear_attn(*(inputs()[name] for name in "qkv"), mode="fast")


@pytest.mark.parametrize("op", [name for name, (_, mode) in flashlin.dispatch.OPS.items()
                                if mode in ("chunk", "fused_recurrent") and not name.startswith("mamba")])
def test_every_op_refuses_unknown_keywords_and_head_first(op: str) -> None:
    function = getattr(flashlin, op)
    needed = {name: None
              for name, x in inspect.signature(function).parameters.items() if x.default is x.empty
              and x.kind is not x.VAR_KEYWORD}
    with pytest.raises(TypeError, match=f"{op}: got unexpected keyword gate"):
        function(**needed, gate=None)
    with pytest.raises(TypeError, match=rf"{op}: head_first is gone; pass \[B, T, H, D\]"):
        function(**needed, head_first=False)


@pytest.mark.parametrize("op", ["retention", "chunk_retention", "fused_recurrent_retention"])
def test_retention_says_what_is_wrong_with_q(op: str) -> None:
    with pytest.raises(TypeError, match="q: got NoneType"):
        getattr(flashlin, op)(None, None, None)
    with pytest.raises(ValueError, match=r"q: got shape \[2\], need"):
        getattr(flashlin, op)(t(2), t(2), t(2))


@pytest.mark.parametrize(("layer", "layers"), [(-1, 4), (5, 4), (0, 0)])
def test_lightning_wants_a_layer_that_exists(layer: int, layers: int) -> None:
    with pytest.raises(ValueError,
                       match=f"layer_idx, num_layers: got {layer}, {layers}, need 0 <= layer_idx <= "
                             "num_layers"):
        flashlin.chunk_lightning_attn(*(inputs()[name] for name in "qkv"), layer, layers)


@pytest.mark.parametrize(("changes", "error", "text"), [
    ({"normalize": False, "initial_state": (t(1), t(1))}, TypeError,
     "initial_state: got a tuple with normalize=False, need a tensor"),
    ({"initial_state": t(2, 3, 8, 5)}, TypeError,
     "initial_state: got a tensor with normalize=True, need the pair"),
    ({"initial_state": (t(2, 3, 8, 5), t(2, 3, 8))}, ValueError,
     "initial_state[1]: got shape [2, 3, 8], need [N, 1, H, K] = [any, 1, 3, 8]"),
    ({"initial_state": (t(2, 3, 5, 8), t(2, 1, 3, 8))}, ValueError,
     "initial_state[0]: got shape [2, 3, 5, 8], need [N, H, K, V] = [2, 3, 8, 5]"),
    ({"initial_state": (t(1, 3, 8, 5), t(1, 1, 3, 8))}, ValueError, "initial_state: got shape"),
    ({"q": None}, TypeError, "q: got NoneType"),
])
def test_wrong_states_of_linear_attention(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {name: inputs()[name] for name in "qkv"}
    with pytest.raises(error) as raised:
        flashlin.chunk_linear_attn(**{**given, **changes})
    assert str(raised.value).startswith(text)


def test_debug_checks_the_table_too() -> None:
    with flashlin.settings(debug=True):
        with pytest.raises(ValueError, match="cu_seqlens: got a last value of 7, need T = 12"):
            flashlin.chunk_simple_gla(**inputs(B=1), cu_seqlens=ints(0, 7))
        assert_close(flashlin.chunk_simple_gla(**inputs(B=1), cu_seqlens=ints(0, 7, 12))[0],
                     expected(inputs(B=1), None, ints(0, 7, 12))[0])


# Memory layouts of states.

@BOTH
@pytest.mark.parametrize("edges", [None, (0, 4, 12)], ids=["dense", "packed"])
def test_both_layouts_of_states(op: Op, edges: tuple[int, ...] | None) -> None:
    given, bounds = inputs(B=2 if edges is None else 1), None if edges is None else ints(*edges)
    h0 = randn(2, 3, 8, 5)
    o, ht = op(**given, initial_state=h0, output_final_state=True, cu_seqlens=bounds)
    assert_close((o, ht), expected(given, h0, bounds))
    flipped, state = op(**given, initial_state=h0.mT, output_final_state=True, cu_seqlens=bounds,
                        state_v_first=True)
    assert_close((flipped, state.mT), (o, ht))
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is now called state_v_first"):
        old = op(**given, initial_state=h0.mT.contiguous(), output_final_state=True, cu_seqlens=bounds,
                 transpose_state_layout=True)
    assert_close(old, (flipped, state))
    with pytest.warns(DeprecationWarning):
        assert_close(op(**given, initial_state=h0, output_final_state=True, cu_seqlens=bounds,
                        transpose_state_layout=False), (o, ht))


def test_no_final_state_unless_asked_for() -> None:
    given = {name: inputs()[name] for name in "qkv"}
    assert flashlin.chunk_simple_gla(**given)[1] is None and flashlin.chunk_linear_attn(**given)[1] is None
    assert flashlin.retention(**given)[1] is None and flashlin.simple_gla(**given)[1] is None


# Empty inputs.

@BOTH
@pytest.mark.parametrize("facts", [{"T": 0}, {"B": 0}, {"H": 0}, {"B": 0, "T": 0}, {"T": 0, "H": 0}], ids=str)
def test_empty_tensors(op: Op, facts: dict[str, int]) -> None:
    given = {name: x.requires_grad_() for name, x in inputs(**facts).items()}
    B, T, H, K = given["q"].shape
    h0 = randn(B, H, K, 5).requires_grad_()
    o, ht = op(**given, initial_state=h0, output_final_state=True)
    assert o.shape == (B, T, H, 5) and ht.shape == (B, H, K, 5)
    if T == 0:
        assert torch.equal(ht, h0)
    (o.sum() + (ht * 2).sum()).backward()
    for name in ("q", "k", "v"):
        grad = given[name].grad
        assert grad is not None and not grad.any()
    assert h0.grad is not None and (T or (h0.grad == 2).all())
    op(**given)[0].sum().backward()  # also without states


@BOTH
@pytest.mark.parametrize("edges", [(0, 0, 0, 5, 5, 12, 12), (0, 12), (0, 1, 2, 12), (0, 12, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_empty_sequences(op: Op, edges: tuple[int, ...], dtype: torch.dtype) -> None:
    given, bounds = inputs(B=1), ints(*edges, dtype=dtype)
    h0 = randn(len(edges) - 1, 3, 8, 5)
    o, ht = op(**given, initial_state=h0, output_final_state=True, cu_seqlens=bounds)
    assert_close((o, ht), expected(given, h0, bounds))
    for n in range(len(edges) - 1):
        if edges[n] == edges[n + 1]:
            assert torch.equal(ht[n], h0[n])


@BOTH
@pytest.mark.parametrize("edges", [(0,), (0, 0), (0, 0, 0)], ids=str)
def test_no_rows_at_all(op: Op, edges: tuple[int, ...]) -> None:
    h0 = randn(len(edges) - 1, 3, 8, 5)
    given = {name: x.requires_grad_() for name, x in inputs(B=1, T=0).items()}
    o, ht = op(**given, initial_state=h0, output_final_state=True, cu_seqlens=ints(*edges))
    assert o.shape == (1, 0, 3, 5) and torch.equal(ht, h0)
    o.sum().backward()


def test_linear_attention_of_nothing() -> None:
    given = {name: inputs(T=0)[name] for name in "qkv"}
    o, (ht, z) = flashlin.chunk_linear_attn(**given, output_final_state=True)
    assert o.shape == (2, 0, 3, 5) and ht.shape == (2, 3, 8, 5) and z.shape == (2, 1, 3,
                                                                                8) and not ht.any() and not z.any()


# Sizes, strides and dtypes of the inputs.

@pytest.mark.parametrize(("K", "V"),
                         [(1, 1), (3, 7), (1, 33), (60, 63), (100, 36), (257, 2), (600, 3), (5, 700)])
def test_any_head_size(K: int, V: int) -> None:
    given, h0 = inputs(B=1, T=9, H=2, K=K, V=V), randn(1, 2, K, V)
    assert_close(flashlin.chunk_simple_gla(**given, initial_state=h0, output_final_state=True),
                 expected(given, h0))


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129])
def test_any_length(T: int) -> None:
    given, h0 = inputs(B=1, T=T, H=1), randn(1, 1, 8, 5)
    assert_close(flashlin.chunk_simple_gla(**given, initial_state=h0, output_final_state=True),
                 expected(given, h0))


def test_segments_of_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_path, "SEGMENT", 128)
    given, h0 = inputs(B=1, T=300, H=1), randn(1, 1, 8, 5)
    assert_close(flashlin.chunk_simple_gla(**given, initial_state=h0, output_final_state=True),
                 expected(given, h0))


def test_strong_decays_far_back_do_not_blur_the_gentle_ones_after_them() -> None:
    """Gentle decays stay accurate after 4,096 tokens with strong decays.

    Running sums of log decays near -1e5 have few digits left for the later tokens. Decays between chunks must
    therefore not be differences of running sums.
    """
    given = inputs(B=1, T=8192, H=1, K=4, V=4)
    given["g"] = torch.full((1, 8192, 1), -20.0, dtype=torch.float64)
    given["g"][:, 4096:] = -0.003
    short = {name: x[:, 4096 - 64:] for name, x in given.items()}  # earlier tokens are forgotten
    o, ht = flashlin.chunk_simple_gla(**{name: x.float() for name, x in given.items()},
                                      output_final_state=True)
    wanted, state = flashlin.chunk_simple_gla(**short, output_final_state=True)
    assert_close((o[:, 4096:], ht), (wanted[:, 64:], state), 1e-5)


@BOTH
@pytest.mark.parametrize("edges", [None, (0, 5, 12)], ids=["dense", "packed"])
def test_strided_inputs(op: Op, edges: tuple[int, ...] | None) -> None:
    """Strided inputs give the results of contiguous inputs, and their sources get gradients.

    The inputs are a split of a fused projection, a transposed state, expanded gates and keys, and a strided
    cu_seqlens.
    """
    B, bounds, table = 2 if edges is None else 1, None, None
    if edges is not None:
        bounds, table = ints(*edges), torch.stack([ints(*edges), ints(*edges) + 99], 1)[:, 0]
        assert not table.is_contiguous()
    fused = randn(B, 12, 3, 8 + 8 + 5).requires_grad_()
    gate, state = F.logsigmoid(randn(B, 1, 3)).requires_grad_(), randn(3, 2, 5, 8).requires_grad_()
    q, k, v = fused.split([8, 8, 5], 3)
    k = k[:, :1].expand(B, 12, 3, 8)
    g, h0 = gate.expand(B, 12, 3), state.transpose(0, 1).mT
    assert not any(x.is_contiguous() for x in (q, k, v, g, h0))
    got = op(q, k, v, g, initial_state=h0, output_final_state=True, cu_seqlens=table)
    wanted = expected({"q": q, "k": k, "v": v, "g": g}, h0, bounds)
    assert_close(got, wanted)
    cotangents = [randn(*x.shape, seed=9) for x in wanted]
    assert_close(torch.autograd.grad(got, (fused, gate, state), cotangents),
                 torch.autograd.grad(wanted, (fused, gate, state), cotangents))


@pytest.mark.parametrize(("dtypes", "computed"), [
    (("float32", "bfloat16", "bfloat16"), "float32"), (("bfloat16", "float16", "bfloat16"), "float32"),
    (("float16", "float16", "float32"), "float32"), (("bfloat16", "bfloat16", "float64"), "float64"),
    (("float16", "float16", "float16"), "float32"),
], ids=str)
def test_mixed_dtypes_are_promoted(dtypes: tuple[str, str, str], computed: str) -> None:
    given = inputs(dtype=torch.float32)
    given |= {name: given[name].to(getattr(torch, dtype)).requires_grad_()
              for name, dtype in zip("qkv", dtypes, strict=True)}
    o, ht = flashlin.chunk_simple_gla(**given, output_final_state=True)
    assert o.dtype == given["v"].dtype and ht.dtype == getattr(torch, computed)
    wanted, state = expected(given)
    assert_close(ht, state, 1e-5)
    assert_close(o, wanted, 1e-5 if o.dtype in (torch.float32, torch.float64) else 5e-3)
    o.sum().backward()
    assert all(given[name].grad.dtype == given[name].dtype for name in "qkv")  # type: ignore[union-attr]


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_states_of_any_dtype(op: Op, dtype: torch.dtype) -> None:
    given, h0 = inputs(dtype=torch.bfloat16), randn(2, 3, 8, 5).to(dtype).requires_grad_()
    o, ht = op(**given, initial_state=h0, output_final_state=True)
    assert ht.dtype == torch.float32
    wanted, state = expected(given, h0)
    assert_close(o, wanted, 5e-3)
    assert_close(ht, state, 1e-5)
    cotangent = randn(*ht.shape)
    grad, = torch.autograd.grad(ht, h0, cotangent.float())
    assert grad.dtype == dtype
    assert_close(grad, torch.autograd.grad(state, h0, cotangent)[0], 5e-3)


@pytest.mark.parametrize("scale", [None, 1.0, 0.3, 0.0, -0.5, -2])
@pytest.mark.parametrize("reverse", [False, True])
def test_any_scale(scale: float | None, reverse: bool) -> None:
    given = inputs()
    turned = {name: x.flip(1) for name, x in given.items()} if reverse else given
    wanted, state = expected(turned, None, None, None, scale)
    o, ht = flashlin.fused_recurrent_simple_gla(**given, scale=scale, output_final_state=True,
                                                reverse=reverse)
    assert_close((o, ht), (wanted.flip(1) if reverse else wanted, state))


@BOTH
def test_gates_of_tokens_and_of_heads_add_up(op: Op) -> None:
    given, gamma = inputs(), -torch.rand(3, dtype=torch.float64)
    given["g"].requires_grad_()
    got, wanted = op(**given, g_gamma=gamma, output_final_state=True), expected(given, None, None, gamma)
    assert_close(got, wanted)
    assert_close(torch.autograd.grad(got[0].sum(), given["g"]),
                 torch.autograd.grad(wanted[0].sum(), given["g"]))
    del given["g"]
    assert_close(op(**given, g_gamma=gamma, output_final_state=True), expected(given, None, None, gamma))


# Gradients of the inputs.

@pytest.mark.parametrize("edges", [None, (0, 3, 3, 67)], ids=["dense", "packed"])
@pytest.mark.parametrize("op",
                         [partial(flashlin.chunk_simple_gla, state_v_first=True),
                          partial(flashlin.fused_recurrent_simple_gla, reverse=True)],
                         ids=["chunk", "reverse"])
@pytest.mark.alternate
def test_gradients_by_differences(op: Op, edges: tuple[int, ...] | None) -> None:
    B, T, N = (1, 66, 1) if edges is None else (1, edges[-1], len(edges) - 1)
    bounds = None if edges is None else ints(*edges)
    given = inputs(B=B, T=T, H=1, K=2, V=2)
    leaves = [x.requires_grad_() for x in (*given.values(), randn(N, 1, 2, 2))]

    def call(*tensors: torch.Tensor) -> Any:
        return op(*tensors[:4], initial_state=tensors[4], output_final_state=True, cu_seqlens=bounds)
    assert torch.autograd.gradcheck(call, leaves)


@BOTH
@pytest.mark.parametrize("wanted", ["o", "ht", "both"])
def test_gradients_through_states_that_are_not_contiguous(op: Op, wanted: str) -> None:
    given = {name: x.requires_grad_() for name, x in inputs().items()}
    stored = randn(3, 5, 8, 2).requires_grad_()
    h0 = stored.permute(3, 0, 2, 1)
    assert not h0.is_contiguous()

    def gradients(o: torch.Tensor, ht: torch.Tensor) -> Any:
        loss = {"o": o.sin().sum(), "ht": ht.sin().sum(), "both": o.sin().sum() + ht.sin().sum()}[wanted]
        return torch.autograd.grad(loss, [*given.values(), stored], allow_unused=True, materialize_grads=True)
    assert_close(gradients(*op(**given, initial_state=h0, output_final_state=True)),
                 gradients(*expected(given, h0)))


def test_the_token_op_has_the_gradients_of_the_chunked_one() -> None:
    found = []
    for op in (flashlin.chunk_simple_gla, flashlin.fused_recurrent_simple_gla):
        leaves = {name: x.requires_grad_() for name, x in inputs(T=70).items()}
        o, ht = op(**leaves, output_final_state=True)
        found.append(torch.autograd.grad(o.sin().sum() + ht.sin().sum(), list(leaves.values())))
    assert_close(*found)


def test_only_the_gradients_that_are_wanted() -> None:
    given = inputs()
    given["v"].requires_grad_()
    o, _ = flashlin.chunk_simple_gla(**given)
    o.sum().backward()
    assert given["v"].grad is not None and all(given[name].grad is None for name in "qkg")
    with torch.no_grad():
        assert not flashlin.chunk_simple_gla(**given)[0].requires_grad


# Directions, states passed between calls, modes.

@pytest.mark.parametrize("edges", [None, (0, 4, 4, 12)], ids=["dense", "packed"])
def test_reverse_is_the_recurrence_from_the_end(edges: tuple[int, ...] | None) -> None:
    given = {name: x.requires_grad_() for name, x in inputs(B=2 if edges is None else 1).items()}
    spans = [(b, 0, 12) for b in range(2)] if edges is None else [(0, a, b) for a, b in pairwise(edges)]
    h0 = randn(len(spans), 3, 8, 5).requires_grad_()
    bounds = None if edges is None else ints(*edges)
    o, ht = flashlin.fused_recurrent_simple_gla(**given, initial_state=h0, output_final_state=True,
                                                reverse=True, cu_seqlens=bounds)
    leaves, ours, theirs = [*given.values(), h0], [], []
    for n, (b, first, last) in enumerate(spans):
        turned = {name: x[b:b + 1, first:last].flip(1) for name, x in given.items()}
        wanted, state = expected(turned, h0[n:n + 1])
        by_hand, state_by_hand = flashlin.fused_recurrent_simple_gla(**turned, initial_state=h0[n:n + 1],
                                                                     output_final_state=True)
        assert_close((o[b:b + 1, first:last], ht[n:n + 1]), (wanted.flip(1), state))
        assert_close((o[b:b + 1, first:last], ht[n:n + 1]), (by_hand.flip(1), state_by_hand))
        ours.append(o[b:b + 1, first:last].sin().sum() + ht[n].sin().sum())
        theirs.append(wanted.sin().sum() + state.sin().sum())
    assert_close(torch.autograd.grad(sum(ours), leaves), torch.autograd.grad(sum(theirs), leaves))


@pytest.mark.parametrize("name", ["retention", "linear_attn", "lightning_attn"])
def test_reverse_of_the_rest_of_the_family(name: str) -> None:
    q, k, v = (inputs()[x] for x in "qkv")
    op = getattr(flashlin, "fused_recurrent_" + name)
    extra = (1, 4) if name == "lightning_attn" else ()
    h0 = randn(2, 3, 8, 5)
    o, ht = op(q, k, v, *extra, initial_state=h0, output_final_state=True, reverse=True)
    turned, state = op(q.flip(1), k.flip(1), v.flip(1), *extra, initial_state=h0, output_final_state=True)
    assert_close((o, ht), (turned.flip(1), state))


@pytest.mark.parametrize("cut", [0, 1, 11, 64, 65, 99, 100])
def test_a_sequence_in_two_parts(cut: int) -> None:
    given = inputs(T=100)
    whole = flashlin.chunk_simple_gla(**given, output_final_state=True)
    first, state = flashlin.chunk_simple_gla(**{name: x[:, :cut] for name, x in given.items()},
                                             output_final_state=True)
    second, state = flashlin.chunk_simple_gla(**{name: x[:, cut:] for name, x in given.items()},
                                              initial_state=state, output_final_state=True)
    assert_close((torch.cat([first, second], 1), state), whole)


def test_decoding_token_by_token() -> None:
    given = inputs(T=20, dtype=torch.float32)
    whole, last = flashlin.chunk_simple_gla(**given, output_final_state=True)
    state, rows = None, []
    for i in range(20):
        row, state = flashlin.fused_recurrent_simple_gla(**{name: x[:, i:i + 1] for name, x in given.items()},
                                                         initial_state=state, output_final_state=True)
        rows.append(row)
    assert_close((torch.cat(rows, 1), state), (whole, last), 1e-5)


def test_decoding_packed() -> None:
    """Decoding in a packed batch with one token per sequence equals the reference."""
    given, h0, bounds = inputs(B=1, T=7), randn(7, 3, 8, 5), torch.arange(8)
    got = flashlin.fused_recurrent_simple_gla(**given, initial_state=h0, output_final_state=True,
                                              cu_seqlens=bounds)
    assert_close(got, expected(given, h0, bounds))


@pytest.mark.parametrize("name", ["simple_gla", "retention", "linear_attn"])
@pytest.mark.parametrize("T", [3, 40])
def test_modes_agree(name: str, T: int) -> None:
    given = inputs(T=T)
    if name != "simple_gla":
        del given["g"]
    extra = {"normalize": False} if name == "linear_attn" else {}
    found = [getattr(flashlin, name)(**given, output_final_state=True, mode=mode, **extra)
             for mode in ("auto", "chunk", "fused_recurrent")]
    found += [getattr(flashlin, prefix + name)(**given, output_final_state=True, **extra)
              for prefix in ("chunk_", "fused_recurrent_")]
    for other in found[1:]:
        assert_close(other, found[0])


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_chunk_size_changes_nothing(chunk_size: int) -> None:
    assert_close(flashlin.chunk_simple_gla(**inputs(), chunk_size=chunk_size)[0],
                 flashlin.chunk_simple_gla(**inputs())[0])


def test_the_table_on_the_host() -> None:
    given, bounds = inputs(B=1), ints(0, 5, 12)
    wanted = flashlin.chunk_simple_gla(**given, cu_seqlens=bounds)[0]
    for table in (bounds, bounds.long()):
        assert_close(flashlin.chunk_simple_gla(**given, cu_seqlens=bounds, cu_seqlens_cpu=table)[0], wanted)
        assert_close(flashlin.simple_gla(**given, cu_seqlens=bounds.long(), cu_seqlens_cpu=table)[0], wanted)


def test_a_table_changed_in_place_is_read_again() -> None:
    given, bounds = inputs(B=1), ints(0, 5, 12)
    flashlin.chunk_simple_gla(**given, cu_seqlens=bounds)
    bounds[1] = 9
    assert_close(flashlin.chunk_simple_gla(**given, cu_seqlens=bounds)[0], expected(given, None, bounds)[0])


# Other ops of the family, compared with their definitions.

@pytest.mark.parametrize("H", [1, 3, 32])
def test_slopes(H: int) -> None:
    retention = [math.log(1 - 2.0 ** (-5 - h)) for h in range(H)]
    lightning = [-(8 / H) * (1 - 3 / 12) * h for h in range(H)]
    for dtype, error in ((torch.float32, 1e-7), (torch.float64, 1e-14)):
        for got, wanted in ((retention_slopes(H, dtype, CPU), retention),
                            (lightning_slopes(H, 3, 12, dtype, CPU), lightning)):
            assert got.dtype == dtype and got.tolist() == pytest.approx(wanted, rel=error)
    assert retention_slopes(0, dtype, CPU).shape == lightning_slopes(0, 0, 1, dtype, CPU).shape == (0,)
    assert not lightning_slopes(H, 12, 12, torch.float32, CPU).any()


@pytest.mark.parametrize("prefix", ["chunk_", "fused_recurrent_"])
def test_retention_and_lightning_attention(prefix: str) -> None:
    given = {name: inputs()[name] for name in "qkv"}
    h0 = randn(2, 3, 8, 5)
    gamma = torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(3)], dtype=torch.float64)
    got = getattr(flashlin, prefix + "retention")(**given, initial_state=h0, output_final_state=True)
    assert_close(got, expected(given, h0, None, gamma))
    gamma = torch.tensor([-(8 / 3) * (1 - 1 / 4) * h for h in range(3)], dtype=torch.float64)
    got = getattr(flashlin, prefix + "lightning_attn")(**given, layer_idx=1, num_layers=4, initial_state=h0,
                                                       output_final_state=True)
    assert_close(got, expected(given, h0, None, gamma))


def test_slopes_of_a_traced_float64_call_are_float64() -> None:
    """The slopes of a call are float64 if one tensor is float64, also under torch.compile.

    Otherwise they are float32.
    """
    given = {name: inputs()[name] for name in "qkv"}
    gamma = torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(3)], dtype=torch.float64)
    traced = torch.compile(flashlin.chunk_retention, fullgraph=True, backend="aot_eager")
    assert_close(traced(**given)[0], expected(given, None, None, gamma)[0])
    mixed = {**given, "q": given["q"].float()}
    wanted = expected({**given, "q": mixed["q"].double()}, None, None, gamma)[0]
    assert_close(flashlin.chunk_retention(**mixed)[0], wanted)
    assert slopes_dtype(given["q"].bfloat16(), None) == slopes_dtype(given["q"].float(), "v") == torch.float32


@pytest.mark.parametrize("edges", [None, (0, 4, 4, 12)], ids=["dense", "packed"])
@pytest.mark.parametrize("op",
                         [flashlin.chunk_linear_attn, flashlin.linear_attn,
                          partial(flashlin.fused_recurrent_linear_attn, normalize=True)],
                         ids=["chunk", "auto", "fused_recurrent"])
def test_normalised_linear_attention_token_by_token(op: Op, edges: tuple[int, ...] | None) -> None:
    q, k = (F.elu(randn(2 if edges is None else 1, 12, 3, 8, seed=seed)).add(1.1).requires_grad_()
            for seed in (1, 2))
    v = randn(q.shape[0], 12, 3, 5).requires_grad_()
    spans = [(b, 0, 12) for b in range(2)] if edges is None else [(0, a, b) for a, b in pairwise(edges)]
    kv, z = randn(len(spans), 3, 8, 5).requires_grad_(), torch.rand(len(spans), 1, 3, 8,
                                                                    dtype=torch.float64).requires_grad_()
    o, (ht, sums) = op(q, k, v, initial_state=(kv, z), output_final_state=True,
                       cu_seqlens=None if edges is None else ints(*edges))
    assert ht.shape == (len(spans), 3, 8, 5) and sums.shape == (len(spans), 1, 3, 8)
    leaves, loss, reference = (q, k, v, kv,
                               z), o.sin().sum() + ht.sin().sum() + sums.sin().sum(), torch.zeros((),
                                                                                                  dtype=torch.float64)
    for n, (b, first, last) in enumerate(spans):
        state, total = kv[n], z[n, 0]
        for i in range(first, last):
            state, total = state + k[b, i][:, :, None] * v[b, i][:, None], total + k[b, i]
            query = q[b, i] * 8 ** -0.5
            row = (query[:, :, None] * state).sum(1) / ((query * total).sum(-1, keepdim=True) + 1e-10)
            assert_close(o[b, i], row)
            reference = reference + row.sin().sum()
        assert_close((ht[n], sums[n, 0]), (state, total))
        reference = reference + state.sin().sum() + total.sin().sum()
    assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(reference, leaves))


def test_dtypes_of_normalised_linear_attention() -> None:
    q, k, v = (x.abs().bfloat16() for x in (inputs()[name] for name in "qkv"))
    o, (ht, z) = flashlin.chunk_linear_attn(q, k, v, output_final_state=True)
    assert (o.dtype, ht.dtype, z.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


def test_slopes_made_for_inference_serve_training() -> None:
    for make in (flashlin.chunk_retention,
                 partial(flashlin.chunk_lightning_attn, layer_idx=5, num_layers=77)):
        q = torch.randn(1, 4, 37, 8)  # no other test uses this number of heads, so no cache has it
        with torch.inference_mode():
            make(q, q, q)
        q.requires_grad_()
        make(q, q, q)[0].sum().backward()
        assert q.grad is not None and q.grad.abs().sum() > 0


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_more_sequences_and_heads_than_a_grid_axis_holds(packed: bool) -> None:
    B, T, H, D = 10923, 4, 6, 16
    rows = (1, B * T, H) if packed else (B, T, H)
    q, k, v = (torch.randn(*rows, D).requires_grad_() for _ in range(3))
    g = F.logsigmoid(torch.randn(rows)).requires_grad_()
    o, _ = flashlin.chunk_simple_gla(q, k, v, g,
                                     cu_seqlens=torch.arange(B + 1, dtype=torch.int32) * T if packed
                                     else None)
    grads = torch.autograd.grad(o.sum(), (q, k, v, g))
    for n in (0, 5461, B - 1):  # sequences are independent, so three of them suffice
        at = (slice(0, 1), slice(n * T, (n + 1) * T)) if packed else (slice(n, n + 1),)
        one = {name: x[at].detach().double().requires_grad_()
               for name, x in zip("qkvg", (q, k, v, g), strict=True)}
        wanted, _ = expected(one)
        assert_close(o[at], wanted, 1e-5)
        for got, grad in zip(grads, torch.autograd.grad(wanted.sum(), list(one.values())), strict=True):
            assert_close(got[at], grad, 1e-5)


# Property-based test with random calls.

@pytest.mark.usefixtures("modules_read")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_anything_against_the_reference(data: st.DataObject) -> None:
    def pick(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))
    size = st.integers(1, 9)
    dtype = pick(torch.float32, torch.bfloat16, torch.float16)
    H, K, V = (data.draw(size) for _ in range(3))
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(any))
    packed, gate, scale = data.draw(st.booleans()), pick(None, 0.01, 1.0, 20.0), pick(None, 1.0, -0.3)
    has_gamma, has_state, v_first = (data.draw(st.booleans()) for _ in range(3))
    op = pick("chunk_simple_gla", "fused_recurrent_simple_gla", "simple_gla")
    B, T, N = (1, sum(lengths), len(lengths)) if packed else (len(lengths), max(lengths), len(lengths))

    def make(dtype: torch.dtype, generator: torch.Generator) -> Tensors:
        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)
        found = {"q": made(B, T, H, K).to(dtype), "k": made(B, T, H, K).to(dtype),
                 "v": made(B, T, H, V).to(dtype)}
        if gate is not None:
            found["g"] = F.logsigmoid(made(B, T, H)) * gate
        if has_gamma:
            found["g_gamma"] = -made(H).abs()
        if has_state:
            found["initial_state"] = made(N, H, K, V)
        if packed:
            found["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        return found

    def call(initial_state: torch.Tensor | None = None, **tensors: torch.Tensor) -> Tensors:
        h0 = initial_state.mT if v_first and initial_state is not None else initial_state
        o, ht = getattr(flashlin, op)(**tensors, scale=scale, initial_state=h0, output_final_state=True,
                                      state_v_first=v_first)
        return {"o": o, "ht": ht.mT if v_first else ht}

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None = None,
                  g_gamma: torch.Tensor | None = None, initial_state: torch.Tensor | None = None,
                  cu_seqlens: torch.Tensor | None = None) -> Tensors:
        o, ht = recurrence(q, k, v, g, g_gamma, h0=initial_state, bounds=cu_seqlens,
                           scale=K ** -0.5 if scale is None else scale)
        return {"o": o, "ht": ht}
    case = Case(op, "anything", make, call, reference, {"*": 0.005, "d*": 0.008, "dg": 0.02},
                constant=("g_gamma",))
    assert [verdict for verdict in check(case, CPU, dtype) if not verdict.ok] == []


# Ops that share the chunked kernels.

def test_fused_chunk_ops_are_the_chunked_ones() -> None:
    given, h0 = inputs(), randn(2, 3, 8, 5)
    qkv = [given[name] for name in "qkv"]
    assert_close(flashlin.fused_chunk_simple_gla(**given, initial_state=h0, output_final_state=True),
                 expected(given, h0))
    gamma = randn(3).abs().neg()
    assert_close(flashlin.fused_chunk_simple_gla(*qkv, None, gamma, 0.5),
                 flashlin.chunk_simple_gla(*qkv, None, gamma, 0.5)[0:1] + (None,))
    assert_close(flashlin.fused_chunk_retention(*qkv, 0.5, h0, True),
                 flashlin.chunk_retention(*qkv, 0.5, h0, True))
    positive = [x.abs() for x in qkv]
    o, state = flashlin.fused_chunk_linear_attn(*positive, output_final_state=True)
    expected_o, expected_state = flashlin.chunk_linear_attn(*positive, output_final_state=True)
    assert isinstance(state, tuple) and isinstance(expected_state, tuple)
    assert_close((o, *state), (expected_o, *expected_state))
    with pytest.raises(ValueError,
                       match=r"g_gamma: got both g and g_gamma, need one of them \(chunk_simple_gla adds "
                             r"them up\)"):
        flashlin.fused_chunk_simple_gla(**given, g_gamma=gamma)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_summed_over_heads_have_the_dtype_of_q(dtype: torch.dtype) -> None:
    """Kernels write float32 if over 16 heads share one head of q and k."""
    batch = Batch.__new__(Batch)
    batch.H, batch.x = 2, SimpleNamespace(q=torch.zeros(1, dtype=torch.bfloat16))
    batch.plan = cast(Any, SimpleNamespace(has=lambda kernel: False))
    found = batch.of_groups(torch.ones(1, 3, 6, 4, dtype=dtype))
    assert found.dtype == torch.bfloat16 and torch.equal(found, torch.full((1, 3, 2, 4), 3.0).bfloat16())
