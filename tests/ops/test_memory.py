"""Peak memory in MiB of forward and backward of the chunked ops.

A buffer that lives longer than before raises the peak, and a test fails.
"""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import memory
from benchmarks.calls import Shape, find
from flashlin.compat import launch
from flashlin.ops._common import replay
from tests.direct import needs_direct_starts

SMALL, GROUPED = Shape(2, 2048, 8, 64), Shape(1, 2048, 80, 64)
# By op: the shape, and the peaks in MiB of the first run, which is ordinary, and of the third run, which is a
# replay. A 16-bit tensor of shape SMALL takes 4 MiB.
PEAKS = {"chunk_delta_rule": (SMALL, 35.7, 31.6), "chunk_gated_delta_rule": (SMALL, 35.8, 31.6),
         "chunk_gla": (SMALL, 48.4, 40.4), "chunk_simple_gla": (SMALL, 24.6, 22.6),
         "chunk_retention": (SMALL, 20.0, 18.0), "chunk_kda": (SMALL, 85.7, 69.6),
         "chunk_rwkv6": (SMALL, 48.5, 48.5), "chunk_rwkv7": (SMALL, 101.4, 77.4),
         # Two groups of warps each store their own dg, and dg is their sum; this is 1.4 times as fast.
         "mamba_chunk_scan_combined": (GROUPED, 173.1, 173.1)}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(replay, "_recipes", {})
    with memory.card():
        yield


@needs_direct_starts
@pytest.mark.parametrize("op", PEAKS)
def test_no_more_is_taken_than_before(op: str, card: None) -> None:
    shape, first, third = PEAKS[op]
    taken = [round(peak.size / 2**20, 1) for peak in memory.peaks(find(op), shape)]
    assert taken[0] <= first and taken[2] <= third, taken


def test_gated_delta_rule_takes_at_most_950_mib(card: None) -> None:
    """Its backward computes two sections of the time axis in turn. Before, it took 1,300 MiB here."""
    first, _, third = memory.peaks(find("chunk_gated_delta_rule"), Shape(4, 4096, 32, 128))
    assert first.size <= 1000 * 2**20 and third.size <= 950 * 2**20


def test_simple_gla_takes_at_most_0_6_of_what_fla_does(card: None) -> None:
    """chunk_simple_gla uses at most 0.6 times the memory of fla.

    fla uses 1,540 MiB at this shape (benchmarks/results/speed-simple_gla-*).
    """
    first, _, third = memory.peaks(find("chunk_simple_gla"), Shape(4, 4096, 32, 128))
    assert max(first.size, third.size) <= 0.6 * 1540 * 2**20
