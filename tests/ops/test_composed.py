"""Functions of ``flashlin.mamba`` that are composed of several ops.

These are mamba_inner_fn, the norms of x plus a residual, and the convolution states of packed sequences. The
tests compare them with float64 formulas, pass arguments by name, and check the texts of errors.
"""
from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flashlin import mamba
from flashlin.kernels.mamba.reference import selective, silu
from flashlin.modules.add_norm import RMSNorm
from flashlin.testing.compare import Case, check

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Allowed errors of 16-bit dtypes; float32 must stay below 1e-4. The largest errors are in gradients that are
# small sums of large terms.
ALLOWED = {"*": 0.02, "d*": 0.06}


def right(case: Case, dtype: torch.dtype, seed: int = 0) -> None:
    wrong = [verdict for verdict in check(case, CPU, dtype, seed) if not verdict.ok]
    assert not wrong, "\n".join(map(str, wrong))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


# --- mamba_inner_fn ---

PROJECTED = ("B_proj_bias", "C_proj_bias")
NORMS = ("b_rms_weight", "c_rms_weight", "dt_rms_weight")
INNER: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"optional": ("conv1d_bias", "out_proj_bias", "D", "delta_bias", *PROJECTED, *NORMS)},
    "norms": {"optional": ("D", "delta_bias", *NORMS), "b": 1},
    "B for all tokens": {"optional": ("D", "b_rms_weight"), "B": "fixed"},
    "B and C given": {"optional": ("delta_bias", "b_rms_weight", "c_rms_weight"), "B": "tokens",
                      "C": "groups"},
    "no softplus": {"optional": ("conv1d_bias", "delta_bias"), "softplus": False},
}


def inner_case(name: str, T: int = 33, W: int = 4) -> Case:
    facts = {"optional": (), "b": 2, "B": None, "C": None, "softplus": True, **INNER[name]}
    b, D, N, R, out = facts["b"], 6, 4, 3, 5
    shapes: dict[str, tuple[int, ...]] = {
        "conv1d_bias": (D,), "out_proj_bias": (out,), "D": (D,), "delta_bias": (D,), "B_proj_bias": (N,),
        "C_proj_bias": (N,), "b_rms_weight": (N,), "c_rms_weight": (N,), "dt_rms_weight": (D,)}
    given = {"fixed": (D, N), "tokens": (b, N, T), "groups": (b, 1, N, T)}

    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
        def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        inputs = {"xz": drawn(b, 2 * D, T), "conv1d_weight": drawn(D, 1, W, scale=0.5),
                  "x_proj_weight": drawn(R + 2 * N, D, scale=0.5),
                  "delta_proj_weight": drawn(D, R, scale=0.5),
                  "out_proj_weight": drawn(out, D, scale=0.5),
                  "A": -drawn(D, N, dtype=wide).abs() - 0.1}
        inputs |= {option: drawn(*shapes[option], dtype=wide) for option in facts["optional"]}
        if not facts["softplus"]:
            inputs["delta_bias"] = inputs["delta_bias"].abs() + 6  # because dt must not be negative
        return inputs | {which: drawn(*given[facts[which]]) for which in "BC" if facts[which]}

    def call(**inputs: Tensor) -> dict[str, Tensor]:
        options: dict[str, Any] = {"conv1d_bias": None, "out_proj_bias": None, **inputs}
        if not facts["softplus"]:
            options["delta_softplus"] = False
        return {"out": mamba.mamba_inner_fn(**options)}

    def reference(**inputs: Tensor) -> dict[str, Tensor]:
        return {"out": inner(**inputs, softplus=facts["softplus"])}
    return Case("mamba_inner_fn", name, make, call, reference, ALLOWED)


