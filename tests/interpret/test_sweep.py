"""benchmarks/sweep.py in the interpreter: it runs each configuration and names tensors that differ."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashlin
from benchmarks import sweep
from benchmarks.calls import find


def test_every_kernel_of_a_call_is_run_in_every_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    op = find("chunk_retention")
    with flashlin.settings(path="triton"):
        starts = sweep.captured(op, op.small, "cpu")
    assert "simple_gla_scan" in starts and "simple_gla_dk" in starts
    start = starts["simple_gla_scan"]
    monkeypatch.setattr(sweep, "WARPS", (4,))
    monkeypatch.setattr(sweep, "STAGES", (1, 2))
    rows = list(sweep.timed(start))
    assert [(row["num_warps"], row["num_stages"]) for row in rows] == [(4, 2), (4, 1)]
    assert all("wrong" not in row for row in rows)


def test_what_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(8)

    def run(warps: int, stages: int) -> None:
        if warps == 8:
            raise RuntimeError("no room")
        x.fill_(stages)

    fake: Any = SimpleNamespace(arguments={"x": x, "T": 3}, run=run,
                                launch=SimpleNamespace(num_warps=4, num_stages=1))
    monkeypatch.setattr(sweep, "WARPS", (4, 8))
    monkeypatch.setattr(sweep, "STAGES", (1, 2))
    rows = list(sweep.timed(fake))
    assert [row.get("wrong") for row in rows] == [None, ["x"], None, None]
    assert [row.get("failed") for row in rows][2:] == ["error: RuntimeError: no room"] * 2
