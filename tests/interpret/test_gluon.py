"""The Gluon kernels for Hopper, run on a CPU (``tests/gluon_on_cpu.py``), and faults that this finds."""
from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlin import kernels
from flashlin.compat.descriptors import Described, described
from flashlin.kernels.delta.backward import MUCH
from flashlin.kernels.delta.overlapping_inverse import delta_overlapped_inverse
from flashlin.kernels.gluon_ops import async_load, async_store, barrier, barriers
from tests import gluon_on_cpu
from tests.gluon_on_cpu import emulate, running
from tests.overlapped import channels, delta, far, mamba2, sequences

# One sequence of five chunks, so that scans use each slot of their rings again.
SMALL: dict[str, Any] = {"B": 1, "T": 320, "H": 1, "D": 64}
ONE: dict[str, Any] = {**SMALL, "HV": 1, "state": True}
CALLS: dict[str, tuple[str, Callable[..., list[torch.Tensor]]]] = {
    "simple_gla": ("simple_gla_overlapped", partial(
        sequences, "chunk_simple_gla", **SMALL, state=True, gated=True)),
    "retention, gradients": ("simple_gla_overlapped_back", partial(
        sequences, "chunk_retention", **SMALL, gradients=True)),
    "simple_gla, gradients": ("simple_gla_overlapped_back", partial(
        sequences, "chunk_simple_gla", **SMALL, state=True, gated=True, v_first=True, gradients=True)),
    "sums over heads": ("simple_gla_overlapped_shared", partial(mamba2, gradients=True, T=64, H=6, G=1)),
    "delta": ("delta_overlapped", partial(delta, **{**ONE, "HV": 2}, V=128, gated=False)),
    "delta, gradients": ("delta_overlapped_back", partial(delta, **ONE, v_first=True, gradients=True)),
    "delta of grouped heads, gradients": ("delta_overlapped_grads", partial(
        delta, **{**ONE, "HV": 2, "D": 128}, V=64, gradients=True)),
    "delta of segments": ("delta_overlapped_alone delta_overlapped_inverse", partial(
        delta, **{**ONE, "T": 1152, "HV": 2})),
    "packed delta, gradients": ("delta_overlapped_back", partial(
        delta, **{**ONE, "HV": 2}, edges=(0, 70, 70, 71, 200, 320), gradients=True)),
    "packed delta without gates": ("delta_overlapped", partial(
        delta, **{**ONE, "HV": 2}, V=128, edges=(0, 130, 256), gated=False)),
    "packed delta of segments, gradients": ("delta_overlapped_grads", partial(
        delta, **ONE, v_first=True, edges=(0, 390, 391, 600), gradients=True)),
    "KDA": ("dplr_overlapped", partial(channels, "chunk_kda", **{**ONE, "HV": 2}, V=128)),
    "KDA, gradients": ("dplr_overlapped_grads", partial(
        channels, "chunk_kda", **{**ONE, "D": 128}, v_first=True, gradients=True)),
    "KDA, as in its layer, gradients": ("dplr_overlapped_back", partial(
        channels, "chunk_kda", **ONE, layer=True, gradients=True)),
    "GDN2, gradients": ("dplr_overlapped_grads", partial(
        channels, "chunk_gdn2", **{**ONE, "D": 128}, gradients=True)),
    "RWKV-7": ("dplr_overlapped", partial(channels, "chunk_rwkv7", **ONE))}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.alternate
def test_results_are_right_in_random_orders(name: str, seed: int) -> None:
    """Compare with float64 for ``delta`` and ``channels``, and with plain kernels for the other ops."""
    kernel, call = CALLS[name]
    # A small GPU splits a sequence of few heads, and segments of few heads are enough for it.
    with running("H200,triton=3.6.0,sms=8" if "segments" in name else "H200,triton=3.6.0", seed) as names:
        ours = call(torch.device("cpu"))
    assert {*kernel.split()} <= {*names}
    right = call(torch.device("cpu"), **({"oracle": True} if call.func in (channels, delta) else {}))
    assert max(far(*pair) for pair in zip(ours, right, strict=True)) < 0.02


@pytest.mark.parametrize("facts", [{"B": 2, "v_first": True}, {"B": 2, "gated": False, "state": False}, {
    "HV": 2, "V": 128}], ids=["gated", "no gate", "groups"])
@pytest.mark.alternate
def test_two_sections_of_time_give_the_same_bits_as_one(facts: dict[str, Any]) -> None:
    found = []
    for much, starts in ((MUCH, 1), (0, 2)):
        with running() as names:
            found.append(delta(torch.device("cpu"), **{**ONE, "T": 256, **facts}, much=much, gradients=True))
        assert [names.count(name) for name in ("delta_overlapped_back", "delta_overlapped_grads")] == [1, starts]
    assert all(map(torch.equal, *found))