def inner(xz: Tensor, conv1d_weight: Tensor, x_proj_weight: Tensor, delta_proj_weight: Tensor,
          out_proj_weight: Tensor, A: Tensor, softplus: bool, eps: float = 1e-6, **more: Tensor) -> Tensor:
    """Compute a Mamba layer after its input projection with the formulas of the paper."""
    D, N, R, W = A.shape[0], A.shape[1], delta_proj_weight.shape[1], conv1d_weight.shape[2]
    x, z, T = xz[:, :D], xz[:, D:], xz.shape[2]
    u = torch.zeros_like(x)
    for back in range(W):  # the last column of the filter belongs to the current token
        seen = torch.cat([x.new_zeros(*x.shape[:2], back), x[..., :T - back]], 2)[..., :T]
        u = u + conv1d_weight[None, :, 0, W - 1 - back, None] * seen
    u = silu(u + more["conv1d_bias"][:, None] if "conv1d_bias" in more else u)
    columns = torch.einsum("bdt,rd->btr", u, x_proj_weight)
    dt = torch.einsum("btr,dr->btd", columns[..., :R], delta_proj_weight)
    if "dt_rms_weight" in more:
        dt = rms(dt, more["dt_rms_weight"], eps)

    def states(which: str, found: Tensor) -> Tensor:
        """Return B or C, as ``which`` says, after its norm if it has one.

        A B or C that the caller passed keeps its shape. Otherwise the result is made of ``found`` [b, T, N]
        and has shape [b, N, T].
        """
        weight = more.get(f"{which.lower()}_rms_weight")
        if which in more:
            m = more[which]
            if weight is None or m.ndim == 2:
                return m if weight is None else rms(m, weight, eps)
            return rms(m.transpose(-1, -2), weight, eps).transpose(-1, -2)
        if f"{which}_proj_bias" in more:
            found = found + more[f"{which}_proj_bias"]
        return (found if weight is None else rms(found, weight, eps)).transpose(1, 2)
    y, _ = selective(u, dt.transpose(1, 2), A, states("B", columns[..., R:R + N]),
                     states("C", columns[..., R + N:]), more.get("D"), z, more.get("delta_bias"), softplus)
    out = torch.einsum("bdt,od->bto", y, out_proj_weight)
    return out + more["out_proj_bias"] if "out_proj_bias" in more else out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INNER)
def test_mamba_inner_fn_and_its_gradients(name: str, dtype: torch.dtype) -> None:
    right(inner_case(name), dtype)


@pytest.mark.parametrize(("T", "W"), [(1, 4), (2, 4), (70, 2)])
def test_lengths_of_mamba_inner_fn(T: int, W: int) -> None:
    right(inner_case("everything", T, W), torch.float32, seed=T)


def inner_inputs(name: str = "plain", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    made = inner_case(name).make(dtype, torch.Generator().manual_seed(0))
    return {"conv1d_bias": None, "out_proj_bias": None, **made}


def test_models_call_it_with_positions() -> None:
    """The first arguments may be positional, as in the layers of mamba_ssm and transformers.

    Biases may have a wider dtype than the weights.
    """
    made = inner_inputs("everything", torch.bfloat16)
    order = ("xz", "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight", "out_proj_weight",
             "out_proj_bias", "A")
    by_position = mamba.mamba_inner_fn(
        *[made[name] for name in order], None, None, made["D"], delta_bias=made["delta_bias"],
        delta_softplus=True, b_rms_weight=made["b_rms_weight"], c_rms_weight=made["c_rms_weight"],
        dt_rms_weight=made["dt_rms_weight"], b_c_dt_rms_eps=1e-5)
    for name in PROJECTED:
        del made[name]
    assert torch.equal(by_position, mamba.mamba_inner_fn(**made, b_c_dt_rms_eps=1e-5))
    assert by_position.dtype == torch.bfloat16


def test_under_autocast_the_weights_may_be_wider() -> None:
    made = inner_inputs("everything")
    with torch.autocast("cpu", torch.bfloat16):
        out = mamba.mamba_inner_fn(**{**made, "xz": made["xz"].bfloat16()})
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), mamba.mamba_inner_fn(**made), rtol=0.05, atol=0.1)
    with pytest.raises(TypeError, match=r"x_proj_weight: got dtype torch.float32, need torch.bfloat16"):
        mamba.mamba_inner_fn(**{**made, "xz": made["xz"].bfloat16()})


def test_what_is_kept_changes_nothing() -> None:
    made = inner_inputs()
    first, second = (mamba.mamba_inner_fn(**made, checkpoint_lvl=level) for level in (0, 1))
    assert torch.equal(first, second)


