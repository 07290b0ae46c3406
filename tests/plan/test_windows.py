"""Tests of when the segments of split sequences may have windows (``kernels/dplr/windows.py``)."""
from __future__ import annotations

from typing import Any

import pytest

import flashlin
from flashlin import dispatch
from flashlin.compat.target import Target, parse
from flashlin.guards import launch_table
from flashlin.policy import Policy

COMPUTED, IN_KERNEL, ERASING = ("beta",), ("A_log", "beta", "dt_bias"), ("a",)


def kernels(T: int, H: int, options: tuple[str, ...] = COMPUTED, backward: bool = True,
            machine: str = "H200,triton=3.6.0", **facts: Any) -> set[str]:
    """Return the names of the planned kernels of a call with one sequence and heads of 128."""
    chosen = {name: facts.pop(name) for name in ("invariant", "portable", "canary") if name in facts}
    op = facts.pop("op", "chunk_gdn2" if options == ERASING else "chunk_kda")
    family = "dplr" if op in ("chunk_gdn2", "chunk_kda") else "delta"
    D = facts.pop("D", 128)
    found = flashlin.Problem(op, family, "chunk", 1, T, H, D, D, facts.pop("N", 1), **{
        "dtype": "bfloat16", "needs_grad": backward, "options": options, **facts})
    policy = Policy(**{"canary": "trial", **chosen})
    return {launch.kernel for launch in dispatch.plan(found, parse(machine), policy).launches}


@pytest.mark.parametrize(("T", "H", "options", "backward"), [
    (32768, 8, COMPUTED, False), (32768, 8, COMPUTED, True), (32768, 8, ERASING, True),
    (32768, 8, IN_KERNEL, False), (32768, 8, IN_KERNEL, True), (8192, 32, COMPUTED, True),
    (8192, 32, ERASING, True)])
def test_they_need_short_chunks_and_overlapping_scans(T: int, H: int, options: tuple[str, ...],
                                                      backward: bool) -> None:
    planned = kernels(T, H, options, backward)
    assert {"dplr_prepare_raw", "dplr_windows", "dplr_alone", "carry_transferred",
            "dplr_overlapped"} <= planned
    assert ("dplr_overlapped_back" in planned) == ("dplr_reverse" in planned) == backward


@pytest.mark.parametrize("given", [
    # five segments or fewer are slower with windows in forward alone, and if no gate forgets, as in layers
    dict(T=8192, H=32, backward=False), dict(T=8192, H=32, options=IN_KERNEL),
    dict(T=8192, H=2),  # few programs
    dict(T=4096, H=128),  # sequences are not split
    dict(T=2560, H=24),  # four segments of 640 tokens
    dict(T=32768, H=8, machine="A100,triton=3.6.0"),
    dict(T=32768, H=8, dtype="float32"), dict(T=32768, H=8, invariant=True),
    dict(T=32768, H=8, portable=True)],
    ids=str)
def test_where_they_are_not(given: dict[str, Any]) -> None:
    assert "dplr_windows" not in kernels(**given)


@pytest.mark.parametrize(("given", "planned"), [
    (dict(T=32768, H=8), True), (dict(T=32768, H=8, backward=False), True), (dict(T=8192, H=32), True),
    (dict(T=32768, H=8, op="chunk_delta_rule", options=()), False),  # without a gate nothing is forgotten
    (dict(T=32768, H=8, op="chunk_comba", options=("g", "p")), False),  # the bound is for predictions with k
    (dict(T=32768, H=8, varlen=True, N=8), False),  # sequences may be shorter than segments
    (dict(T=8192, H=2), False), (dict(T=8192, H=64), False), (dict(T=32768, H=8, D=64), True),
    (dict(T=32768, H=8, D=64, backward=False), False),  # the bounds would cost more than windows save
    (dict(T=32768, H=8, machine="A100,triton=3.6.0"), False), (dict(T=32768, H=8, invariant=True), False)],
    ids=str)
def test_gated_delta_rules(given: dict[str, Any], planned: bool) -> None:
    given = {"op": "chunk_gated_delta_rule", "options": ("g",), **given}
    names = kernels(**given)
    assert ({"delta_facts", "dplr_windows"} <= names) == ("dplr_windows" in names) == planned
    assert not planned or "delta_overlapped_alone" in names


@pytest.mark.parametrize(("T", "H", "backward", "split"), [
    (32768, 8, False, True), (32768, 8, True, True), (4096, 128, False, False), (4096, 128, True, False)])
