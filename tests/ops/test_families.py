"""Families whose ops are composed of the kernels of other families.

The tests compare them with their special cases, decode from the state of a prompt, and check torch.compile
and error texts. testing/cases compares the results with float64.
"""
from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn

import flashlin
from flashlin.guards import tensors
from flashlin.kernels.rotation.torch_path import Turned, angles_of, packed_of
from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case

B, T, H, K, V = 2, 33, 2, 16, 24
COMPOSED = ("chunk_gated_delta_product", "fused_recurrent_gated_delta_product", "chunk_gdn2",
            "fused_recurrent_gdn2", "chunk_comba", "fused_recurrent_comba", "mamba3_siso_combined")


def drawn() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"q": randn(B, T, H, K), "k": F.normalize(randn(B, T, H, K), dim=-1), "v": randn(B, T, H, V),
            "g": F.logsigmoid(randn(B, T, H)), "gk": F.logsigmoid(randn(B, T, H, K)),
            "beta": torch.rand(B, T, H), "h0": randn(B, H, K, V)}


def same(ours: tuple[Tensor, Tensor | None], known: tuple[Tensor, Tensor | None]) -> None:
    for got, wanted in zip(ours, known, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
def test_special_cases_are_other_rules(mode: str) -> None:
    x, rest = drawn(), {"initial_state": drawn()["h0"], "output_final_state": True}
    q, k, v, g, gk, beta = (x[name] for name in ("q", "k", "v", "g", "gk", "beta"))

    def op(family: str) -> Any:
        return getattr(flashlin, f"{mode}_{family}")
    rule = op("gated_delta_rule")(q, k, v, g=g, beta=beta, **rest)
    same(op("gated_delta_product")(q, k, v, g, beta, 1, **rest), rule)
    # p reads the state before the decay, the delta rule reads it after the decay
    same(op("comba")(q=q, k=k, v=v, p=k * g.exp()[..., None], g=g, beta=beta, **rest), rule)
    rates = beta[..., None].expand_as(k), beta[..., None].expand_as(v)
    same(op("gdn2")(q, k, v, gk, *rates, **rest), op("kda")(q, k, v, gk, beta, **rest))


def test_decoding_goes_on_from_a_prompt() -> None:
    x = drawn()
    b, w = torch.rand(B, T, H, K), torch.rand(B, T, H, V)
    two = {name: x[name].repeat_interleave(2, 1) for name in ("k", "v", "beta")}

    def part(tensors: dict[str, Tensor], at: slice) -> dict[str, Tensor]:
        return {name: y[:, at] for name, y in tensors.items()}
    for family, tokens, steps in (("gdn2", {**x, "g": x["gk"], "b": b, "w": w}, {}),
                                  ("comba", {**x, "p": x["k"] / 2}, {}),
                                  ("gated_delta_product", x, two)):
        names = {"gdn2": "qkvgbw", "comba": ("q", "k", "v", "p", "g", "beta"),
                 "gated_delta_product": ("q", "g")}[family]
        given = {name: tokens[name] for name in names}
        more: dict[str, Any] = {"num_householder": 2} if steps else {}
        chunk, token = (getattr(flashlin, f"{mode}_{family}") for mode in ("chunk", "fused_recurrent"))
        whole, last = chunk(**given, **steps, **more, output_final_state=True)
        _, state = chunk(**part(given, slice(0, T - 1)), **part(steps, slice(0, 2 * T - 2)), **more,
                         output_final_state=True)
        same(token(**part(given, slice(T - 1, T)), **part(steps, slice(2 * T - 2, 2 * T)), **more,
                   initial_state=state, output_final_state=True), (whole[:, T - 1:], last))


@pytest.mark.parametrize("case", [case for case in CASES if case.op in COMPOSED and case.id == "packed"],
                         ids=str)
def test_compiled_in_one_graph(case: Case) -> None:
    tensors = case.make(torch.float32, torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
    with_gradients = []
    for call in (case.call, torch.compile(case.call, backend="aot_eager", fullgraph=True)):
        outputs = list(call(**tensors).values())
        with_gradients.append([*outputs, *torch.autograd.grad(
            [x.sin().sum() for x in outputs], leaves, allow_unused=True, materialize_grads=True)])
    for eager, compiled in zip(*with_gradients, strict=True):
        # Mamba-3 rotates by complex numbers, but by real ones when traced. The float32 rounding of both is
        # relative to the largest value.
        largest = float(eager.detach().abs().max()) if "mamba3" in case.op else 1.0
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5 * max(1.0, largest))


def mamba3(T: int, **changes: Any) -> dict[str, Any]:
    given = {"Q": randn(1, T, 1, 4), "K": randn(1, T, 1, 4), "V": randn(1, T, 2, 3),
             "ADT": torch.full((1, 2, T), -0.1), "DT": torch.full((1, 2, T), 0.1), "Trap": randn(1, 2, T),
             "Q_bias": randn(2, 4), "K_bias": randn(2, 4), "Angles": torch.ones(1, T, 2, 2)}
    return {**given, **changes}


def test_angles_of_long_sequences_keep_their_digits() -> None:
    """Angles after 100,000 tokens are accurate to 1e-5.

    A plain float32 sum of so many steps has only four decimal places.
    """
    T = 100_000
    _, angle, *_ = flashlin.mamba3_siso_combined(**mamba3(T), return_final_states=True)
    step = float(torch.tensor(1.0).tanh() * (math.pi * torch.tensor(0.1)))
    torch.testing.assert_close(angle.double(), torch.full_like(angle, T * step % math.tau).double(), rtol=0,
                               atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("edges", [(), (0, 70, 70, 75, 4300, 4330)], ids=["dense", "packed"])
def test_a_broken_turn_reaches_only_later_tokens_of_its_sequence(edges: tuple[int, ...],
                                                                 value: float) -> None:
    """A turn that is not finite affects only later tokens of its sequence.

    In backward a gradient that is not finite affects only earlier tokens.
    """
    b, T = (1, edges[-1]) if edges else (3, 4200)
    turns, gradient = (randn(b, T, 2, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    row, first, at, end = (0, 75, 4200, 4300) if edges else (1, 0, 4100, T)
    packed = packed_of(T, torch.tensor(edges)) if edges else None

    def run(broken: bool) -> tuple[Tensor, Tensor]:
        x, dy = turns.clone(), gradient.clone()
        if broken:
            x[row, at, 1, 2] = dy[row, at, 0, 1] = value
        angle = angles_of(x.requires_grad_(), None, packed)
        return angle.detach(), torch.autograd.grad(angle, x, dy)[0]
    (whole, d_whole), (angle, dx) = run(False), run(True)
    spoiled, d_spoiled = torch.zeros_like(angle, dtype=torch.bool), torch.zeros_like(dx, dtype=torch.bool)
    spoiled[row, at:end, 1, 2] = d_spoiled[row, first:at + 1, 0, 1] = True
    for found, known, where in ((angle, whole, spoiled), (dx, d_whole, d_spoiled)):
        assert not found[where].isfinite().any()
        torch.testing.assert_close(found[~where], known[~where], rtol=0, atol=1e-5)
    spans = [(0, first, end) for first, end in pairwise(edges)] or [(n, 0, T) for n in range(b)]
    for n, first, end in spans:
        turning, back = turns[n, first:end].double(), gradient[n, first:end].double()
        off = whole[n, first:end] - turning.cumsum(0)
        torch.testing.assert_close((off / math.tau).round() * math.tau, off, rtol=0, atol=1e-5)
        torch.testing.assert_close(d_whole[n, first:end].double(), back.flip(0).cumsum(0).flip(0), rtol=1e-5,
                                   atol=1e-5)


def test_mamba3s_turns_have_second_order_gradients() -> None:
    """The rotation of Mamba-3 passes gradgradcheck in float64.

    q and k have one group, two heads and six channels, and four of the channels are rotated.
    """
    torch.manual_seed(0)
    angle, q, k = (randn(*shape, dtype=torch.float64, requires_grad=True)
                   for shape in ((1, 3, 2, 2), (1, 3, 1, 6), (1, 3, 1, 6)))
    bias = randn(2, 6, dtype=torch.float64, requires_grad=True)
    check, start = torch.autograd.gradgradcheck, angle[:, 0].detach().requires_grad_()
    assert check(lambda *x: Turned.apply(x[0], torch.float64, x[1], x[3], x[2], x[3]), (angle, q, k, bias))
    assert check(lambda turns, begin: angles_of(turns, begin, None), (angle, start))


def test_rows_of_no_sequence_are_zero_in_mamba3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows outside of all sequences are zero, also with D and Z.

    The terms of D and Z do not depend on the sequences. The test disables the check of cu_seqlens, because
    the host does not read cu_seqlens on a GPU.
    """
    monkeypatch.setattr(tensors, "check_bounds", lambda *edges: None)
    given = {name: x.requires_grad_() for name, x in mamba3(12, D=randn(2), Z=randn(1, 12, 2, 3)).items()}
    y = flashlin.mamba3_siso_combined(**given, cu_seqlens=torch.tensor([2, 7, 7, 9]))
    dV, dZ = torch.autograd.grad(y.sum(), [given["V"], given["Z"]])
    for x in (y, dV, dZ):
        assert not x[:, :2].any() and not x[:, 9:].any() and x[:, 2:9].all()


@pytest.mark.parametrize("name", ["V", "DT", "Z"])
def test_mamba3s_angles_and_states_are_float64_where_anything_is(name: str) -> None:
    given = mamba3(5, D=randn(2), Z=randn(1, 5, 2, 3))
    given[name] = given[name].double()
    y, angle, state, k, v = flashlin.mamba3_siso_combined(**given, return_final_states=True)
    assert {angle.dtype, state.dtype} == {torch.float64} and y.dtype == v.dtype == given["V"].dtype


def test_mamba3_refuses_unknown_keywords() -> None:
    """An unknown keyword raises the TypeError of Python, as in mamba_ssm."""
    with pytest.raises(TypeError, match=r"mamba3_siso_combined.* unexpected keyword argument 'gate'"):
        flashlin.mamba3_siso_combined(*[None] * 9, gate=None)


q, k, v = randn(1, 3, 2, 8), randn(1, 6, 2, 8), randn(1, 6, 2, 5)
g, beta = randn(1, 3, 2), torch.rand(1, 6, 2)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("chunk_gated_delta_product", {"num_householder": 3},
     "k: got shape [1, 6, 2, 8], need [B, T n, H, K] = [1, 9, 2, 8]"),
    ("chunk_gated_delta_product", {"num_householder": 0}, "num_householder: got 0, need an integer of at"),
    ("chunk_gated_delta_product", {"g": beta}, "g: got shape [1, 6, 2], need [B, T, HV] = [1, 3, 2]"),
    ("chunk_gated_delta_product", {"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens: got"),
    ("chunk_gated_delta_product", {"cp_context": 1}, "cp_context: got int without group, need what fla.ops.cp"),
    ("chunk_gdn2", {"w": g}, "w: got shape [1, 3, 2], need [B, T, HV, V] = [1, 3, 2, 5]"),
    ("chunk_gdn2", {"chunk_size": 32}, "chunk_size: got 32, need"),
    ("fused_recurrent_gdn2", {"use_gate_in_kernel": True},
     "fused_recurrent_gdn2: A_log: got None, need a tensor [HV] with use_gate_in_kernel and without low"),
    *[(op, {"g": -k[:, :3, :1].abs(), "use_gate_in_kernel": True, "A_log": randn(2)},
       "g: got shape [1, 3, 1, 8], need [B, T, HV, K] = [1, 3, 2, 8]")
      for op in ("chunk_gdn2", "fused_recurrent_gdn2")],
    ("chunk_gdn2", {"A_log": randn(2)}, "chunk_gdn2: got A_log without use_gate_in_kernel"),
    ("chunk_comba", {"p": q[:, :2]}, "p: got shape [1, 2, 2, 8], need [B, T, H, K] = [1, 3, 2, 8]"),
    ("fused_recurrent_comba", {"beta": randn(1, 3, 2, 5)},
     "beta: got shape [1, 3, 2, 5], need [B, T, HV] = [1, 3, 2]"),
    ("mamba3_siso_combined", {"Q": randn(1, 3, 1, 5)},
     "Q: got shape [1, 3, 1, 5], need [b, T, G, N] with G a divisor"),
    ("mamba3_siso_combined", {"Angles": randn(1, 3, 2, 3)},
     "Angles: got shape [1, 3, 2, 3], need [b, T, H, R] with R"),
    ("mamba3_siso_combined", {"Input_States": (q, q)},
     "Input_States: got tuple, need (angles [n, H, R], states"),
    ("mamba3_siso_combined", {"Input_States": (randn(2, 2, 2), q, q, q)},
     "Input_States: angles: got shape [2, 2, 2], need [n, H, R] = [1, 2, 2]"),
    ("mamba3_siso_combined", {"cu_seqlens": torch.tensor([0])}, "cu_seqlens: got")]


@pytest.mark.parametrize(("op", "change", "text"), WRONG, ids=[f"{op} {text}" for op, _, text in WRONG])
def test_errors_name_the_argument(op: str, change: dict[str, Any], text: str) -> None:
    one = {"q": q, "k": k[:, :3], "v": v[:, :3]}
    right = {"gated_delta_product": {"q": q, "k": k, "v": v, "g": g, "beta": beta, "num_householder": 2},
             "gdn2": {**one, "g": -q.abs(), "b": q, "w": v[:, :3]},
             "comba": {**one, "p": q, "g": g, "beta": beta[:, :3]}, "combined": mamba3(3)}
    given = next(arguments for name, arguments in right.items() if op.endswith(name))
    getattr(flashlin, op)(**given)
    with pytest.raises((TypeError, ValueError)) as raised:
        getattr(flashlin, op)(**{**given, **change})
    assert str(raised.value).startswith(text)