Zeros = Callable[..., Tensor]
zeros: Zeros = torch.zeros
WRONG_INNER: list[tuple[dict[str, Any], str]] = [
    ({"xz": zeros(2, 12)}, "xz: got shape [2, 12], need [b, 2 D, T]"),
    ({"xz": zeros(2, 11, 3)}, "xz: got shape [2, 11, 3], need [b, 2 D, T] with D of at least 1"),
    ({"A": zeros(5, 4)}, "A: got shape [5, 4], need [D, N] = [6, any]"),
    ({"conv1d_weight": zeros(6, 4)}, "conv1d_weight: got shape [6, 4], need [D, 1, W] = [6, 1, any]"),
    ({"x_proj_weight": zeros(10, 6)}, "x_proj_weight: got 10 rows, need 11: R = 3 of delta_proj_weight, and "
                                      "N = 4 of A for B and for C where they are None"),
    ({"delta_proj_weight": zeros(5, 3)}, "delta_proj_weight: got shape [5, 3], need [D, R] = [6, any]"),
    ({"out_proj_weight": zeros(5, 5)}, "out_proj_weight: got shape [5, 5], need [out, D] = [any, 6]"),
    ({"out_proj_bias": zeros(4)}, "out_proj_bias: got shape [4], need [out] = [5]"),
    ({"b_rms_weight": zeros(3)}, "b_rms_weight: got shape [3], need [N] = [4]"),
    ({"dt_rms_weight": zeros(3)}, "dt_rms_weight: got shape [3], need [D] = [6]"),
    ({"B": zeros(2, 4, 5)}, "B: got shape [2, 4, 5], need [D, N], [b, N, T] or [b, G, N, T] = [2, 4, 33]"),
    ({"B": zeros(()), "b_rms_weight": zeros(4)}, "B: got shape [], need [D, N], [b, N, T] or [b, G, N, T]"),
    ({"C": zeros(4), "c_rms_weight": zeros(4)}, "C: got shape [4], need [D, N], [b, N, T] or [b, G, N, T]"),
    ({"B": zeros(2, 3, 33), "b_rms_weight": zeros(4)}, "B: got shape [2, 3, 33], need"),
    ({"B": zeros(2, 2, 4, 33)}, "C: got 1 groups, need 2, as B"),
    ({"B": zeros(2, 4, 4, 33)}, "B: got 4 groups, need a divisor of the 6 channels of xz"),
    ({"checkpoint_lvl": 2}, "checkpoint_lvl: got 2, need one of 0, 1"),
    ({"b_c_dt_rms_eps": "1e-6"}, "b_c_dt_rms_eps: got '1e-6', need a number of at least 0"),
    ({"A": zeros(6, 4, dtype=torch.complex64)}, "A: got dtype torch.complex64")]


@pytest.mark.parametrize(("change", "text"), WRONG_INNER, ids=[text for _, text in WRONG_INNER])
def test_wrong_arguments_of_mamba_inner_fn_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        mamba.mamba_inner_fn(**{**inner_inputs(), **change})
    assert str(raised.value).startswith(text)


# --- layer_norm_fn and rms_norm_fn ---

SUMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "weight": ((), {}), "bias": (("bias",), {"eps": 1e-3}), "residual": (("bias", "residual"), {}),
    "sum of a residual": (("residual",), {"prenorm": True}),
    "wide sum": ((), {"prenorm": True, "residual_in_fp32": True}),
    "two inputs": (("x1", "residual"), {"prenorm": True}), "rows scaled": (("rowscale",), {"prenorm": True}),
    "two norms": (("bias", "weight1", "bias1", "residual"), {"prenorm": True}),
    "two norms alone": (("weight1",), {}),
    "everything": (("bias", "x1", "weight1", "bias1", "residual"), {"prenorm": True,
                                                                   "residual_in_fp32": True})}


