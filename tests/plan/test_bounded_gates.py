"""Tests of when kernels compute the gate of KDA themselves, and when its chunks have 16 tokens."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlin
from flashlin.compat.target import parse
from flashlin.guards import launch_table
from flashlin.ops.kda import LOWEST
from flashlin.testing.record import recording

RAW, SUMS = "dplr_prepare_raw", "dplr_sums"


def kernels(machine: str = "H200,triton=3.6.0", op: Callable[..., Any] = flashlin.chunk_kda, *, T: int = 256,
            K: int = 128, dtype: torch.dtype = torch.bfloat16, gate: bool = True, gradients: bool = False,
            settings: dict[str, Any] | None = None, **more: Any) -> list[str]:
    """Return the kernels of a call of chunk_kda as its layer makes it, in the order of their launches."""
    x = {name: torch.zeros(1, T, 4, K, dtype=dtype, requires_grad=gradients) for name in "qkvg"}
    x |= {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4 * K)} if gate else {}
    facts = {"lower_bound": -5.0, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": gate, **more}
    with flashlin.settings(**{"canary": "trial", **(settings or {})}), recording(parse(machine)) as launches:
        o = op(**x, beta=torch.zeros(1, T, 4), **facts)[0]
        if gradients:
            o.sum().backward()
    return [launch.kernel for launch in launches]


@pytest.mark.parametrize("given", [
    {}, {"lower_bound": LOWEST}, {"K": 64}, {"K": 96}, {"T": 250}, {"T": 16384},
    {"cu_seqlens": torch.tensor([0, 100, 256])}], ids=str)
def test_kernels_compute_a_bounded_gate(given: dict[str, Any]) -> None:
    found = kernels(**given)
    assert found[0] == RAW and {"norm_forward", "pointwise_gate"}.isdisjoint(found)


@pytest.mark.parametrize("given", [
    {"lower_bound": LOWEST - 1e-3}, {"lower_bound": None}, {"use_qk_l2norm_in_kernel": False},
    {"gate": False}], ids=str)
def test_other_gates_are_computed_before_the_chunks_of_16_tokens(given: dict[str, Any]) -> None:
    found = kernels(**given, gradients=True)
    assert found[0] in ("norm_forward", "pointwise_gate")
    assert (found.count(RAW), found.count(SUMS)) == (2, 1) and "dplr_prepare_one" not in found


def test_gated_deltanet_2_has_chunks_of_16_tokens() -> None:
    x = [torch.zeros(1, 256, 4, 128, dtype=torch.bfloat16, requires_grad=True) for _ in "qkvbw"]
    with flashlin.settings(canary="trial"), recording(parse("H200,triton=3.6.0")) as launches:
        flashlin.chunk_gdn2(*x[:3], torch.zeros(1, 256, 4, 128), *x[3:])[0].sum().backward()
    assert [launch.kernel for launch in launches].count(RAW) == 2


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("given", [
    {"K": 256}, {"dtype": torch.float16}, {"dtype": torch.float32}, {"machine": "A100,triton=3.6.0"},
    {"settings": {"portable": True}}, {"settings": {"invariant": True}}], ids=str)
def test_other_calls_have_longer_chunks(given: dict[str, Any], gate: bool) -> None:
    assert {RAW, SUMS}.isdisjoint(kernels(**given, gate=gate, gradients=True))


@pytest.mark.parametrize("given", [{"T": 250}, {"K": 96}, {"cu_seqlens": torch.tensor([0, 128, 256])},
                                   {"machine": "H200,triton=3.4.0"}, {"T": 8192}], ids=str)
def test_computed_gates_have_longer_chunks_where_short_ones_are_slow(given: dict[str, Any]) -> None:
    assert RAW not in kernels(**given, gate=False)


def test_kernels_that_have_not_run_here_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_table, "has_run", lambda *_: False)
    assert RAW not in kernels(settings={"canary": "auto"}) and RAW in kernels()


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("triton, ran", [("3.6.0", True), ("3.7.1", True), ("3.8.0", False)])
def test_releases_under_which_these_kernels_have_run(triton: str, ran: bool, gate: bool) -> None:
    found = kernels(settings={"canary": "auto"}, machine=f"H200,triton={triton}", T=1024, gate=gate)
    assert (RAW in found) == ran


def test_compiled_code_computes_the_gate_before() -> None:
    found = kernels(op=torch.compile(flashlin.chunk_kda, backend="eager", fullgraph=True))
    assert found == ["norm_forward", RAW, "dplr_overlapped"], "plain torch computes the gate"


@pytest.mark.parametrize(("given", "short"), [
    ({}, True), ({"K": 64}, True), ({"T": 8192}, False), ({"T": 250}, False), ({"K": 96}, False),
    ({"cu_seqlens": torch.tensor([0, 128, 256])}, False)], ids=str)
def test_backward_has_short_chunks_if_its_scans_overlap(given: dict[str, Any], short: bool) -> None:
    """Backward scans chunks of 16 tokens if both scans are in Gluon, with whole sequences or windows."""
    found = kernels(gradients=True, **given)
    back = found[found.index("norm_forward"):]
    assert short == ("pointwise_gate" not in back), "kernels of short chunks compute the gate again"
    assert (RAW in back, SUMS in back, "dplr_prepare_one" in back) == (short, short, not short)
    assert ("dplr_alone" in back) == (given.get("T") == 8192), "only this sequence is split"
    overlapped = {"T": 250, "K": 96}.items().isdisjoint(given.items()) and "cu_seqlens" not in given
    assert {"dplr_overlapped_grads" if overlapped else "dplr_grads_one", "dplr_grads_rest"} <= {*back}
    if short:
        assert back.index("dplr_overlapped_back") < back.index(SUMS) < back.index("dplr_overlapped_grads")
