"""Tests of when scans are planned with strips of half the columns of a state, which use more of a GPU.

The results of such scans are tested by the cases narrow-strips*, which matrix/gpu.py runs.
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

HOPPER, TRIAL = "triton=3.6.0,sm=90,sms=132", Policy(canary="trial")
SCANS = {"chunk_gated_delta_rule": "delta", "chunk_kda": "dplr", "chunk_simple_gla": "simple_gla"}


def planned(op: str = "chunk_gated_delta_rule", machine: str = HOPPER, policy: Policy = TRIAL,
            **facts: Any) -> dict[str, Launch]:
    """Return the planned launches of an op by kernel name."""
    given: dict[str, Any] = {"B": 8, "T": 1024, "H": 8, "K": 64, "V": 64, "N": 8, "dtype": "bfloat16",
                             "options": ("beta",) if op == "chunk_kda" else ("g",), "needs_grad": True,
                             **facts}
    found = flashlin.Problem(op, SCANS[op], "chunk", **given)
    return {launch.kernel: launch for launch in dispatch.plan(found, parse(machine), policy).launches}


@pytest.mark.parametrize("op", SCANS)
def test_twice_the_programs_with_more_than_one_stage(op: str) -> None:
    found = planned(op, policy=Policy(canary="trial", portable=op == "chunk_kda"))  # its other scans overlap
    launches = [launch for name, launch in found.items()
                if name.startswith(SCANS[op]) and "overlapped" not in name
                and name.endswith(("_scan", "_states", "_reverse", "_dv"))]
    assert launches
    for launch in launches:
        assert launch.block("BV") == 32 and launch.grid == (128,) and launch.num_stages > 1, launch


@pytest.mark.parametrize("op", SCANS)
def test_not_before_all_of_them_have_run(op: str, monkeypatch: pytest.MonkeyPatch,
                                         fresh: Callable[[], None]) -> None:
    few = {"B": 2, "N": 2, "T": 1030}  # a number of tokens that the overlapping scan does not support
    narrow = {launch.config for name, launch in planned(op, **few).items()
              if "_grads" not in name and dict(launch.tile).get("BV") == 32}
    missing = sorted(narrow)[0]
    for known, strips in ((narrow, 32), (narrow - {missing}, 64)):
        table = {config: {"3.6.0": {"ran": "sm90"}} for config in known}
        monkeypatch.setattr(launch_table, "table", lambda table=table: table)
        fresh()
        assert {dict(launch.tile)["BV"] for name, launch in planned(op, policy=Policy(), **few).items()
                if name.endswith(("_states", "_scan"))} == {strips}


@pytest.mark.parametrize(("machine", "facts"), [
    (HOPPER, {"B": 9, "N": 9}), (HOPPER, {"T": 1023}), (HOPPER, {"dtype": "float32"}),
    (HOPPER, {"max_warps": 2}), (HOPPER, {"K": 32}), (HOPPER, {"V": 32}), ("triton=3.6.0,sm=80,sms=108", {"B": 4, "N": 4})])
def test_where_they_are_not(machine: str, facts: dict[str, Any]) -> None:
    """Narrow strips are not planned where they do not help or are not known to be right.

    They do not help if twice the programs do not fit on the GPU at once, for short sequences, or for dtypes
    without matrix units. With few rows of a state they are wrong with two stages. Other GPUs are not timed.
    """
    launches = planned(machine=machine, policy=TRIAL._replace(portable=True), **facts)  # only plain scans
    wide = min(64, facts.get("V", 64))
    found = launches.keys() & {"delta_scan", "delta_states", "delta_reverse"}
    assert facts.get("dtype") == "float32" or {launches[name].block("BV") for name in found} == {wide}
    assert "delta_reverse" not in launches or launches["delta_reverse"].num_stages == 1


def test_an_invariant_call_and_forced_parts_take_whole_strips(monkeypatch: pytest.MonkeyPatch,
                                                              fresh: Callable[[], None]) -> None:
    assert planned(policy=TRIAL._replace(invariant=True))["delta_scan"].block("BV") == 64
    monkeypatch.setattr(scans, "forced_parts", 2)
    fresh()
    assert planned(T=1030)["delta_scan"].block("BV") == 64


def test_of_packed_sequences_matrices_are_carried_over_fewer_parts() -> None:
    def part(op: str, N: int) -> int:
        return planned(op, B=1, N=N, T=32768, K=128, V=128, varlen=True)[f"{SCANS[op]}_scan"].part
    assert (part("chunk_kda", 1), part("chunk_kda", 32)) == (2048, 8192)
    assert part("chunk_gated_delta_rule", 32) == 8192


ERASING = ("a", "beta", "delta", "erase", "gk")


@pytest.mark.parametrize(("facts", "tile"), [
    ({"N": 32}, ("BV=16", 1)), ({"N": 64}, ("BV=64", 4)), ({"N": 64, "invariant": True}, ("BV=16", 1)),
    ({"N": 64, "T": 2}, ("BV=16", 1)), ({"N": 32, "K": 32, "V": 32}, ("BV=32", 2)),
    ({"N": 32, "K": 64, "V": 64}, ("BV=32", 4)), ({"N": 32, "K": 64, "V": 64, "T": 2}, ("BV=16", 1)),
    ({"N": 32, "K": 256, "V": 256}, ("BV=8", 1)), ({"N": 32, "K": 256, "V": 8}, ("BV=8", 1)),
    ({"N": 64, "options": ("a", "b")}, ("BV=16", 1)),
    ({"N": 64, "options": ("a", "beta", "delta", "g", "undecayed")}, ("BV=16", 1)),
    ({"N": 64, "options": ERASING}, ("BV=32", 1)), ({"N": 64, "options": ERASING, "T": 2}, ("BV=16", 1)),
    ({"N": 64, "options": ERASING, "invariant": True}, ("BV=16", 1)),
    ({"N": 64, "options": ("gk",)}, ("BV=32", 4)),
    ({"N": 64, "machine": "triton=3.2.0,sm=75"}, ("BV=32", 4))])
def test_tiles_of_a_delta_rule_token_by_token(facts: dict[str, Any], tile: tuple[str, int]) -> None:
    """The tile of a recurrent delta rule depends on its sizes, its options and the GPU.

    On Hopper, most calls use one warp per program, which needs no synchronization between warps. There are
    two exceptions for calls with one token per sequence. With many states, the strips are wider and have 4
    warps. With an erase rate and without gradients, the strips are twice as wide. In invariant mode the tile
    depends neither on the batch nor on the length. Calls without a delta term use the tile of 4 warps. So do
    calls on other GPUs, some of which have too little shared memory for other tiles.
    """
    facts = dict(facts)
    invariant, machine = facts.pop("invariant", False), facts.pop("machine", HOPPER)
    given = {"B": facts["N"], "T": 1, "H": 16, "K": 128, "V": 128, "dtype": "bfloat16",
             "options": ("beta", "delta", "gk"), **facts}
    problem = flashlin.Problem("fused_recurrent_kda", "recurrent", "fused_recurrent", **given)
    found = dispatch.plan(problem, parse(machine), Policy(invariant=invariant))
    [launch] = found.launches
    assert found.path == "triton"
    assert (launch.tile_text.split()[-1], launch.num_warps) == tile


@pytest.mark.parametrize(("facts", "as_gated"), [
    ({}, True), ({"T": 512}, True), ({"T": 511}, False),
    ({"T": 1025, "B": 16, "N": 16}, False), ({"B": 17, "N": 17}, False), ({"dtype": "float32"}, False),
    ({"invariant": True}, False)])
def test_short_sequences_of_few_heads_go_back_as_with_a_gate(facts: dict[str, Any], as_gated: bool) -> None:
    given: dict[str, Any] = {"B": 8, "T": 1024, "H": 8, "K": 64, "V": 64, "N": 8, "dtype": "bfloat16",
                             "needs_grad": True, **facts}
    policy = Policy(canary="trial", invariant=given.pop("invariant", False))
    found = flashlin.Problem("chunk_retention", "simple_gla", "chunk", **given)
    kernels = {launch.kernel for launch in dispatch.plan(found, parse(HOPPER), policy).launches}
    assert ("simple_gla_grads" in kernels) == ("gate_cumsum" in kernels) == as_gated
    assert ("simple_gla_dq" in kernels) != as_gated