def sum_case(function: str, name: str, rows: tuple[int, ...] = (3, 5), D: int = 24) -> Case:
    options, how = SUMS[name]
    shapes = {"x": (*rows, D), "residual": (*rows, D), "x1": (*rows, D), "rowscale": rows}
    outputs = ["y"] + ["y1"] * ("weight1" in options) + ["sum"] * ("prenorm" in how)

    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
        return {option: torch.randn(shapes.get(option, (D,)), generator=generator, dtype=torch.float64).to(
            torch.promote_types(dtype, torch.float32) if option == "residual" else dtype)
            for option in ("x", "weight", *options)}

    def call(**inputs: Tensor) -> dict[str, Tensor]:
        found = getattr(mamba, function)(**{"bias": None, **inputs}, **how)
        assert isinstance(found, Tensor) == (len(outputs) == 1)
        return dict(zip(outputs, [found] if isinstance(found, Tensor) else found, strict=True))

    def reference(**inputs: Tensor) -> dict[str, Tensor]:
        total = inputs["x"] * (inputs["rowscale"][..., None] if "rowscale" in inputs else 1)
        total = total + inputs.get("x1", 0) + inputs.get("residual", 0)
        centred = total - total.mean(-1, keepdim=True) if function == "layer_norm_fn" else total
        normed = rms(centred, torch.ones(D, dtype=torch.float64), how.get("eps", 1e-6))
        y = normed * inputs["weight"] + inputs.get("bias", 0)
        y1 = normed * inputs.get("weight1", 1) + inputs.get("bias1", 0)
        return {key: value for key, value in (("y", y), ("y1", y1), ("sum", total)) if key in outputs}
    return Case(function, name, make, call, reference, ALLOWED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("function", ["layer_norm_fn", "rms_norm_fn"])
def test_norms_of_sums_and_their_gradients(function: str, name: str, dtype: torch.dtype) -> None:
    right(sum_case(function, name), dtype)


@pytest.mark.parametrize(("rows", "D"), [((), 7), ((1,), 1), ((0,), 8), ((2, 3, 4), 33)], ids=str)
def test_shapes_of_sums(rows: tuple[int, ...], D: int) -> None:
    right(sum_case("rms_norm_fn", "everything", rows, D), torch.float32)


def test_dtypes_of_sums() -> None:
    x = torch.randn(3, 8).bfloat16()

    def of_sum(**given: Any) -> torch.dtype:
        y, total = mamba.layer_norm_fn(x, torch.ones(8), None, prenorm=True, **given)
        assert y.dtype == torch.bfloat16
        return total.dtype
    assert of_sum() == of_sum(x1=x) == torch.bfloat16
    assert of_sum(residual_in_fp32=True) == of_sum(x1=x, residual_in_fp32=True) == torch.float32
    # a residual determines the dtype of the sum, as in mamba_ssm
    half = x.half()
    assert of_sum(residual=half, residual_in_fp32=True) == of_sum(residual=half, x1=x) == torch.float16


def test_layer_norm_fn_may_be_the_other() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(mamba.layer_norm_fn(x, weight, None, is_rms_norm=True),
                       mamba.rms_norm_fn(x, weight, None))


def test_dropout_leaves_out_what_the_masks_say() -> None:
    x, x1, residual = (torch.randn(40, 50, dtype=torch.float64, requires_grad=True) for _ in range(3))
    y, total, kept, kept1 = mamba.rms_norm_fn(x, None, None, residual, x1, dropout_p=0.25, prenorm=True,
                                              return_dropout_mask=True)
    assert kept.dtype == kept1.dtype == torch.bool and not torch.equal(kept, kept1)
    assert 0.7 < kept.double().mean() < 0.8 and 0.7 < kept1.double().mean() < 0.8
    wanted = kept * x / 0.75 + kept1 * x1 / 0.75 + residual
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(y, rms(wanted, torch.ones(50, dtype=torch.float64), 1e-6))
    for got, right_one in zip(*(torch.autograd.grad(out.sum(), (x, x1, residual))
                                for out in (total, wanted)), strict=True):
        torch.testing.assert_close(got, right_one)
    torch.manual_seed(0)
    first = mamba.layer_norm_fn(x, None, None, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, mamba.layer_norm_fn(x, None, None, dropout_p=0.5))
    assert mamba.layer_norm_fn(x, None, None, return_dropout_mask=True)[1:] == (None, None)


def test_the_module_is_the_function() -> None:
    norm, x, residual = RMSNorm(8, eps=0.1, dropout_p=0.5), torch.randn(3, 8), torch.randn(3, 8)
    assert list(norm.state_dict()) == ["weight"] and norm.bias is None
    assert not torch.equal(norm(x), norm(x))
    wanted = mamba.rms_norm_fn(x, norm.weight, None, residual, eps=0.1, prenorm=True)
    for got, right_one in zip(norm.eval()(x, residual, prenorm=True), wanted, strict=True):
        assert torch.equal(got, right_one)


WRONG_SUM: list[tuple[dict[str, Any], str]] = [
    ({"x": zeros(3, 0)}, "x: got shape [3, 0], need [..., D] with D of at least 1"),
    ({"x1": zeros(2, 8)}, "x1: got shape [2, 8], need x's shape = [3, 8]"),
    ({"weight1": zeros(7)}, "weight1: got shape [7], need [D] = [8]"),
    ({"bias1": zeros(8)}, "bias1: got a tensor without weight1, need both"),
    ({"rowscale": zeros(3, 1)}, "rowscale: got shape [3, 1], need x's shape but for D = [3]"),
    ({"rowscale": zeros(3), "x1": zeros(3, 8)}, "rowscale: got a tensor together with x1, need one of them"),
    ({"dropout_p": 1.0}, "dropout_p: got 1.0, need a number from 0 to below 1"),
    ({"dropout_p": "a"}, "dropout_p: got"), ({"eps": -1.0}, "eps: got -1.0, need a number of at least 0"),
    ({"return_dropout_mask": "no"}, "return_dropout_mask: got 'no', need True or False")]


@pytest.mark.parametrize(("change", "text"), WRONG_SUM, ids=[text for _, text in WRONG_SUM])
def test_wrong_arguments_of_norms_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        mamba.layer_norm_fn(**{"x": zeros(3, 8), "weight": zeros(8), "bias": None, **change})
    assert str(raised.value).startswith(text)


# --- causal_conv1d_varlen_states ---

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("edges", [[0, 1, 1, 4, 11], [0, 11], [0, 0, 11]], ids=str)
@pytest.mark.parametrize("L", [1, 3, 12])
def test_states_after_packed_sequences(edges: list[int], L: int, dtype: torch.dtype) -> None:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
        return {"x": torch.randn(11, 5, generator=generator).to(dtype)}

    def reference(x: Tensor) -> dict[str, Tensor]:
        states = []
        for first, end in pairwise(edges):
            tokens = x[max(first, end - L):end]
            states.append(torch.cat([x.new_zeros(L - len(tokens), 5), tokens]).T)
        return {"states": torch.stack(states)}

    def call(x: Tensor) -> dict[str, Tensor]:
        states = mamba.causal_conv1d_varlen_states(x, torch.tensor(edges, dtype=torch.int32), L)
        assert states.dtype == dtype
        return {"states": states}
    right(Case("causal_conv1d_varlen_states", str(edges), make, call, reference, {"*": 1e-6, "d*": 1e-2}),
          dtype)


def test_decoding_goes_on_from_them() -> None:
    x, weight, edges = torch.randn(9, 4), torch.randn(4, 3), torch.tensor([0, 2, 8])
    states = mamba.causal_conv1d_varlen_states(x[:8], edges, 2)
    y = mamba.causal_conv1d_update(x[8].expand(2, 4), states, weight)
    longer = mamba.causal_conv1d_fn(x[2:].T[None], weight)
    torch.testing.assert_close(y[1], longer[0, :, -1])


@pytest.mark.parametrize(("change", "text"), [
    ({"x": zeros(2, 3, 4)}, "x: got shape [2, 3, 4], need [T, D] with D of at least 1"),
    ({"state_len": 0}, "state_len: got 0, need an integer of at least 1"),
    ({"state_len": 2**31}, "state_len: got 2147483648, need an integer of at least 1, below 2**31"),
    ({"state_len": 10**30}, "state_len: got an integer of 100 bits, need an integer of at least 1, below"),
    ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens: got"),
    ({"cu_seqlens": None}, "cu_seqlens: got NoneType, need an int32"),
    ({"cu_seqlens": torch.tensor([0.0, 3.0])}, "cu_seqlens: got torch.float32, need an int32")], ids=str)
def test_wrong_arguments_of_states_are_named(change: dict[str, Any], text: str) -> None:
    given = {"x": zeros(3, 4), "cu_seqlens": torch.tensor([0, 3]), "state_len": 2, **change}
    with pytest.raises((TypeError, ValueError)) as raised:
        mamba.causal_conv1d_varlen_states(**given)
    assert str(raised.value).startswith(text)
