"""Rotary embeddings.

The tests cover gradients, views, in-place calls, the tables of the module, exact error texts, torch.compile
and the planned launches.
"""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlin
from flashlin.compat.target import parse
from flashlin.dispatch import plan
from flashlin.guards.plan_types import Problem
from flashlin.kernels.rotary.recipe import strips
from flashlin.testing.cases.rotary import CASES
from flashlin.testing.compare import Case, check

CPU = torch.device("cpu")
H200 = parse("triton=3.6.0,sm=90")


pytestmark = pytest.mark.usefixtures("torch_path")


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape,
                       generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_(grad)


def tables(TR: int, R: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(TR, R, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_path_is_the_reference_in_float64(case: Case) -> None:
    assert all(verdict.ok for verdict in check(case, CPU, torch.float64))


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_those_of_differences(interleaved: bool) -> None:
    x = randn(1, 5, 2, 7, dtype=torch.float64, grad=True)
    bounds, offsets = torch.tensor([0, 2, 5]), torch.tensor([3, -1])
    assert torch.autograd.gradcheck(lambda x: flashlin.rotary_embedding(x, *tables(9, 3, torch.float64),
                                                                        interleaved, False, offsets, bounds),
                                    (x,))


def test_in_place_is_in_place_and_autograd_knows() -> None:
    leaf = randn(2, 5, 3, 8, grad=True)
    x = leaf * 2
    y = flashlin.rotary_embedding(x, *tables(9, 4), inplace=True)
    assert y is x
    expected = flashlin.rotary_embedding(leaf * 2, *tables(9, 4))
    torch.testing.assert_close(y, expected)
    dy = torch.randn(2, 5, 3, 8)
    kept = dy.clone()
    torch.testing.assert_close(*(torch.autograd.grad(z, leaf, dy)[0] for z in (y, expected)))
    assert torch.equal(dy, kept)
    for of_a_leaf in (leaf, leaf[:1], leaf.mT.mT):
        with pytest.raises(ValueError,
                           match="inplace: got True with an x that requires a gradient and is a leaf, or a "
                                 "view of one; need False"):
            flashlin.rotary_embedding(of_a_leaf, *tables(9, 4), inplace=True)
    with torch.no_grad():
        assert flashlin.rotary_embedding(leaf, *tables(9, 4), inplace=True) is leaf


def test_places_past_the_tables_are_named_where_they_can_be() -> None:
    x, table = randn(2, 5, 1, 4), tables(9, 2)
    text = r"cos: got 9 rows, need at least 10, because seqlen_offsets and the length of x reach position 9"
    for offsets in (5, torch.tensor([0, 5])):
        with pytest.raises(ValueError, match=text):
            flashlin.rotary_embedding(x, *table, seqlen_offsets=offsets)
    flashlin.rotary_embedding(x, *table, seqlen_offsets=torch.tensor([4, -7]))
    packed = randn(1, 20, 1, 4)  # 20 rows exceed the tables, but each sequence fits
    flashlin.rotary_embedding(packed, *table, cu_seqlens=torch.tensor([0, 9, 11, 20]))
    with pytest.raises(ValueError, match=r"cos: got 9 rows, need at least 11"):
        flashlin.rotary_embedding(packed, *table, cu_seqlens=torch.tensor([0, 9, 20]))


X, COS = torch.zeros(2, 3, 4, 8), torch.zeros(9, 4)
rotary = flashlin.rotary_embedding


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: rotary([1.0], COS, COS), TypeError, "x: got list, need a tensor of shape [B, T, H, D]"),
    (lambda: rotary(X[0], COS, COS), ValueError,
     "x: got shape [3, 4, 8], need [B, T, H, D] with D of at least 1"),
    (lambda: rotary(X, COS[0], COS), ValueError, "cos: got shape [4], need [TR, R] with R of at least 1"),
    (lambda: rotary(X, COS, None), TypeError, "sin: got NoneType, need a tensor of shape [TR, R]"),
    (lambda: rotary(X, COS, COS[1:]), ValueError, "sin: got shape [8, 4], need [9, 4], as cos"),
    (lambda: rotary(X, COS.int(), COS), TypeError,
     "cos: got dtype torch.int32, need bfloat16, float16, float32 or float64"),
    (lambda: rotary(X, COS.to("meta"), COS), ValueError, "cos: got device meta, need cpu, where x is"),
    (lambda: rotary(X[..., :7], COS, COS), ValueError,
     "cos: got R = 4 pairs, need at most 3, half of x's D = 7"),
    (lambda: rotary(X, COS, COS, seqlen_offsets=1.0), TypeError,
     "seqlen_offsets: got float, need an int, or an int32 or int64 tensor of shape [N]"),
    (lambda: rotary(X, COS, COS, seqlen_offsets=COS[0, :2]), TypeError,
     "seqlen_offsets: got torch.float32, need an int32 or int64 tensor of shape [N]"),
    (lambda: rotary(X, COS, COS, seqlen_offsets=torch.tensor([1, 2, 3])), ValueError,
     "seqlen_offsets: got shape [3], need [N] = [2]"),
    (lambda: rotary(X[:1], COS, COS, cu_seqlens=torch.tensor([0, 2])), ValueError,
     "cu_seqlens: got a last value of 2, need T = 3: sequences must cover the packed tensor"),
    (lambda: flashlin.RotaryEmbedding(7), ValueError, "dim: got 7, need an even number of at least 2"),
    (lambda: flashlin.RotaryEmbedding(8)(X, X[..., :4]), ValueError,
     "k: got shape [2, 3, 4, 4], need [B, T, H, D] with D of at least dim = 8"),
    (lambda: flashlin.RotaryEmbedding(8)(X, X, torch.tensor([1, 2])), ValueError,
     "max_seqlen: got None with a tensor as seqlen_offset, need the number of positions that may occur, in "
     "the first call"),
])
def test_wrong_arguments_are_named(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


# The module

def by_hand(x: torch.Tensor, dim: int, places: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Return x with each pair of channels rotated as a complex number."""
    turn = places.double()[:, None] / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    pairs = torch.complex(x[..., :dim // 2].double(),
                          x[..., dim // 2:dim].double()) * torch.polar(torch.ones_like(turn), turn)[:, None]
    return torch.cat([pairs.real, pairs.imag, x[..., dim:].double()], -1)


def test_the_module_turns_by_place_and_frequency() -> None:
    module = flashlin.RotaryEmbedding(8, base=500.0)
    q, k = randn(2, 9, 3, 10), randn(2, 9, 1, 8)
    for offset in (0, 3, 1000):
        for got, x in zip(module(q, k, offset), (q, k), strict=True):
            torch.testing.assert_close(got.double(), by_hand(x, 8, torch.arange(9) + offset, 500.0),
                                       rtol=1e-4, atol=1e-4)
    for got, x in zip(module(q, k, torch.tensor([4, 2])), (q, k), strict=True):
        torch.testing.assert_close(got[1].double(), by_hand(x[1], 8, torch.arange(9) + 2, 500.0), rtol=1e-4,
                                   atol=1e-4)
    assert list(module.state_dict()) == [] and {name for name, _ in module.named_buffers()} == {"inv_freq"}
    assert repr(module) == "RotaryEmbedding(dim=8, base=500.0, interleaved=False, pos_idx_in_fp32=True)"


def test_packed_sequences_each_begin_at_place_0() -> None:
    module = flashlin.RotaryEmbedding(8)
    q, k = randn(1, 9, 3, 8), randn(1, 9, 1, 8)
    found = module(q, k, cu_seqlens=torch.tensor([0, 4, 9]), max_seqlen=5)
    for got, x in zip(found, (q, k), strict=True):
        torch.testing.assert_close(got.double(), by_hand(x, 8, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])),
                                   rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [7, 8, 700])
def test_xpos_scores_depend_on_the_distance_only_also_after_the_tables_have_grown(length: int) -> None:
    module = flashlin.RotaryEmbedding(8, scale_base=32.0)
    q, k = randn(1, 1, 1, 8).expand(1, 7, 1, 8), randn(1, 1, 1, 8).expand(1, 7, 1, 8)
    one, two = module(q, k)
    near = (one[0, 6, 0] * two[0, 2, 0]).sum()
    torch.testing.assert_close((one[0, 4, 0] * two[0, 0, 0]).sum(), near)
    later, _ = module(q[:, :1], k[:, :1], length - 1)  # a later query for an earlier, cached key
    kept = two[0, 6, 0]
    fresh_q, fresh_k = flashlin.RotaryEmbedding(8, scale_base=32.0)(q[:, :1].expand(1, length, 1, 8),
                                                                    k[:, :1].expand(1, length, 1, 8))
    torch.testing.assert_close((later[0, 0, 0] * kept).sum(), (fresh_q[0, -1, 0] * fresh_k[0, 6, 0]).sum(),
                               rtol=1e-4, atol=1e-6)
    # position 3 is the center of seven, where the scale is 1
    middle, _ = flashlin.RotaryEmbedding(8, scale_base=32.0)(q, k)
    torch.testing.assert_close(middle[0, 3, 0].norm(), q[0, 3, 0].norm())


def test_tables_are_kept_and_never_stale() -> None:
    module = flashlin.RotaryEmbedding(8)
    q = randn(1, 5, 1, 8)
    module(q, q)
    first = module._tables
    module(q.bfloat16(), q.bfloat16(), max_seqlen=8)
    assert module._tables is first, "eight rows were made, in float32"
    module(q, q, 4)
    assert module._tables is not first and len(module._tables.q[0]) == 16
    assert copy.deepcopy(module)(q, q)[0].equal(module(q, q)[0])
    for changed in (lambda: module.inv_freq.mul_(0.5),
                    lambda: setattr(module, "inv_freq", module.inv_freq * 0.5)):
        before = module(q, q)[0]
        changed()
        assert not module(q, q)[0].equal(before)
    module.reset_parameters()
    torch.testing.assert_close(module(q, q)[0].double(), by_hand(q, 8, torch.arange(5)), rtol=1e-5, atol=1e-5)
    module.bfloat16()
    torch.testing.assert_close(module(q, q)[0].double(), by_hand(q, 8, torch.arange(5)), rtol=1e-5, atol=1e-5)
    assert module(q.double(), q.double())[0].dtype == torch.float64
    coarse = flashlin.RotaryEmbedding(8, pos_idx_in_fp32=False).bfloat16()
    one = q[:, :1]
    assert coarse(one, one, 300)[0].equal(coarse(one, one,
                                                 301)[0]), "places that bfloat16 does not tell apart"


def test_tables_made_in_inference_mode_serve_training() -> None:
    module, q = flashlin.RotaryEmbedding(8), randn(1, 5, 1, 8, grad=True)
    with torch.inference_mode():
        module(q, q)
    module(q, q)[0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("scale_base", [None, 32.0])
def test_compiles_to_one_graph_for_all_lengths(scale_base: float | None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend
    graphs = CompileCounterWithBackend("aot_eager")
    module = flashlin.RotaryEmbedding(8, scale_base=scale_base)
    module._centre = 3
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for T in (5, 9, 12, 33):
        q, k = randn(2, T, 2, 8), randn(2, T, 1, 8)
        for got, wanted in zip(compiled(q, k), module(q, k), strict=True):
            torch.testing.assert_close(got, wanted)
    assert graphs.frame_count <= 2


# Planned launches

@pytest.mark.parametrize("T", [0, 1, 100, 10**6])
@pytest.mark.parametrize(("H", "D", "R"),
                         [(1, 2, 1), (32, 128, 64), (7, 100, 13), (64, 256, 128), (2, 1300, 600),
                          (70000, 64, 32)])
def test_no_size_needs_a_remedy_and_programs_cover_it(H: int, D: int, R: int, T: int) -> None:
    planned = plan(Problem("rotary_embedding", "rotary", "", 1, T, H, D, R, 1, "bfloat16", True, True), H200)
    assert planned.path == "triton" and not planned.steps and not planned.refused
    launch, = planned.launches
    turned, copied = strips(D, R, launch.block("BR"))
    assert turned * launch.block("BR") >= R and copied * 2 * launch.block("BR") >= D - 2 * R
    assert launch.grid[0] == -(-T * H // launch.block("BT")) * (turned + copied)
