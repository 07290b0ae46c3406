"""Calls with wrong arguments return a result or raise an error that names the argument.

They never raise an error from inside the implementation.
"""
from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, randn
from torch.utils._pytree import tree_leaves, tree_map

import flashlin
from flashlin import modules
from flashlin.ops._common import arguments as checks
from tests.hostile import COMPOSED, OPS, UNREAD, UNREAD_BY, arguments, doubtful, function, impossible

SENTENCE = re.compile(r"^(\w+: )?[\w, \[\]]+: .*\bgot .+ need |^\w+: got .+ without .+, which alone reads "
                      r"it$|^mask: ", re.DOTALL)


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with cloned tensors, because some calls write to their arguments."""
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}


def answer(call: Callable[..., Any], given: dict[str, Any]) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(**copied(given))
        except Exception as error:
            return error
    return None


def unexplained(call: Callable[..., Any], given: dict[str, Any], unread: set[str]) -> list[str]:
    """Return the wrong arguments that raise no readable error, or that the call accepts.

    Each argument is replaced by impossible values, which must raise, and by doubtful values, which a call may
    accept.
    unread: names of arguments that the call does not read, so that impossible values need not raise.
    """
    found = []
    for name, x in given.items():
        for kinds, must_fail in ((impossible(x), name not in unread), (doubtful(x), False)):
            for kind, wrong in kinds.items():
                error = answer(call, {**given, name: wrong})
                fine = not must_fail if error is None else (
                    isinstance(error, (ValueError, TypeError)) and SENTENCE.match(str(error))
                    and (not must_fail or name in str(error).split("need")[0]))
                if not fine:
                    found.append(f"{name} = {kind}: "
                                 f"{'accepted' if error is None else f'{type(error).__name__}: {error}'[:150]}")
    return found


@pytest.mark.parametrize("op", [*OPS, *COMPOSED])
@pytest.mark.alternate
def test_every_wrong_argument_is_named(op: str) -> None:
    torch.manual_seed(0)
    call, given = function(op), arguments(op)
    error = answer(call, given)
    assert error is None, error
    assert unexplained(call, given,
                       {name for name in given if name in UNREAD or (op, name) in UNREAD_BY}) == []


CHUNKED = [op for op in OPS if "chunk_size" in inspect.signature(function(op)).parameters]


def chunk_sizes_of(op: str) -> set[Any]:
    """Return the values of chunk_size that are documented for the op.

    They are in its docstring or in the docstring that it refers to.
    """
    text = " ".join((inspect.getdoc(function(op)) or "").split())
    said = re.split(r"[.;]", text.partition("chunk_size: ")[2])[0]
    if not said or said.startswith("as in"):
        return chunk_sizes_of(next(one for one in re.findall(r"``(\w+)``", said or text) if one in CHUNKED))
    if "a power of two of at least 16" in said:
        return {16, 32, 64, 128, 4096}
    if "at least 1," in said:
        return {1, 3, 16, 24, 32, 64, 128, 4096}
    return {*map(int, re.findall(r"\d+", said)), *([None] if said.startswith("None") else [])}


@pytest.mark.parametrize("op", CHUNKED)
def test_the_chunk_sizes_that_a_docstring_names_are_those_that_are_taken(op: str) -> None:
    sizes: list[Any] = [None, 0, 1, 3, 16, 24, 32, 64, 128, 4096]
    given = arguments(op)
    taken = {size for size in sizes if answer(function(op), {**given, "chunk_size": size}) is None}
    assert taken == chunk_sizes_of(op)


@pytest.mark.parametrize("op", [op for op in [*OPS, *COMPOSED] if "cu_seqlens" in arguments(op)])
def test_sequences_that_do_not_cover_all_rows_are_named_where_their_bounds_are_read(op: str) -> None:
    given = arguments(op)
    given.pop("cu_seqlens_cpu", None)
    for edges, text in (([0, 4, 5], "got a last value of 5, need T = 6"),
                        ([1, 4, 6], "got a first value of 1, need 0")):
        error = answer(function(op), {**given, "cu_seqlens": torch.tensor(edges)})
        assert (error is None) is ((op, "cu_seqlens") in UNREAD_BY)
        assert error is None or f"cu_seqlens: {text}" in str(error)


# Exceptions: arguments of a linear layer, which needs one dtype, and arguments that determine the dtype of a
# result, which is therefore rounded to float32.
OWN_DTYPE = {("mamba_split_conv1d_scan_combined", name)
             for name in ("zxbcdt", "outproj_weight", "outproj_bias")}
OWN_DTYPE |= {("l2norm", "x"), ("l2_norm", "x"), ("chunk_gdn2", "v")}


@pytest.mark.parametrize("op", OPS)
def test_a_float32_tensor_beside_float64_ones_is_promoted_first(op: str) -> None:
    """A float32 tensor among float64 tensors is converted to float64 first.

    Its norms and gates are therefore computed in float64.
    """
    def doubled(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    def called(**given: Any) -> list[Any]:
        return tree_leaves(function(op)(**copied(given)))
    torch.manual_seed(0)
    given = arguments(op)
    doubles = {name: tree_map(doubled, x) for name, x in given.items()}
    doubles |= {name: dtype for name, dtype in (("output_dtype", torch.float64), ("out_dtype", None))
                if name in given}
    wanted, different = called(**doubles), {}
    for name, x in given.items():
        if name.endswith("dtype") or doubles[name] is x or (op, name) in OWN_DTYPE:
            continue
        for got, want in zip(called(**{**doubles, name: x}), wanted, strict=True):
            if isinstance(got, Tensor) and got.dtype == torch.float64:
                error = float((got - want).norm() / want.norm())
                different |= {name: error} if error > 1e-12 else {}
    assert different == {}


@pytest.mark.parametrize(("make", "given"), [
    (lambda: flashlin.ShortConvolution(8, 4),
     {"x": randn(1, 6, 8), "residual": randn(1, 6, 8), "mask": torch.ones(1, 6), "cache": randn(1, 8, 4),
      "output_final_state": True}),
    (lambda: flashlin.RotaryEmbedding(8),
     {"q": randn(1, 6, 2, 8), "k": randn(1, 6, 2, 8), "seqlen_offset": 0, "max_seqlen": 9}),
    (lambda: flashlin.FusedCrossEntropyLoss(),
     {"input": randn(6, 9), "target": torch.zeros(6, dtype=torch.int64)}),
    (lambda: flashlin.FusedLinearCrossEntropyLoss(),
     {"x": randn(6, 8), "target": torch.zeros(6, dtype=torch.int64), "weight": randn(9, 8),
      "bias": randn(9)}),
    (lambda: flashlin.FusedRMSNormGated(8),
     {"x": randn(6, 8), "g": randn(6, 8), "residual": randn(6, 8), "prenorm": True,
      "residual_in_fp32": True}),
    (lambda: flashlin.RMSNormGated(8), {"x": randn(6, 8), "z": randn(6, 8)}),
])
@pytest.mark.parametrize("grad", [True, False])
def test_modules_say_it_too(make: Callable[[], torch.nn.Module], given: dict[str, Any], grad: bool) -> None:
    # A module passes these arguments to its op under another name, which the error may contain.
    called = {"input": "logits", "cache": "initial_state"}
    with torch.set_grad_enabled(grad):
        found = [text for text in unexplained(make(), given, set())
                 if not (text.split()[0] in called and f": {called[text.split()[0]]}: got" in text)]
    assert found == []


SCALED = [op for op in OPS if "scale" in inspect.signature(getattr(flashlin, op)).parameters]


@pytest.mark.parametrize(("scale", "error", "text"), [
    ("abc", TypeError, "scale: got 'abc', need a finite number"),
    (True, TypeError, "scale: got True, need a finite number"),
    (torch.ones(1), TypeError, "scale: got Tensor, need a finite number"),
    (np.ones(1), TypeError, "scale: got ndarray, need a finite number"),
    (math.nan, ValueError, "scale: got nan, need a finite number"),
    (-math.inf, ValueError, "scale: got -inf, need a finite number"),
])
@pytest.mark.alternate
def test_scale_is_a_finite_number(scale: Any, error: type[Exception], text: str) -> None:
    assert SCALED
    for op in SCALED:
        found = answer(getattr(flashlin, op), {**arguments(op), "scale": scale})
        assert type(found) is error and str(found) == text, op


@pytest.mark.parametrize("op", ["chunk_gla", "fused_recurrent_gla"])
def test_numbers_of_numpy_and_flags_of_none_will_do(op: str) -> None:
    q = randn(1, 3, 1, 8)
    expected, _ = getattr(flashlin, op)(q, q, q, -q.abs(), scale=2.0)
    for number in (np.float32(2), np.float64(2), np.int64(2), 2):
        o, state = getattr(flashlin, op)(q, q, q, -q.abs(), scale=number, output_final_state=None,
                                         state_v_first=np.bool_(False))
        assert state is None and torch.equal(o, expected)
    for number in (np.float32(0.5), 1):
        torch.testing.assert_close(flashlin.rms_norm(q, None, None, eps=number),
                                   flashlin.rms_norm(q, None, None, eps=float(number)))


def test_a_convolution_without_a_wish_for_states_has_none() -> None:
    x, weight = randn(1, 6, 8), randn(8, 4)
    assert flashlin.causal_conv1d(x, weight, output_final_state=None)[1] is None


X, LINES, LINE = randn(4, 8), randn(5, 8), randn(8)
TARGET = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: flashlin.rms_norm(X, LINE, None, eps=None), TypeError,
     "eps: got None, need a number of at least 0"),
    (lambda: flashlin.l2norm(X, eps="small"), TypeError, "eps: got 'small', need a number of at least 0"),
    (lambda: flashlin.layer_norm(X, LINE, None, eps=math.nan), ValueError,
     "eps: got nan, need a number of at least 0"),
    (lambda: flashlin.rmsnorm_fn(None, LINE, None), TypeError,
     "x: got NoneType, need a tensor of shape [..., D]"),
    (lambda: flashlin.layernorm_fn(None, LINE, None), TypeError,
     "x: got NoneType, need a tensor of shape [..., D]"),
    (lambda: flashlin.rms_norm(X.to_sparse(), LINE, None), TypeError,
     "x: got a sparse_coo tensor, need a dense tensor of shape [..., D]"),
    (lambda: flashlin.rms_norm(X, LINE.to_sparse(), None), TypeError,
     "weight: got a sparse_coo tensor, need a dense tensor of shape [D]"),
    (lambda: flashlin.fused_linear_cross_entropy_loss(torch.tensor(1.0), TARGET, LINES), ValueError,
     "x: got shape [], need [N, D] with D of at least 1"),
    (lambda: flashlin.fused_linear_cross_entropy_loss(X, TARGET, torch.tensor(1.0)), ValueError,
     "weight: got shape [], need [V, D] with V of at least 1 and D = 8"),
    (lambda: flashlin.fused_linear_cross_entropy_loss(X, TARGET, LINES, torch.tensor(1.0)), ValueError,
     "bias: got shape [], need [V] = [5]"),
    (lambda: flashlin.fused_linear_cross_entropy_loss(X.to("meta"), TARGET, LINES), ValueError,
     "weight: got device cpu, need meta, where x is"),
    (lambda: flashlin.mamba_split_conv1d_scan_combined(**{**arguments("mamba_split_conv1d_scan_combined"),
                                                          "outproj_bias": randn(5).bfloat16()}),
     TypeError, "outproj_bias: got dtype torch.bfloat16, need torch.float32, as zxbcdt (or autocast)"),
    (lambda: flashlin.chunk_gla(*[randn(1, 6, 2, 8).to("meta")] * 4,
                                cu_seqlens=torch.tensor([0, 6]).to("meta")), ValueError,
     "cu_seqlens: got a tensor on meta, need one with values: the lengths of the sequences decide what is "
     "computed"),
])
def test_what_used_to_be_raw_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize("op", OPS)
def test_meta_tensors_have_shapes(op: str) -> None:
    given = {name: x
             for name, x in arguments(op).items() if not name.startswith("cu_seqlens")
             and name != "return_varlen_states"}
    batch = next(x.shape[0] for x in given.values() if isinstance(x, Tensor))
    # without packing there are as many sequences as rows in the batch
    for name in ("initial_state", "cache"):
        if batch == 1 and isinstance(given.get(name), Tensor):
            given[name] = given[name][:1]
    given = {name: [part[:1] for part in x] if isinstance(x, tuple) and isinstance(x[0], Tensor) else x
             for name, x in given.items()}
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    if op == "rotary_embedding":
        given["seqlen_offsets"] = given["seqlen_offsets"][:1]

    def on(device: str) -> Any:
        def moved(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else tuple(map(moved, x)) if isinstance(x,
                                                                                                 tuple) else x
        return getattr(flashlin, op)(**{name: moved(x) for name, x in copied(given).items()})
    found, expected = (y if isinstance(y, tuple) else (y,) for y in (on("meta"), on("cpu")))
    for y, z in zip(found, expected, strict=True):
        for part, like in zip(y, z, strict=True) if isinstance(z, tuple) else [(y, z)]:
            assert (part is None and like is None) or (part.shape == like.shape and part.dtype == like.dtype
                                                       and part.device.type == "meta")


AFFINE = "hidden_size elementwise_affine bias eps device dtype"
GATED = "hidden_size elementwise_affine eps device dtype"
LOSS = ("ignore_index label_smoothing logit_scale logit_softcapping num_chunks reduction use_l2warp "
        "l2_penalty_factor accumulate_grad_in_fp32 "
        "process_group")
ORDERS = {  # order of the positional arguments in fla 0.6.0, for the class and for a call
    "LayerNorm": (AFFINE, "x residual prenorm residual_in_fp32"),
    "RMSNorm": (AFFINE, "x residual prenorm residual_in_fp32"),
    "GroupNorm": ("num_groups hidden_size elementwise_affine bias eps is_rms_norm device dtype",
                  "x residual prenorm residual_in_fp32"),
    "LayerNormLinear": (AFFINE, "x weight bias residual prenorm residual_in_fp32"),
    "RMSNormLinear": (AFFINE, "x weight bias residual prenorm residual_in_fp32"),
    "GroupNormLinear": ("num_groups hidden_size elementwise_affine bias eps is_rms_norm device dtype",
                        "x weight bias residual prenorm residual_in_fp32"),
    "FusedLayerNormGated": ("hidden_size elementwise_affine bias activation eps device dtype",
                            "x g residual prenorm residual_in_fp32"),
    "FusedRMSNormGated": ("hidden_size elementwise_affine eps activation device dtype",
                          "x g residual prenorm residual_in_fp32"),
    "FusedLayerNormSwishGate": (AFFINE, "x g residual prenorm residual_in_fp32"),
    "FusedRMSNormSwishGate": (GATED, "x g residual prenorm residual_in_fp32"),
    **dict.fromkeys(("FusedLayerNormGatedLinear", "FusedRMSNormGatedLinear", "FusedLayerNormSwishGateLinear",
                     "FusedRMSNormSwishGateLinear"),
                    (GATED, "x g weight bias residual prenorm residual_in_fp32")),
    "RMSNormGated": ("hidden_size eps group_size norm_before_gate device dtype", "x z"),
    "L2Norm": ("eps output_dtype", "x"),
    "RotaryEmbedding": ("dim base scale_base interleaved pos_idx_in_fp32 device",
                        "q k seqlen_offset cu_seqlens max_seqlen chunk_indices"),
    "ShortConvolution": ("hidden_size kernel_size bias activation backend device dtype",
                         "x residual mask cache output_final_state cu_seqlens chunk_indices"),
    "FusedCrossEntropyLoss": ("ignore_index reduction label_smoothing logit_scale lse_square_scale "
                              "logit_softcapping inplace_backward process_group "
                              "return_z_loss", "input target"),
    "FusedLinearCrossEntropyLoss": (LOSS, "x target weight bias")}


def test_modules_take_their_arguments_in_flas_order() -> None:
    assert sorted(ORDERS) == modules.__all__

    def order(function: Callable[..., Any]) -> str:
        found = inspect.signature(function).parameters.values()
        return " ".join(parameter.name for parameter in found if parameter.kind is not parameter.VAR_KEYWORD)
    for name, (made, called) in ORDERS.items():
        module = getattr(modules, name)
        assert (order(module), order(module.forward)) == (made, "self " + called), name
    assert flashlin.FusedLayerNormGated(8, True, False, "sigmoid", 1e-3).activation == "sigmoid"


@pytest.mark.parametrize("op", ["chunk_simple_gla", "fused_recurrent_gla"])
def test_fewer_tokens_than_heads_are_told_once(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_suspected", set())

    def call(T: int, H: int) -> None:
        q = torch.zeros(1, T, H, 8)
        getattr(flashlin, op)(q, q, q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for T, H in ((0, 4), (1, 4), (4, 4), (5, 4)):  # no tokens, decoding, T = H, T > H
            call(T, H)
    with pytest.warns(UserWarning,
                      match=f"{op}: got 3 tokens of 4 heads, from tensors that are .* if yours are .* pass "
                            "x.transpose") as told:
        call(3, 4)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(2, 4)