def test_kernels_in_gluon_of_delta_rules_have_run(T: int, H: int, backward: bool, split: bool) -> None:
    """They are also planned outside of trials, because the records contain their present source."""
    names = kernels(T, H, ("g",), backward, op="chunk_gated_delta_rule", canary="auto")
    assert {"delta_overlapped_inverse", "delta_overlapped"} <= names and "delta_reverse" not in names
    assert ({"delta_overlapped_back", "delta_overlapped_grads"} <= names) == backward
    assert ({"delta_facts", "dplr_windows", "delta_overlapped_alone"} <= names) == split


@pytest.mark.parametrize("machine", ["H200,triton=3.6.0", "A100,triton=3.6.0"])
def test_grouped_heads_are_summed_by_a_kernel_that_has_run(machine: str) -> None:
    """Elsewhere torch adds them."""
    for options in (("g",), ("g", "gva")):
        names = kernels(4096, 128, options, True, machine, op="chunk_gated_delta_rule", canary="auto")
        assert ("sum_heads" in names) == ("gva" in options and machine.startswith("H200"))


@pytest.mark.parametrize(("given", "planned"), [
    ({}, True), ({"backward": False}, True), ({"N": 513}, False),  # fewer than 64 tokens on average
    ({"op": "chunk_comba", "options": ("g", "p")}, False),
    ({"machine": "A100,triton=3.6.0"}, False)], ids=str)
def test_packed_sequences_use_kernels_in_gluon(given: dict[str, Any], planned: bool) -> None:
    """They use all of these kernels or none, because the plain ones also compute the tails."""
    given = {"op": "chunk_gated_delta_rule", "options": ("g",), "varlen": True, "N": 32, **given}
    names = kernels(32768, 8, **given)
    gluon = {name for name in names if "overlapped" in name}
    assert len(gluon) == (0 if not planned else 4 if given.get("backward", True) else 2)
    assert ({"whole_chunks", "copy_tails", "delta_lines"} <= names) == planned


@pytest.mark.parametrize("backward", [False, True])
def test_a_trial_leaves_out_a_kernel_that_is_known_to_fail(backward: bool,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel of inverses does not compile, the other kernels in Gluon are still tried."""
    def trust(config: str, target: Target) -> str:
        return "failed" if config.startswith("delta_overlapped_inverse ") else "untested"
    monkeypatch.setattr(launch_table, "trust", trust)
    dispatch.plan.cache_clear()
    names = kernels(4096, 128, ("g",), backward, "H200,triton=3.9.0", op="chunk_gated_delta_rule")
    dispatch.plan.cache_clear()
    assert {"delta_inverse", "delta_overlapped"} <= names
    assert names.isdisjoint({"delta_lines", "delta_overlapped_inverse"})
    assert ("delta_overlapped_back" in names) == backward


@pytest.mark.parametrize(("T", "H"), [(4096, 128), (32768, 8)])
def test_kernels_of_chunks_have_one_program_for_each_chunk_and_head(T: int, H: int) -> None:
    found = flashlin.Problem("chunk_gated_delta_rule", "delta", "chunk", 1, T, H, 128, 128, 1,
                             dtype="bfloat16", needs_grad=True, options=("g",))
    plan = dispatch.plan(found, parse("H200,triton=3.6.0"), Policy(canary="trial"))
    for kernel in ("delta_overlapped_inverse", "delta_overlapped_grads"):
        assert plan.launch(kernel).grid == (T // 64 * H,)


def test_two_warps_compute_half_as_many_columns_and_channels() -> None:
    found = flashlin.Problem("chunk_kda", "dplr", "chunk", 1, 32768, 8, 128, 128, 1, dtype="bfloat16",
                             needs_grad=True, options=COMPUTED)
    tiles = {}
    for machine in ("B200,triton=3.6.0", "H100,triton=3.5.1"):
        plan = dispatch.plan(found, parse(machine), Policy(canary="off", portable=True))
        tiles[machine] = {one.kernel: dict(one.tile) for one in plan.launches}
    two, four = tiles.values()
    assert two["dplr_scan"]["BV"] == two["dplr_reverse"]["BV"] == 32 and two["carry_transferred"]["BC"] == 32
    assert four["dplr_scan"]["BV"] == 64 and four["carry_transferred"]["BC"] == 64


def test_they_are_planned_only_where_their_kernel_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    known = launch_table.has_run

    def has_run(config: str, *rest: Any) -> bool:
        return not config.startswith("dplr_windows") and known(config, *rest)
    facts: dict[str, Any] = dict(H=8, options=IN_KERNEL, backward=False, canary="auto")
    assert "dplr_windows" in kernels(32768 + 64, **facts)
    monkeypatch.setattr(launch_table, "has_run", has_run)
    without = kernels(32768 + 128, **facts)  # another length, because plans are cached
    assert {"dplr_prepare_raw", "dplr_alone"} <= without and "dplr_windows" not in without
