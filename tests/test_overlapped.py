"""The scan whose loads, products and stores overlap: when it is planned, and that every kind of it compiles
for Hopper. tests/gpu/test_overlapped.py runs it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import flashlin
from benchmarks.pretended import Driver, Started, pretended
from flashlin import dispatch
from flashlin.compat import launch
from flashlin.compat.described import Lent
from flashlin.compat.target import parse, pretend
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


@pytest.mark.parametrize("name", CALLS)
def test_later_starts_hand_over_what_the_first_one_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, and descriptors of which Triton's launcher makes the same but for where their memory is."""
    from triton.backends.nvidia import driver
    kind = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [64, 64], "fp4_padded": False}
    addresses: list[int] = []

    def fill(address: int, *facts: Any) -> Any:
        addresses.append(address)
        return facts

    def handed(one: Started) -> list[Any]:
        return [tuple(driver.make_tensordesc_arg(x, kind)) if isinstance(x, (Lent, TensorDescriptor)) else x
                for x in one.arguments]
    monkeypatch.setattr(launch, "_kernels", {})
    pretend(parse(f"triton={triton.__version__},sm=90,sms=132"))
    with pretended(Driver()) as fake, flashlin.settings(canary="trial"), torch.no_grad():
        for _ in range(4):
            CALLS[name](torch.device("cpu"))
        fake.fill_tma_descriptor = fake.fill_tma_descriptor_tiled = fill
        starts = [one for one in fake.started if one.compiled.fn.__name__ == KERNEL]
        first, *later = map(handed, starts)
    kinds = [{type(x) for x in one.arguments} & {Lent, TensorDescriptor} for one in starts]
    assert kinds == [{TensorDescriptor}, {Lent}, {Lent}, {Lent}]
    assert len(addresses) == 16 and all(address and address % 16 == 0 for address in addresses)
    numbers = [at for at, x in enumerate(first) if not isinstance(x, torch.Tensor)]
    assert [[one[at] for at in numbers] for one in later] == 3 * [[first[at] for at in numbers]]


def test_descriptors_begin_at_16_bytes() -> None:
    from flashlin.kernels.simple_gla.forward import aligned
    x = torch.randn(65)
    assert aligned(x[1:]).data_ptr() % 16 == 0 and torch.equal(aligned(x[1:]), x[1:]) and aligned(x) is x
