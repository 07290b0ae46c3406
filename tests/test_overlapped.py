"""The scan whose loads, products and stores overlap: when it is planned, and that every kind of it compiles
for Hopper. tests/gpu/test_overlapped.py runs it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

import flashlin
from flashlin import dispatch
from flashlin.compat.target import parse
from flashlin.guards import proven
from flashlin.policy import Policy
from flashlin.testing.compile import Job, compile_launches
from flashlin.testing.record import Recorded, recording
from tests.overlapped import CALLS

KERNEL, TRIAL = "simple_gla_overlapped", Policy(canary="trial")
HOPPER = "triton=3.6.0,sm=90"


def planned(machine: str = HOPPER, policy: Policy = TRIAL, **facts: Any) -> str:
    """The config of the forward scan."""
    given: dict[str, Any] = {"B": 2, "T": 1024, "H": 4, "K": 128, "V": 128, "N": 2, "dtype": "bfloat16",
                             "options": ("g",), **facts}
    problem = flashlin.Problem("chunk_simple_gla", "simple_gla", "chunk", **given)
    [found] = [launch for launch in dispatch.plan(problem, parse(machine), policy).launches
               if launch.kernel in (KERNEL, "simple_gla_scan")]
    return found.config


def test_it_is_taken_where_it_has_run(monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> None:
    config = planned()
    monkeypatch.setattr(proven, "table", lambda: {config: {"3.6.0": {"compiled": "sm90"}}})
    fresh()
    assert config.startswith(KERNEL) and planned(policy=Policy()).startswith("simple_gla_scan")
    monkeypatch.setattr(proven, "table", lambda: {config: {"3.6.0": {"ran": "sm90"}}})
    fresh()
    assert planned(policy=Policy()) == config
    assert planned(policy=Policy(), T=512).startswith("simple_gla_scan"), "the host would take longer"
    assert planned("triton=3.7.1,sm=90", Policy()).startswith("simple_gla_scan"), "nobody has run it there"


@pytest.mark.parametrize("machine, facts", [
    ("triton=3.5.1,sm=90", {}), ("triton=3.6.0,sm=80", {}), ("triton=3.6.0,sm=100", {}),
    (HOPPER, {"T": 1000}), (HOPPER, {"K": 96}), (HOPPER, {"V": 96}), (HOPPER, {"dtype": "float32"}),
    (HOPPER, {"varlen": True, "B": 1}), (HOPPER, {"max_warps": 2})])
def test_what_it_does_not_take(machine: str, facts: dict[str, Any]) -> None:
    assert planned(machine, **facts).startswith("simple_gla_scan")


def test_an_invariant_call_takes_one_scan_for_all_lengths() -> None:
    assert {planned(policy=TRIAL._replace(invariant=True), T=T).split()[0]
            for T in (128, 130)} == {"simple_gla_scan"}


def starts(name: str) -> list[Recorded]:
    machine = parse(f"triton={triton.__version__},sm=90")
    with flashlin.settings(canary="trial"), recording(machine) as launches:
        CALLS[name](torch.device("cpu"))
    return [launch for launch in launches if launch.kernel == KERNEL]


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_compiles_and_spills_nothing(name: str) -> None:
    [launch] = starts(name)
    [result] = compile_launches([Job(90, launch)])
    assert result.ok and not result.spills and result.matrix == ("wgmma.mma_async",), result
    assert result.shared <= launch.shared <= parse(HOPPER).shared


def test_descriptors_begin_at_16_bytes() -> None:
    from flashlin.kernels.simple_gla.forward import aligned
    x = torch.randn(65)
    assert aligned(x[1:]).data_ptr() % 16 == 0 and torch.equal(aligned(x[1:]), x[1:]) and aligned(x) is x
