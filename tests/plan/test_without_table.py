"""Tests of when simple GLA computes the gradients of its states in the kernel of dq and dk.

tests/interpret/test_without_table.py tests the results.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flashlin
from flashlin import dispatch
from flashlin.compat.target import parse
from flashlin.guards import launch_table
from flashlin.guards.plan_types import Launch
from flashlin.kernels import scans
from flashlin.policy import Policy

HOPPER, AMPERE, BLACKWELL = (f"triton=3.6.0,sm={sm},sms=132" for sm in (90, 80, 100))
KERNELS = ("simple_gla_dv", "simple_gla_grads")
FIELDS = {"B": 4, "T": 4096, "H": 32, "K": 128, "V": 128, "N": 4, "dtype": "bfloat16", "options": ("g",),
          "needs_grad": True}

IN_GLUON = "simple_gla_overlapped_back"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the overlapping kernels, which plans with trials would otherwise use."""
    monkeypatch.setattr(scans, "OVERLAPS", (99, 0))


def planned(machine: str = HOPPER, **facts: Any) -> dict[str, Launch]:
    """Return the planned launches of the two gradient kernels, or of the overlapping one, by name."""
    found = flashlin.Problem("chunk_simple_gla", "simple_gla", "chunk", **{**FIELDS, **facts})
    launches = dispatch.plan(found, parse(machine), Policy(canary="trial")).launches
    return {launch.kernel: launch for launch in launches if launch.kernel in (*KERNELS, IN_GLUON)}


@pytest.mark.parametrize(("machine", "facts", "side"), [
    (HOPPER, {}, 64), (AMPERE, {}, 32), (HOPPER, {"dtype": "float32", "V": 64}, 32),
    (HOPPER, {"K": 64, "V": 72}, 64),
    (HOPPER, {"B": 8, "N": 8, "T": 1024, "H": 8, "K": 64, "V": 64}, 64),  # in strips of half the columns
    (HOPPER, {"B": 1, "N": 1, "T": 8192, "H": 2}, 64),  # also in segments
    (HOPPER, {"T": 4097}, 64), (HOPPER, {"B": 1, "T": 16384, "varlen": True}, 64),
    # Not planned: the state is too large for dq and dk; strips that do not fill the tile; sums over heads.
    (HOPPER, {"V": 136}, 0), (HOPPER, {"dtype": "float32"}, 0), (BLACKWELL, {}, 0), (HOPPER, {"K": 104}, 0),
    (HOPPER, {"options": ("g", "gva")}, 0)])
@pytest.mark.usefixtures("plain")
def test_where(machine: str, facts: dict[str, Any], side: int) -> None:
    launches = planned(machine, **facts)
    assert {dict(launch.tile).get("SIDE", 0) for launch in launches.values()} == {side}
    if side:
        assert launches["simple_gla_grads"].block("BK") == side


def test_a_scan_in_gluon_takes_the_place_that_plain_triton_would() -> None:
    assert {name: dict(launch.tile)["SIDE"] for name, launch in planned().items()} == {
        IN_GLUON: 64, "simple_gla_grads": 64}
    shared = planned(options=("g", "gva"))
    assert {name: dict(launch.tile)["SIDE"] for name, launch in shared.items()} == {IN_GLUON: 0}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("record", [{"failed": "sm90"}, {"slow": {"sm90": [5000, 32]}}], ids=str)
def test_not_where_it_is_known_to_fail_or_to_be_slow(
    kernel: str, record: Any, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None],
) -> None:
    without = planned()
    monkeypatch.setattr(launch_table, "table", lambda: {without[kernel].config: {"3.6.0": record}})
    fresh()
    assert planned() == {name: launch._replace(tile=launch.tile[:-1]) for name, launch in without.items()}
