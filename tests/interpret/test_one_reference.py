"""One decay reference per chunk is compared with halving in Triton's interpreter.

The decays are near the limit of 120 bits up to which one reference is used.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl

import flashlin
from flashlin.kernels.delta.reference import recurrence as recurrence_of_keys
from flashlin.kernels.dplr.reference import erasing, recurrence
from flashlin.kernels.gla import forward
from flashlin.kernels.tile_ops import chunk_of
from flashlin.ops._common import arguments
from tests import one_reference
from tests.share import WHOLE

CPU = torch.device("cpu")
# CI runs the first and the last row of a chunk of 32, the last row of its first half, and no span below the
# limit.
POSITIONS = range(32) if WHOLE else (0, 15, 31)
SPANS = one_reference.SPANS if WHOLE else one_reference.SPANS[1:]


@pytest.fixture
def halve(monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> Iterator[Callable[[bool], None]]:
    """Return a function that turns halving of every chunk on or off, for this test."""
    def force(halving: bool) -> None:
        monkeypatch.setattr(forward, "halving", halving)
        fresh()
    yield force


@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")  # of pairs that are not used
@pytest.mark.parametrize("op", one_reference.GATES)
@pytest.mark.alternate
def test_one_reference_loses_no_more_than_halving(op: str, halve: Callable[[bool], None]) -> None:
    assert one_reference.failures(op, CPU, torch.float32, halve, POSITIONS, 1, SPANS, K=16, V=16) == []


@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("op", one_reference.GATES)
@pytest.mark.alternate
def test_one_reference_is_taken(op: str, halve: Callable[[bool], None]) -> None:
    one_reference.check_taken(op, CPU, torch.float32, halve, 16)


@pytest.mark.parametrize("edges", [None, (0, 7, 7, 130, 140)], ids=["dense", "packed"])
@pytest.mark.parametrize(("op", "right", "rates"), [
    ("chunk_kda", recurrence_of_keys, {"beta": ()}), ("chunk_gdn2", erasing, {"b": (70,), "w": (16,)}),
    ("chunk_dplr_delta_rule", recurrence, {"a": (70,), "b": (70,)})])
@pytest.mark.alternate
def test_chunks_of_both_kinds_in_turn(op: str, right: Callable[..., tuple[torch.Tensor, torch.Tensor]],
                                      rates: dict[str, tuple[int, ...]], edges: tuple[int, ...] | None,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that fit one decay reference alternate with others, which the same program halves.

    Keys are in strips of channels, and the last strip is not full. In the packed call, some rows belong to no
    sequence. This can happen on a GPU, where the host does not check cu_seqlens.
    """
    monkeypatch.setattr(arguments, "check_cu_seqlens", lambda cu_seqlens, *_: cu_seqlens)
    monkeypatch.setattr(forward, "BUSY", 1)
    torch.manual_seed(0)
    B, T, H, K, V = (2 if edges is None else 1), 150, 2, 70, 16
    q, k, v = (torch.randn(B, T, H, D) for D in (K, K, V))
    g = torch.full((B, T, H, K), -0.01)
    g[:, 40:70, 1, 5:] = -9.0
    k = torch.nn.functional.normalize(k, dim=-1)
    inputs = {"q": q, "k": k, "v": v, "g": g,
              **{name: torch.rand(B, T, H, *more) for name, more in rates.items()}}
    if "a" in inputs:  # erased and written vectors need length 1, or the state would grow
        inputs["a"], inputs["b"] = -k, k * inputs["b"]
        inputs["gk"] = inputs.pop("g")
    bounds = None if edges is None else torch.tensor(edges)
    weight, found = torch.randn(B, T, H, V), []
    for run in (lambda **x: getattr(flashlin, op)(**x, scale=0.5, cu_seqlens=bounds)[0],
                lambda **x: right(**x, scale=0.5, bounds=bounds)[0]):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        o = run(**leaves)
        (o * weight).sum().backward()
        found.append({"o": o.detach(), **{name: x.grad for name, x in leaves.items()}})
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name].double(), expected.double(), rtol=1e-4, atol=1e-4, msg=name)


@triton.jit
def _find(slots, bounds, found, T, N, S, BT: tl.constexpr, VARLEN: tl.constexpr):
    own = tl.program_id(0)
    n, first, length, t0 = chunk_of(tl.load(slots + own), bounds, T, N, S, BT, VARLEN)
    tl.store(found + own * 3, n)
    tl.store(found + own * 3 + 1, first)
    tl.store(found + own * 3 + 2, tl.where(t0 < length, t0, -1))


@pytest.mark.parametrize("gap", [0, 37])
@pytest.mark.parametrize(("N", "longest"), [(1, 60), (2, 0), (256, 60), (300, 3), (300, 60), (70_000, 30)])
def test_each_chunk_of_many_packed_sequences_has_one_program(N: int, longest: int, gap: int) -> None:
    draw = torch.Generator().manual_seed(N + longest)
    lengths = torch.randint(0, longest + 1, (N,), generator=draw)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]) + gap
    T = int(bounds[-1]) + gap
    slots = torch.arange(T // 16 + N + 1)
    if len(slots) > 1000:
        slots = slots[torch.randint(len(slots), (300,), generator=draw)].sort().values
    found = torch.full((len(slots), 3), -2)
    _find[(len(slots),)](slots, bounds, found, T, N, 1, 16, True)
    chunks = {int(bounds[n]) // 16 + n + t0 // 16: (n, int(bounds[n]), t0)
              for n in range(N) for t0 in range(0, int(lengths[n]), 16)}
    wanted = [chunks[slot] for slot in slots.tolist() if slot in chunks]
    assert [tuple(row) for row in found.tolist() if row[2] >= 0] == wanted


@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")
@pytest.mark.alternate
def test_a_program_of_the_second_kernel_has_at_most_64_chunks(halve: Callable[[bool], None],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """``any_left`` reads the flags of 64 chunks, so more chunks need more programs."""
    monkeypatch.setattr(forward, "BUSY", 1)
    T = 66 * 32
    q, k, v = (torch.randn(1, T, 1, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    g = torch.full_like(q, -0.01)
    g[:, -32:] = -20.0  # only the last chunk of 32 tokens does not fit
    outputs = []
    for halving in (False, True):
        halve(halving)
        outputs.append(flashlin.chunk_gla(q, k, v, g)[0])
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
