"""Tests of flashlin.serving on the torch path: decoding, drafts and prompts with pools of states."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import flashlin
from flashlin import serving
from flashlin.kernels.recurrent import pool_torch
from flashlin.ops._common.operator import fields_of
from flashlin.serving import delta
from tests.serving import checks
from tests.serving.checks import KINDS, Layer, at, decoded, prefilled, same

F32, BF16 = torch.float32, torch.bfloat16
# One layer of each kind, with different shapes and dtypes.
LAYERS = [Layer(kind, *sizes, *dtypes, neg=neg) for kind, sizes, dtypes, neg in zip(
    KINDS, [(1, 1, 16, 16), (2, 4, 24, 40), (2, 2, 33, 7), (1, 3, 48, 16), (3, 3, 20, 12), (1, 2, 5, 64)],
    [(F32, F32), (BF16, BF16), (BF16, F32), (F32, F32), (F32, BF16), (torch.float16, F32)],
    [False, False, True, False, False, True], strict=True)]


def named(layer: Layer) -> str:
    return f"{layer.kind}-{layer.dtype}-{layer.state}".replace("torch.", "")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layer", LAYERS, ids=named)
def test_decoding_beside_float64(layer: Layer) -> None:
    checks.check_decoding(layer)


@pytest.mark.parametrize("layer", LAYERS, ids=named)
def test_drafts_give_the_bits_of_plain_decoding(layer: Layer) -> None:
    checks.check_drafts(layer)
    checks.check_drafts(layer, 1)
    checks.check_drafts_of_several_lengths(layer)


@pytest.mark.parametrize("mode", delta.MODES)
@pytest.mark.parametrize("layer", LAYERS, ids=named)
def test_prompts_and_their_pieces(layer: Layer, mode: str) -> None:
    checks.check_prompts(layer, mode, [5, 3, 0, 12])
    checks.check_prompts(layer, mode, [1, 2, 70, 2] if mode == "chunk" else [1, 2, 9, 2])


@pytest.mark.parametrize("mode", delta.MODES)
def test_nothing_leaks_into_other_requests(mode: str) -> None:
    checks.check_isolation(Layer("heads, raw"), mode)


def test_rows_of_nobody_are_zero() -> None:
    checks.check_rows_of_nobody(Layer("heads"))


def test_float64_is_what_float64_gives() -> None:
    layer = Layer("heads, raw", dtype=torch.float64, state=torch.float64)
    options, pool, tokens = layer.parameters(), layer.pool(2), layer.tokens(9)
    wanted, S = checks.sequential(layer, tokens, options, pool[1])
    for mode in delta.MODES:
        states = pool.clone()
        o = prefilled(options, tokens, states, layer.integers([1]), [9], [True], mode)
        checks.close(o, wanted, 1e-13)
        checks.close(states[1], S, 1e-13)


def test_threads_and_neighbours_change_no_bit() -> None:
    """A request gives bitwise the same result alone and in a batch that torch splits between threads."""
    layer = Layer("channels, raw", 2, 4, 64, 64)
    options, pool, tokens = layer.parameters(), layer.pool(40), layer.tokens(40)
    threads, before = torch.get_num_threads(), pool.clone()
    torch.set_num_threads(2)
    try:
        o = decoded(options, tokens, pool, torch.arange(40))
    finally:
        torch.set_num_threads(threads)
    for n in (0, 17, 39):
        same(decoded(options, at(tokens, [n]), before, torch.tensor([n])), o[[n]])
        same(before[n], pool[n])


def test_a_strided_pool_and_strided_tokens() -> None:
    """Decoding supports a strided view of a pool for all layers, and strided q, k and v of one projection."""
    whole = torch.randn(5, 3, 2, 8, 16)
    pool, before = whole[:, 1], whole.clone()
    q, k, v = torch.randn(3, 1, 2, 40).split([16, 16, 8], -1)
    g, beta = -torch.rand(3, 1, 2), torch.rand(3, 1, 2)
    o = serving.decode(q, k, v, g, beta, pool, torch.tensor([4, 0, 2]))
    plain = before[:, 1].clone()
    same(serving.decode(q.contiguous(), k.contiguous(), v.contiguous(), g, beta, plain,
                        torch.tensor([4, 0, 2])), o)
    same(whole[:, 1], plain)
    same(whole[:, ::2], before[:, ::2])


def test_it_is_the_fused_recurrent_op() -> None:
    layer = Layer("heads, raw")
    options, pool, tokens = layer.parameters(), layer.pool(5), layer.tokens(3)
    states, indices = pool.clone(), torch.tensor([3, -1, 1])
    o = decoded(options, tokens, pool, indices)
    given: dict[str, Any] = {name: x[:, None] for name, x in tokens.items() if x is not None}
    wanted, _ = flashlin.fused_recurrent_gated_delta_rule(
        **given, initial_state=states, state_indices=indices, state_v_first=True, **options)
    torch.testing.assert_close(o, wanted[:, 0])
    torch.testing.assert_close(pool, states)


def test_rows_of_sequences_that_are_not_wanted_and_of_none() -> None:
    """The mask of rows excludes unwanted sequences, and rows outside of every sequence.

    Only cu_seqlens on a GPU can leave rows before the first or after the last sequence, because the host does
    not read its values.
    """
    y, edges = torch.ones(1, 7, 2), torch.tensor([1, 2, 4, 4, 6])
    rows = pool_torch.rows_of(y, edges, torch.tensor([True, False, True, True]))
    assert rows[0, :, 0].tolist() == [0, 1, 0, 0, 1, 1, 0] and torch.equal(rows[..., 0], rows[..., 1])
    assert not pool_torch.rows_of(y, torch.tensor([0]), torch.ones(0, dtype=torch.bool)).any()


@pytest.mark.parametrize(("N", "slots", "rows"), [(0, 3, 0), (2, 0, 2), (2, 3, 0)])
def test_nothing_to_do(N: int, slots: int, rows: int) -> None:
    """Calls without requests, slots or tokens return zeros or empty tensors and do not change the pool."""
    layer = Layer("heads, raw")
    options, pool = layer.parameters(), layer.pool(slots)
    before = pool.clone()
    indices = torch.arange(N)
    if rows == N:
        assert not decoded(options, layer.tokens(N), pool, indices).any()
    for mode in delta.MODES:
        lengths = [rows // N] * N if N else []
        o = prefilled(options, layer.tokens(rows), pool, indices, lengths, [True] * N, mode)
        assert o.shape == (rows, 4, 40) and not o.any()
    same(pool, before)


@pytest.mark.parametrize("mode", ["decode", "chunk"])
def test_compiled_it_writes_the_same_bits(mode: str) -> None:
    layer = Layer("heads, raw", 2, 2, 16, 8)
    options, pool, tokens = layer.parameters(), layer.pool(4), layer.tokens(6)
    has, edges = torch.tensor([False, True]), torch.tensor([0, 2, 6])

    def call(states: torch.Tensor) -> torch.Tensor:
        if mode == "decode":
            given = {name: x[:2, None] for name, x in tokens.items() if x is not None}
            return serving.decode(**given, states=states, indices=torch.tensor([2, -1]), **options)
        given = {name: x[None] for name, x in tokens.items() if x is not None}
        return serving.prefill(**given, states=states, indices=torch.tensor([2, 0]), cu_seqlens=edges,
                               has_initial_state=has, mode=mode, **options)
    with torch.no_grad():
        eager, compiled = pool.clone(), pool.clone()
        o = call(eager)
        traced = torch.compile(call, backend="aot_eager", fullgraph=True)(compiled)
    (same if mode != "chunk" else torch.testing.assert_close)(traced, o)
    (same if mode != "chunk" else torch.testing.assert_close)(compiled, eager)
    assert not torch.equal(eager, pool)


def test_the_library_operator_is_what_it_says() -> None:
    layer = Layer("heads, raw", 2, 2, 16, 8)
    options, tokens = layer.parameters(), layer.tokens(2)
    x = {name: x[:, None] for name, x in tokens.items() if x is not None}
    x |= {"A_log": options["A_log"], "dt_bias": options["dt_bias"]}
    beside = delta.Beside(layer.pool(3), torch.tensor([[1], [2]]), None, 0.25, "l2norm sigmoid", F32,
                          "fused_recurrent_gated_delta_rule")
    torch.library.opcheck(torch.ops.flashlin.serving_decode.default,
                          (*(x.get(name) for name in fields_of(delta.Inputs)), *beside))


# --- errors ---

def arguments(**changed: Any) -> dict[str, Any]:
    q, v = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 4, 6)
    return dict(q=q, k=q, v=v, g=-torch.rand(2, 1, 4), beta=torch.rand(2, 1, 4),
                states=torch.zeros(5, 4, 6, 8), indices=torch.tensor([1, 3])) | changed


def packed(**changed: Any) -> dict[str, Any]:
    given = {name: x.transpose(0, 1) if name in ("q", "k", "v", "g", "beta") else x
             for name, x in arguments().items()}
    return given | dict(cu_seqlens=torch.tensor([0, 1, 2]), has_initial_state=torch.tensor([True, False])
                        ) | changed


@pytest.mark.parametrize(("changed", "error", "said"), [
    ({"states": torch.zeros(5, 4, 8, 6)}, ValueError,
     r"states: got shape \[5, 4, 8, 6\], need \[P, H, V, K\]"),
    ({"states": torch.zeros(5, 4, 8, 6).mT}, ValueError, "states: got strides .* contiguous"),
    ({"states": torch.zeros(5, 4, 6, 8, dtype=torch.int32)}, TypeError, "states: got dtype torch.int32"),
    ({"states": None}, ValueError, "states: got None"),
    ({"states": torch.zeros(5, 4, 6, 8).requires_grad_()}, ValueError, "states: .* require gradients"),
    ({"indices": torch.tensor([1])}, ValueError, r"indices: got shape \[1\], need \[N\]"),
    ({"indices": torch.tensor([1.0, 2.0])}, TypeError, "indices: got torch.float32"),
    ({"indices": [1, 2]}, TypeError, "indices: got list"),
    ({"indices": torch.zeros(2, 0, dtype=torch.int32)}, ValueError, "indices: got no columns"),
    ({"num_accepted_tokens": torch.tensor([True, False])}, TypeError, "num_accepted_tokens: got torch.bool"),
    ({"num_accepted_tokens": torch.tensor([1])}, ValueError, "num_accepted_tokens: got shape"),
    ({"g": torch.zeros(2, 1, 4, 6)}, ValueError, r"g: got shape .* need \[B, T, HV, K\] = \[2, 1, 4, 8\]"),
    ({"g": torch.zeros(2, 1, 2)}, ValueError, r"g: got shape .* need \[B, T, HV\]"),
    ({"beta": torch.zeros(2, 1, 2)}, ValueError, "beta: got shape"),
    ({"g": None, "use_gate_in_kernel": True}, TypeError, "g: got NoneType"),
    ({"use_gate_in_kernel": True}, TypeError, "A_log: got NoneType"),
    ({"beta": None, "use_beta_sigmoid_in_kernel": True}, TypeError, "beta: got NoneType"),
    ({"A_log": torch.zeros(4)}, ValueError, "A_log without use_gate_in_kernel"),
    ({"lower_bound": -5.0}, ValueError, "lower_bound: got -5.0, need None"),
    ({"lower_bound": 5.0}, ValueError, "lower_bound: got 5.0, need a number below 0"),
    ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval without"),
    ({"v": torch.zeros(2, 1, 3, 6)}, ValueError, "v: got 3 heads"),
], ids=str)
def test_a_wrong_argument_is_named(changed: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        serving.decode(**arguments(**changed))


@pytest.mark.parametrize(("changed", "error", "said"), [
    ({"indices": torch.tensor([[1], [3]])}, ValueError, r"indices: got shape \[2, 1\], need \[N\]"),
    ({"cu_seqlens": None}, TypeError, "cu_seqlens: got NoneType"),
    ({"cu_seqlens": torch.tensor([0, 1, 3])}, ValueError, "cu_seqlens: got a last value of 3"),
    ({"has_initial_state": torch.tensor([1, 0])}, TypeError,
     "has_initial_state: got torch.int64, need a bool"),
    ({"has_initial_state": torch.tensor([True])}, ValueError, "has_initial_state: got shape"),
    ({"has_initial_state": None}, TypeError, "has_initial_state: got NoneType"),
    ({"mode": "auto"}, ValueError, "mode: got 'auto', need one of chunk, fused_recurrent"),
], ids=str)
def test_a_wrong_argument_of_a_prompt_is_named(changed: dict[str, Any], error: type[Exception],
                                               said: str) -> None:
    with pytest.raises(error, match=said):
        serving.prefill(**packed(**changed))


@pytest.mark.parametrize(("changed", "said"), [
    ({"indices": torch.tensor([1, 5])}, "indices: got 5, need less than 5"),
    ({"indices": torch.tensor([3, 3])}, "indices: got one slot twice"),
    ({"indices": torch.tensor([[0, 1], [2, 3]]), "num_accepted_tokens": torch.tensor([1, 3])},
     "num_accepted_tokens: got 3, need 0 .. 2"),
], ids=str)
def test_debug_mode_looks_at_values(changed: dict[str, Any], said: str) -> None:
    serving.decode(**arguments(**changed))
    with flashlin.settings(debug=True), pytest.raises(ValueError, match=said):
        serving.decode(**arguments(**changed))
    with flashlin.settings(debug=True):
        serving.decode(**arguments(indices=torch.tensor([-1, -1])))
        serving.prefill(**packed())


def test_a_wrong_argument_writes_nothing() -> None:
    given = packed(indices=torch.tensor([1, 3]), mode="chunks")
    with pytest.raises(ValueError, match="mode"):
        serving.prefill(**given)
    assert not given["states"].any()
