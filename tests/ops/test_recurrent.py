"""The token-by-token delta ops on the torch path.

The tests cover errors that name the argument, layouts, empty inputs, dtypes, groups of heads and pools of
states.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashlin
from flashlin.kernels.delta.reference import recurrence
from flashlin.kernels.recurrent.inputs import Inputs
from flashlin.ops._common import recurrent
from flashlin.testing.compare import Tensors, judge

META = torch.device("meta")
Op = Callable[..., Any]
BOTH = pytest.mark.parametrize("op",
                               [flashlin.fused_recurrent_delta_rule,
                                flashlin.fused_recurrent_gated_delta_rule], ids=lambda op: op.__name__)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)),
                       dtype=torch.float64).to(dtype)


def inputs(B: int = 2, T: int = 7, H: int = 2, HV: int = 4, K: int = 8, V: int = 5,
           dtype: torch.dtype = torch.float64) -> Tensors:
    return {"q": randn(B, T, H, K, seed=1, dtype=dtype),
            "k": F.normalize(randn(B, T, H, K, seed=2), dim=-1).to(dtype),
            "v": randn(B, T, HV, V, seed=3, dtype=dtype), "beta": randn(B, T, HV, seed=4).sigmoid().to(dtype)}


def gated(**facts: Any) -> Tensors:
    given = inputs(**facts)
    return {**given, "g": F.logsigmoid(randn(*given["beta"].shape, seed=5)).to(given["q"].dtype)}


def expected(given: Tensors, h0: torch.Tensor | None = None,
             bounds: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return recurrence(given["q"], given["k"], given["v"], given.get("beta"), given.get("g"),
                      given.get("gk"), given.get("gv"), h0=h0, bounds=bounds,
                      scale=given["q"].shape[3] ** -0.5)


def assert_close(got: Any, wanted: Any) -> None:
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def t(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


OP = "fused_recurrent_gated_delta_rule: "
RAW = {"use_gate_in_kernel": True}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": t(2, 7, 4, 8)}, ValueError, "k: got shape [2, 7, 4, 8], need [B, T, H, K] = [2, 7, 2, 8]"),
    ({"v": t(2, 7, 3, 5)}, ValueError, "v: got 3 heads, need a multiple of the 2 heads of q and k"),
    ({"v": t(2, 7, 0, 5)}, ValueError, "v: got 0 heads, need a multiple of the 2 heads of q and k"),
    ({"v": t(2, 9, 4, 5)}, ValueError, "v: got shape [2, 9, 4, 5], need [B, T, HV, V] = [2, 7, any, any]"),
    ({"beta": t(2, 7, 2)}, ValueError,
     "beta: got shape [2, 7, 2], need [B, T, HV] or [B, T, HV, V] = [2, 7, 4]"),
    ({"beta": t(2, 7, 4, 1)}, ValueError, "beta: got shape [2, 7, 4, 1], need [B, T, HV, V] = [2, 7, 4, 5]"),
    ({"beta": 0.5}, TypeError, "beta: got float, need a tensor of shape [B, T, HV] or [B, T, HV, V]"),
    ({"g": t(2, 7, 4, 8)}, ValueError, "g: got shape [2, 7, 4, 8], need [B, T, HV] = [2, 7, 4]"),
    ({"gk": t(2, 7, 2, 8)}, ValueError, "gk: got shape [2, 7, 2, 8], need [B, T, HV, K] = [2, 7, 4, 8]"),
    ({"gv": t(2, 7, 4, 8)}, ValueError, "gv: got shape [2, 7, 4, 8], need [B, T, HV, V] = [2, 7, 4, 5]"),
    ({"gv": t(2, 7, 4, 5, dtype=torch.int32)}, TypeError, "gv: got dtype torch.int32, need bfloat16"),
    ({"g": t(2, 7, 4, device=META)}, ValueError, "g: got device meta, need cpu, where q is"),
    ({"g": None, **RAW, "A_log": t(4)}, ValueError,
     OP + "g: got None, need a tensor with use_gate_in_kernel"),
    (RAW, ValueError, OP + "A_log: got None, need a tensor with use_gate_in_kernel"),
    ({**RAW, "A_log": t(2)}, ValueError, "A_log: got shape [2], need [HV] = [4]"),
    ({**RAW, "A_log": t(4), "dt_bias": t(4, 8)}, ValueError, "dt_bias: got shape [4, 8], need [HV] = [4]"),
    ({"A_log": t(4)}, ValueError, OP + "got A_log without use_gate_in_kernel, which alone reads it"),
    ({"dt_bias": t(4)}, ValueError, OP + "got dt_bias without use_gate_in_kernel, which alone reads it"),
    ({"allow_neg_eigval": True}, ValueError,
     OP + "got allow_neg_eigval without use_beta_sigmoid_in_kernel, need both"),
    ({"beta": None, "use_beta_sigmoid_in_kernel": True}, ValueError,
     OP + "beta: got None, need a tensor with use_beta_sigmoid_in_kernel"),
    ({"initial_state": t(2, 4, 5, 8)}, ValueError,
     "initial_state: got shape [2, 4, 5, 8], need [N, H, K, V] = [2, 4, 8, 5]"),
    ({"initial_state": t(2, 2, 8, 5)}, ValueError,
     "initial_state: got shape [2, 2, 8, 5], need [N, H, K, V] = [2, 4, 8, 5]"),
    ({"initial_state": t(2, 4, 8, 5), "state_v_first": True}, ValueError,
     "initial_state: got shape [2, 4, 8, 5], need [N, H, V, K] = [2, 4, 5, 8]"),
    ({"cu_seqlens": ints(0, 7)}, ValueError,
     "q: The batch size is expected to be 1 rather than 2 when using `cu_seqlens`"),
    ({"state_v_first": True, "transpose_state_layout": True}, ValueError,
     OP + "got both state_v_first and transpose_state_layout"),
    ({"inplace_state": True}, ValueError,
     "initial_state: got None, need the states that inplace_state reads and overwrites"),
    ({"state_indices": ints(0, 1)}, ValueError,
     "initial_state: got None, need the states that state_indices reads and overwrites"),
    ({"inplace_state": True, "initial_state": t(3, 4, 8, 5)}, ValueError,
     "initial_state: got shape [3, 4, 8, 5], need [N, H, K, V] = [2, 4, 8, 5]"),
    ({"inplace_state": True, "initial_state": t(2, 4, 5, 8).mT}, ValueError,
     "initial_state: got strides [160, 40, 1, 8], need each H, K, V block contiguous and apart from the "
     "others, since inplace_state"),
    ({"inplace_state": True, "initial_state": t(1, 4, 8, 5).expand(2, -1, -1, -1)}, ValueError,
     "initial_state: got strides [0, 40, 5, 1]"),
    ({"state_indices": ints(0, 1), "initial_state": t(9, 4, 5, 8)}, ValueError,
     "initial_state: got shape [9, 4, 5, 8], need [P, H, K, V] = [any, 4, 8, 5]"),
    ({"state_indices": [0, 1], "initial_state": t(9, 4, 8, 5)}, TypeError,
     "state_indices: got list, need an int32 or int64 tensor of shape [N]"),
    ({"state_indices": t(2), "initial_state": t(9, 4, 8, 5)}, TypeError,
     "state_indices: got torch.float32, need an int32 or int64 tensor"),
    ({"state_indices": ints(0), "initial_state": t(9, 4, 8, 5)}, ValueError,
     "state_indices: got shape [1], need [N] = [2]"),
    ({"state_indices": ints(0, 9), "initial_state": t(9, 4, 8, 5)}, ValueError,
     "state_indices: got 9, need less than 9, the number of states"),
    ({"state_indices": t(2, dtype=torch.int32, device=META), "initial_state": t(9, 4, 8, 5)}, ValueError,
     "state_indices: got device meta, need cpu, where q is"),
    ({"v": t(2, 7, 4, 5).requires_grad_(), "inplace_state": True, "initial_state": t(2, 4, 8, 5)}, ValueError,
     OP
     + "got tensors that require gradients, need torch.no_grad() or inference_mode() with inplace_state, which overwrites states"),
    ({"state_indices": ints(0, 1), "initial_state": t(9, 4, 8, 5).requires_grad_()}, ValueError,
     OP + "got tensors that require gradients, need torch.no_grad() or inference_mode() with state_indices"),
]


@pytest.mark.parametrize(("changes", "error", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        flashlin.fused_recurrent_gated_delta_rule(**{**gated(dtype=torch.float32), **changes})
    assert str(raised.value).startswith(text)


def test_one_name_and_the_other() -> None:
    assert flashlin.fused_recurrent_gdn is flashlin.fused_recurrent_gated_delta_rule


@BOTH
@pytest.mark.parametrize("edges", [None, (0, 3, 3, 7)], ids=["dense", "packed"])
def test_both_layouts_of_states(op: Op, edges: tuple[int, ...] | None) -> None:
    given, bounds = inputs(B=2 if edges is None else 1), None if edges is None else ints(*edges)
    h0 = randn(2 if edges is None else 3, 4, 8, 5)
    o, ht = op(**given, initial_state=h0, output_final_state=True, cu_seqlens=bounds)
    assert_close((o, ht), expected(given, h0, bounds))
    flipped, state = op(**given, initial_state=h0.mT, output_final_state=True, cu_seqlens=bounds,
                        state_v_first=True)
    assert_close((flipped, state.mT), (o, ht))


def test_the_old_name_of_state_v_first() -> None:
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is now called state_v_first"):
        _, old = flashlin.fused_recurrent_gdn(**gated(), output_final_state=True, transpose_state_layout=True)
    assert old.shape == (2, 4, 5, 8)


@BOTH
def test_nothing_to_do(op: Op) -> None:
    for facts in ({"T": 0}, {"B": 0}, {"H": 0, "HV": 0}):
        given = {name: x.requires_grad_() for name, x in inputs(**facts).items()}
        B, T, HV, V = given["v"].shape
        h0 = randn(B, HV, 8, V).requires_grad_()
        o, ht = op(**given, initial_state=h0, output_final_state=True)
        assert o.shape == (B, T, HV, V) and torch.equal(ht, h0)
        grads = torch.autograd.grad(o.sum() + ht.sum(), [*given.values(), h0], allow_unused=True,
                                    materialize_grads=True)
        assert torch.equal(grads[-1], torch.ones_like(h0)) and not any(grad.any() for grad in grads[:-1])
    o, ht = op(**inputs(B=1, T=0), cu_seqlens=ints(0, 0, 0), output_final_state=True)
    assert o.shape == (1, 0, 4, 5) and not ht.any()
    given = {name: x.requires_grad_() for name, x in inputs(B=1, T=0).items()}
    o, ht = op(**given, cu_seqlens=ints(0), output_final_state=True)
    assert o.shape == (1, 0, 4, 5) and ht.shape == (0, 4, 8, 5)
    o.sum().backward()


@BOTH
def test_dtypes_in_and_out(op: Op) -> None:
    given = inputs(dtype=torch.float16)
    given["k"] = given["k"].float()
    o, ht = op(**given, initial_state=randn(2, 4, 8, 5).bfloat16(), output_final_state=True)
    assert o.dtype == torch.float16 and ht.dtype == torch.float32
    wanted = expected(given, randn(2, 4, 8, 5).bfloat16())
    assert judge("o", o, wanted[0], 1e-3).ok and judge("ht", ht, wanted[1], 1e-5).ok
    assert op(**given)[1] is None


def test_chunks_on_the_cpu_are_the_same_function() -> None:
    """Long inputs give the results of the recurrence with and without the gate gk.

    The torch path computes long inputs chunk by chunk. With a gate per channel, such as gk, it does not.
    """
    given = gated(T=recurrent.LONG + 5)
    h0 = randn(2, 4, 8, 5)
    assert_close(flashlin.fused_recurrent_gdn(**given, initial_state=h0, output_final_state=True),
                 expected(given, h0))
    given["gk"] = F.logsigmoid(randn(2, recurrent.LONG + 5, 4, 8))
    assert_close(flashlin.fused_recurrent_gdn(**given, initial_state=h0, output_final_state=True),
                 expected(given, h0))


def test_gradients_by_differences() -> None:
    given = gated(B=1, T=4, H=1, HV=2, K=3, V=2)
    given["beta"] = randn(1, 4, 2, 2)
    tensors = [x.requires_grad_() for x in (*given.values(), randn(2), randn(2), randn(1, 2, 3, 2))]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g: torch.Tensor,
             A_log: torch.Tensor, dt_bias: torch.Tensor, h0: torch.Tensor) -> Any:
        return flashlin.fused_recurrent_gdn(q, k, v, g, beta=beta, initial_state=h0, output_final_state=True,
                                            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                                            A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True)
    assert torch.autograd.gradcheck(call, tensors)


def test_a_strided_state_keeps_its_gradient() -> None:
    given, h0 = inputs(), randn(2, 4, 5, 8).requires_grad_()
    o, _ = flashlin.fused_recurrent_delta_rule(**given, initial_state=h0.mT)
    grad, = torch.autograd.grad(o.sum(), h0)
    assert grad.any()


def test_token_by_token_decoding_is_one_long_call() -> None:
    given, pool = gated(B=2, T=6), randn(3, 4, 8, 5).float()
    kept, where = pool.clone(), ints(2, 0)
    o, _ = flashlin.fused_recurrent_gdn(**{name: x.float() for name, x in given.items()},
                                        initial_state=pool[[2, 0]])
    for i in range(6):
        row, same = flashlin.fused_recurrent_gdn(**{name: x[:, i:i + 1].float() for name, x in given.items()},
                                                 initial_state=pool, state_indices=where,
                                                 output_final_state=True)
        assert same is pool
        torch.testing.assert_close(row, o[:, i:i + 1], rtol=1e-4, atol=1e-5)
    assert torch.equal(pool[1], kept[1]) and not torch.equal(pool[0], kept[0])


@pytest.mark.parametrize("edges", [None, (0, 3, 3, 7)], ids=["dense", "packed"])
def test_a_negative_index_skips_its_sequence_even_if_it_holds_nan(edges: tuple[int, ...] | None) -> None:
    given = gated(B=3 if edges is None else 1, dtype=torch.float32)
    given["v"][0, :3] = float("nan")
    pool = randn(2, 4, 8, 5).float()
    o, _ = flashlin.fused_recurrent_gdn(**given, initial_state=pool, state_indices=ints(-1, 1, 0),
                                        cu_seqlens=None if edges is None else ints(*edges))
    assert (o[0, :3] == 0).all() and torch.isfinite(o).all() and torch.isfinite(pool).all()


def test_a_pool_may_have_no_rows() -> None:
    given = gated(B=2, dtype=torch.float32)
    o, pool = flashlin.fused_recurrent_gdn(**given, initial_state=randn(0, 4, 8, 5).float(),
                                           state_indices=ints(-1, -1), output_final_state=True)
    assert not o.any() and pool is not None and pool.shape == (0, 4, 8, 5)


def test_states_in_place_of_any_dtype() -> None:
    given, h0 = inputs(dtype=torch.float32), randn(2, 4, 8, 5).half()
    # a pool with unused memory between the states
    pool = torch.zeros(2, 200, dtype=torch.float16)[:, :160].unflatten(1, (4, 8, 5))
    pool.copy_(h0)
    wanted, state = flashlin.fused_recurrent_delta_rule(**given, initial_state=h0, output_final_state=True)
    o, none = flashlin.fused_recurrent_delta_rule(**given, initial_state=pool, inplace_state=True)
    assert none is None and torch.equal(o, wanted) and torch.equal(pool, state.half())


def test_flags_have_names() -> None:
    from flashlin.kernels.recurrent.inputs import FLAGS
    given = {name: x for name, x in inputs().items() if name != "beta"}
    with pytest.raises(ValueError, match="flags: got detla, need some of delta, before, reverse"):
        recurrent.run_recurrent("recurrent", Inputs(**given), ("detla",))
    with pytest.raises(ValueError, match="a, b: got one of them or delta with them"):
        recurrent.run_recurrent("recurrent", Inputs(**given, a=randn(2, 7, 4, 8)))
    with pytest.raises(ValueError, match="a, b: got one of them or delta with them"):
        a, b = randn(2, 7, 4, 8), randn(2, 7, 4, 8)
        recurrent.run_recurrent("recurrent", Inputs(**given, a=a, b=b), ("delta",))
    with pytest.raises(ValueError, match="beta: got a tensor, need None without delta"):
        recurrent.run_recurrent("recurrent", Inputs(**inputs()))
    assert set(FLAGS) >= {"delta", "before", "reverse"}


@pytest.mark.parametrize("T", [3, recurrent.LONG + 1])
def test_torch_compile_makes_one_graph(T: int) -> None:
    """Each length compiles to one graph with the results of the eager call."""
    tensors = [x.float().requires_grad_() for x in (*gated(T=T).values(), randn(2, 4, 8, 5))]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, g: torch.Tensor,
             h0: torch.Tensor) -> Any:
        return flashlin.fused_recurrent_gdn(q, k, v, g, beta=beta, initial_state=h0, output_final_state=True,
                                            use_qk_l2norm_in_kernel=True)
    found = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        outputs = function(*tensors)
        found.append([*outputs, *torch.autograd.grad(sum(x.sin().sum() for x in outputs), tensors)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
