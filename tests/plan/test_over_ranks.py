"""Tests of plans for sequences that are split over ranks: by heads or by tokens, and the reason."""
from __future__ import annotations

from inspect import signature

import pytest

import flashlin
from flashlin import dispatch
from flashlin.compat.target import parse
from flashlin.guards import checks
from flashlin.kernels.families import PUBLIC
from flashlin.ops import delta_rule, dplr_delta_rule, gla, simple_gla
from flashlin.policy import Policy

SHARED = [name for name, op in PUBLIC.items() if op.takes_ranks]
H100 = parse("triton=3.6.0,sm=90")


def test_the_ops_that_ranks_share() -> None:
    assert {op.removeprefix("chunk_") for op in SHARED} == {
        "simple_gla", "retention", "linear_attn", "lightning_attn", "delta_rule", "gated_delta_rule",
        "gated_delta_product", "gla", "rwkv6", "kda", "rwkv7", "dplr_delta_rule", "iplr_delta_rule", "gdn2",
        "comba", "mamba_chunk_scan_combined"}
    for name, op in PUBLIC.items():
        if op.mode == "chunk":
            assert ("process_group" in signature(getattr(flashlin, name)).parameters) == op.takes_ranks, name


@pytest.mark.parametrize("policy", ["auto", "strict"])
@pytest.mark.parametrize("op", SHARED)
def test_states_are_carried_but_for_matrices_of_heads_that_divide(op: str, policy: str) -> None:
    four, six, two = (flashlin.plan(op, H100, Policy(policy=policy), T=4096, H=H, ranks=ranks)
                      for H, ranks in ((16, 4), (6, 4), (16, 2)))
    for plan, H in ((two, 16), (six, 6)):
        assert (plan.problem.over, plan.problem.T, plan.problem.H) == ("tokens", plan.asked.T, H)
    # A call on one rank with the same problem has the same launches, and nothing is announced.
    for plan in (four, six, two):
        alone = dispatch.plan(plan.problem._replace(ranks=1, over=""), H100, Policy(policy=policy))
        assert plan.launches == alone.launches and plan.path == "triton" and not dispatch.inexact_steps(plan)
    [(reason, remedy)] = [step for step in four.steps if step[0].code == "ranks"]
    if four.problem.family in checks.TRANSFERRED:
        assert (four.problem.over, four.problem.T, four.problem.H) == ("heads", 4 * four.asked.T, 4)
        assert remedy == "share_heads" and str(reason) == (
            f"ranks: each sequence on 4 ranks, {four.asked.T} tokens on each, and 16 heads, which 4 divides, "
            "need whole sequences of 4 heads on each")
        assert "no rank between two others" in str(two)
    else:
        assert four.problem.over == "tokens" and remedy == "carry_states"
        assert "states that only decay on the way" in str(four)


def test_the_families_with_a_matrix_are_those_that_give_no_decays() -> None:
    families = [module.FAMILY for module in (simple_gla, delta_rule, gla, dplr_delta_rule)]
    assert {family.name for family in families if family.decays is None} == set(checks.TRANSFERRED)


@pytest.mark.parametrize("option", checks.UNSHARED)
def test_what_else_leads_to_states(option: str) -> None:
    asked = flashlin.plan("chunk_kda", H100, H=16, ranks=4).asked
    plan = dispatch.plan(asked._replace(options=(*asked.options, option)), H100)
    assert plan.problem.over == "tokens" and checks.UNSHARED[option] in str(plan)


def test_one_device_has_no_such_step_and_plain_torch_has() -> None:
    assert not any(reason.code == "ranks" for reason, _ in flashlin.plan("chunk_kda", H100).steps)
    assert flashlin.plan("chunk_kda", "cpu", H=16, ranks=4).problem.over == "heads"


def test_explain_says_which_and_why() -> None:
    said = flashlin.explain("chunk_kda", target=H100, H=6, ranks=4)
    assert "ranks=4" in said and "6 heads, which 4 does not divide" in said
    assert "carries states from rank to rank (the usual way)" in said


@pytest.mark.parametrize(("op", "ranks"), [("rms_norm", 2), ("fused_recurrent_kda", 2), ("chunk_kda", 0)])
def test_ops_without_ranks_say_so(op: str, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"ranks: got {ranks} for {op}, need 1, or more for an op that"):
        flashlin.explain(op, ranks=ranks)
