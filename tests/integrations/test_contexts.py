"""Contexts of the real fla are like those of tests/ops/test_ranks.py.

flashlin reads from a context the same values that it computes from the edges of the whole row.
"""
from __future__ import annotations

import importlib
import random
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flashlin
from flashlin.ops._common import ranks
from tests.ops.test_ranks import _fla_context, _zigzag_context
from tests.ranks import made, of_rank, run_jobs

context = pytest.importorskip("fla.ops.cp.context")


def test_a_zigzag_of_fla_is_what_the_tests_take_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(0)
    for _ in range(100):
        size, half = drawn.choice((1, 2, 3, 4)), drawn.randint(1, 6)
        tokens = 2 * size * half
        edges = sorted({0, tokens, *(drawn.randint(0, tokens) for _ in range(drawn.randint(0, 5)))})
        for rank in range(size):
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda group, size=size: size)
            theirs = context.get_cp_cu_seqlens(torch.tensor(edges), world_size=size, rank=rank,
                                               layout="zigzag")
            like = _zigzag_context(None, edges, 2 * half)
            assert torch.equal(theirs.cu_seqlens, like.cu_seqlens.to(torch.int32)), (edges, size, rank)
            for name in ("layout", "part_len", "is_first_by_part", "pre_num_ranks", "pre_num_ranks_dev"):
                assert getattr(theirs, name) == getattr(like, name), (name, edges, size, rank)


def test_a_context_of_fla_and_the_edges_of_the_whole_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "agree", lambda *_, **__: None)  # there are no other ranks
    drawn = random.Random(0)
    for _ in range(100):
        size, rows = drawn.choice((2, 3, 4)), drawn.randint(1, 8)
        edges = sorted([0, size * rows, *(drawn.randint(0, size * rows) for _ in range(drawn.randint(0, 5)))])
        for rank in range(size):
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda group, size=size: size)
            theirs = context.get_cp_cu_seqlens(torch.tensor(edges), world_size=size, rank=rank)
            theirs.group = object()
            like, x = _fla_context(theirs.group, edges, rows), torch.zeros(1, rows, 2)
            for name in ("pre_num_ranks", "post_num_ranks", "is_first_rank", "is_last_rank",
                         "pre_num_conv_tokens"):
                assert getattr(theirs, name) == getattr(like, name), (name, edges, size, rank)
            assert torch.equal(theirs.cu_seqlens, like.cu_seqlens.to(torch.int32))
            one = ranks.of_context("op", theirs, x, ())
            other = ranks.of_group("op", theirs.group, x, (), torch.tensor(edges))
            assert (one.before, one.after) == (other.before, other.after), (edges, size, rank)
            assert not one.after or one.begin == other.begin, (edges, size, rank)


def in_a_patched_program(op: str, group: Any) -> None:
    """Call fla's own function with fla's own context. A convolution's context must know the number of taps."""
    edges = [0, 5, 10, 11, 48]
    call = made(op, 2, 48, edges)
    weights = {name: x for name, x in call.shared.items() if name in ("weight", "bias")}
    right = getattr(flashlin, op)(**call.tokens, **weights, **call.options)[0]
    options = weights | {name: x for name, x in call.options.items() if name != "cu_seqlens"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing GPU
        home = "fla.modules" if op in ("causal_conv1d", "token_shift") else "fla.ops"
        theirs = importlib.import_module(f"{home}.{op.removeprefix('chunk_')}")
        cp = importlib.import_module("fla.ops.cp")
    given = cp.build_cp_context(torch.tensor(edges), group=group, conv1d_kernel_size=4)
    with flashlin.patched("fla"):
        o = getattr(theirs, op)(**of_rank(call, group).tokens, **options, cp_context=given)[0]
    mine = right.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
    torch.testing.assert_close(o, mine, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.alternate
def test_a_patched_program_of_fla_shares_sequences(tmp_path: Path) -> None:
    said = run_jobs({op: (2, partial(in_a_patched_program, op)) for op in (
        "chunk_kda", "chunk_gated_delta_product", "chunk_gdn2", "causal_conv1d")}, tmp_path)
    assert not any(text for ranks in said.values() for text in ranks), said
