"""fla's own contexts: what tests/ops/test_ranks.py takes for one is one, and flashlin reads of it what it
works out itself of the whole row's edges."""
from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from flashlin.ops._common import ranks
from tests.ops.test_ranks import _fla_context

context = pytest.importorskip("fla.ops.cp.context")


def test_a_context_of_fla_and_the_edges_of_the_whole_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "agree", lambda *_: None)  # there are no others here
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