def test_every_gluon_kernel_has_a_call() -> None:
    modules = [import_module(f"flashlin.kernels.{path.parent.name}.{path.stem}")
               for path in Path(kernels.__path__[0]).glob("*/*.py") if "import gluon" in path.read_text()]
    found = {name for module in modules for name, one in vars(module).items() if isinstance(one, Described)}
    assert found == {kernel for kernels, _ in CALLS.values() for kernel in kernels.split()}


BT = gl.constexpr(16)


@gluon.jit
def load_rows(ring, x, full, empty, chunks, STAGES: gl.constexpr, FAULT: gl.constexpr):
    """Load all chunks of x into the ring, with the fault FAULT."""
    for i in range(chunks):
        if FAULT != "no wait for a slot":
            phase = (i // STAGES) & 1
            mbarrier.wait(empty.index(i % STAGES), phase + 2 if FAULT == "a wrong phase" else phase ^ 1)
        bar = full.index(i % STAGES)
        if FAULT != "bytes not expected":
            mbarrier.expect(bar, 2 * BT * BT * (2 if FAULT == "bytes that never come" else 1))
        async_load(x, [i * BT, 16 if FAULT == "a block outside" else 0], bar, ring.index(i % STAGES))
        if FAULT == "more bytes than expected":
            async_load(x, [i * BT, 0], bar, ring.index(i % STAGES))


@gluon.jit
def square_rows(ring, y, last, squares, full, empty, chunks, STAGES: gl.constexpr, FAULT: gl.constexpr):
    """Write the products of all chunks, with the fault FAULT."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    none = gl.zeros([BT, BT], gl.float32, layout)
    out = none
    for i in range(chunks):
        rows = ring.index(i % STAGES)
        if FAULT != "no wait for the bytes":
            mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
        square = warpgroup_mma(rows, rows.permute((1, 0)), none, use_acc=False, is_async=True)
        if FAULT == "a slot that is free too early":
            mbarrier.arrive(empty.index(i % STAGES), count=1)
        if FAULT != "no wait for a product":
            square = warpgroup_mma_wait(0, [square])
        out = square * 2.0
        if FAULT != "no wait for a store":
            tma.store_wait(0)
        squares.store(out.to(squares.dtype))
        if FAULT != "no fence":
            fence_async_shared()
        async_store(y, [i * BT, 0], squares)
        barrier()
        if FAULT != "a slot that is free too early":
            mbarrier.arrive(empty.index(i % STAGES), count=2 if FAULT == "too many arrivals" else 1)
    if FAULT != "no wait at the end":
        tma.store_wait(0)
    at = gl.arange(0, BT, gl.SliceLayout(1, layout))[:, None] * BT
    at += gl.arange(0, BT, gl.SliceLayout(0, layout))[None, :]
    if FAULT == "an address outside":
        at += 1
    gl.store(last + at, out)


@described(x=lambda x: (16, 16, 16), y=lambda x: (16, 16, 16))
@gluon.jit
def squares_of(x, y, last, rows, STAGES: gl.constexpr, FAULT: gl.constexpr):
    """Write 2 X X^T of each chunk X of 16 rows to y, and the float32 product of the last chunk to last.

    FAULT: the fault of the kernel, or "" for none.
    """
    ring = gl.allocate_shared_memory(x.dtype, [STAGES, BT, BT], x.layout)
    squares = gl.allocate_shared_memory(y.dtype, [BT, BT], y.layout)
    full, empty = barriers(STAGES, 1, 1)
    gl.warp_specialize([(square_rows, (ring, y, last, squares, full, empty, rows // BT, STAGES, FAULT)),
                        (load_rows, (ring, x, full, empty, rows // BT, STAGES, FAULT))], [1], [40])


def squared(fault: str, seed: int) -> bool:
    """Return True if the kernel with this fault gives the right results."""
    x = torch.randint(-3, 4, (640, 16), generator=torch.Generator().manual_seed(0)).bfloat16()
    y, last = torch.zeros_like(x), torch.zeros(16, 16)
    emulate(squares_of, 1, dict(x=x, y=y, last=last, rows=640, STAGES=3, FAULT=fault), seed)
    parts = x.float().view(40, 16, 16)
    right = 2 * parts @ parts.mT
    return torch.equal(y.float().view(40, 16, 16), right.bfloat16().float()) and torch.equal(last, right[-1])


ERRORS: dict[str, tuple[type[Exception], str]] = {
    "bytes that never come": (TimeoutError, "is not complete"),
    "more bytes than expected": (RuntimeError, "fewer bytes|not expect"),
    "bytes not expected": (RuntimeError, "not expect"), "a wrong phase": (ValueError, "got 2, need 0 or 1"),
    "a block outside": (IndexError, "a block at 0, 16"),
    "no wait for a product": (TypeError, "unsupported operand"),
    "no fence": (RuntimeError, "without a fence"),
    "too many arrivals": (RuntimeError, "too many arrivals"),
    "no wait at the end": (RuntimeError, "without waiting"),
    "an address outside": (IndexError, "an address outside")}


@pytest.mark.parametrize("seed", range(4))
def test_a_right_kernel_gives_the_same_in_random_orders(seed: int) -> None:
    assert squared("", seed)


@pytest.mark.parametrize("fault", ERRORS)
def test_these_faults_are_errors(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, text = ERRORS[fault]
    if kind is TimeoutError:
        monkeypatch.setattr(gluon_on_cpu, "SECONDS", 0.2)
    with pytest.raises(kind, match=text):
        squared(fault, 0)


@pytest.mark.parametrize("fault", ["a slot that is free too early", "no wait for a store"])
def test_these_faults_give_wrong_results(fault: str) -> None:
    assert not all(squared(fault, seed) for seed in range(6))


@pytest.mark.parametrize("fault", ["no wait for a slot", "no wait for the bytes"])
def test_these_faults_give_wrong_results_or_errors(fault: str) -> None:
    try:
        assert not all(squared(fault, seed) for seed in range(6))
    except RuntimeError as error:
        assert "too many arrivals" in str(error) or "not expect" in str(error)


def test_memory_that_another_thread_wrote_needs_a_fence_of_that_thread() -> None:
    gluon_on_cpu._begin(gluon_on_cpu.Program(0), 0)
    part = gluon_on_cpu.Shared(torch.zeros(16, 16, dtype=torch.bfloat16))
    other = threading.Thread(target=writes, args=(part, gluon_on_cpu._own.program))
    other.start()
    other.join()
    gluon_on_cpu.fence()  # of this thread
    with pytest.raises(RuntimeError, match="without a fence"):
        gluon_on_cpu.warpgroup_mma(torch.zeros(16, 16, dtype=torch.bfloat16), part, torch.zeros(16, 16))


def writes(part: gluon_on_cpu.Shared, program: gluon_on_cpu.Program) -> None:
    gluon_on_cpu._begin(program, 1)
    part.store(torch.zeros(16, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["random", "alike", "forgetting", "no gate"])
def test_inverses_of_chunks(kind: str) -> None:
    """The inverses agree with float64, even if keys resemble each other or gates forget everything."""
    draw = torch.Generator().manual_seed(0)
    rows, H, HV, K = 128, 2, 4, 64
    k = torch.randn(rows, H, K, generator=draw)
    if kind == "alike":
        k = 0.05 * k + torch.randn(K, generator=draw)
    k, beta = F.normalize(k, dim=-1).bfloat16(), torch.rand(rows, HV, generator=draw) + 0.5
    g = -torch.rand(HV, rows, generator=draw) * {"alike": 0.01, "forgetting": 126.0}.get(kind, 1.0)
    G = g.view(HV, 2, 64).cumsum(-1).view(HV, rows)
    A, A_low = (torch.full((rows, HV, 64), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    gated, kk = kind != "no gate", torch.full((H, rows), torch.nan)
    emulate(delta_overlapped_inverse, 2 * HV, dict(
        k=k, betas=beta.T.contiguous(), G=G if gated else None, A=A, A_low=A_low, kk=kk, H=H, HV=HV, shared=2,
        T=rows, N=1, R=rows, rows=rows, BT=64, BK=K, REGISTERS=0, DECAY=2 * gated))
    torch.testing.assert_close(kk, k.float().square().sum(-1).T)
    for head in range(HV):
        for chunk in (slice(0, 64), slice(64, 128)):
            keys, sums = k[chunk, head // 2].double(), G[head, chunk].double()
            M = beta[chunk, head].double()[:, None] * (keys @ keys.T)
            if gated:
                M = M * (sums[:, None] - sums[None, :]).clamp(max=0).exp2()
            right = torch.linalg.inv(torch.eye(64).double() + M.tril(-1))
            found = A[chunk, head].double() + A_low[chunk, head].double()
            assert (found - right).abs().max() < 2.0**(-12 if kind == "alike" else -14) * right.abs().max()
            assert torch.equal(found.triu(1), torch.zeros(64, 64).double())
