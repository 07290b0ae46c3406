"""Backward of ops with a fixed decay per head, or none, on the kernels for one decay per token.

Backward uses these kernels for short sequences with few heads.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashlin import dispatch
from flashlin.guards.plan_types import Plan
from flashlin.kernels.simple_gla import recipe
from flashlin.testing import cases, compare

CASES = [case for case in cases.CASES if case.op in ("chunk_retention", "chunk_linear_attn")
         and case.id in ("random", "no-state", "packed", "odd", "one-token")]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.alternate
def test_it_is_as_exact(case: compare.Case, monkeypatch: pytest.MonkeyPatch,
                        fresh: Callable[[], None]) -> None:
    monkeypatch.setattr(recipe, "_short", lambda problem, target, strips: True)
    fresh()
    plans: list[Plan] = []
    with dispatch.watching(plans.append):
        verdicts = compare.check(case, torch.device("cpu"), torch.float32)
    assert all(verdict.ok for verdict in verdicts), verdicts
    started = {launch.kernel for plan in plans if plan.path == "triton" for launch in plan.launches}
    assert {"gate_cumsum", "simple_gla_states"} < started and "simple_gla_dq" not in started
