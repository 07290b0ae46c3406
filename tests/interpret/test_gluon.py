"""The Gluon kernels for Hopper, run on a CPU (``tests/gluon_on_cpu.py``)."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlin.compat.descriptors import described
from flashlin.kernels.gluon_ops import async_load, async_store, barrier, barriers
from tests import gluon_on_cpu
from tests.gluon_on_cpu import emulate, running
from tests.overlapped import channels, delta, far, mamba2, sequences

# One sequence of five chunks, more than the ring of any kernel has slots.
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
    "KDA": ("dplr_overlapped", partial(channels, "chunk_kda", **{**ONE, "HV": 2}, V=128)),
    "KDA, gradients": ("dplr_overlapped_grads", partial(
        channels, "chunk_kda", **ONE, v_first=True, gradients=True)),
    "KDA, as in its layer, gradients": ("dplr_overlapped_back", partial(
        channels, "chunk_kda", **ONE, layer=True, gradients=True)),
    "GDN2, gradients": ("dplr_overlapped_grads", partial(channels, "chunk_gdn2", **ONE, gradients=True)),
    "RWKV-7": ("dplr_overlapped", partial(channels, "chunk_rwkv7", **ONE))}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_oracle(name: str) -> None:
    kernel, call = CALLS[name]
    with running() as names:
        ours = call(torch.device("cpu"))
    assert kernel in names
    right = call(torch.device("cpu"), **({"oracle": True} if call.func in (channels, delta) else {}))
    assert max(map(far, ours, right)) < 0.02


BT = gl.constexpr(16)


@gluon.jit
def load_rows(ring, x, full, empty, chunks, STAGES: gl.constexpr, FAULT: gl.constexpr):
    for i in range(chunks):
        if FAULT != "no wait for a slot":
            mbarrier.wait(empty.index(i % STAGES), ((i // STAGES) & 1) ^ 1)
        bar = full.index(i % STAGES)
        if FAULT != "bytes not expected":
            mbarrier.expect(bar, 2 * BT * BT * (2 if FAULT == "bytes that never come" else 1))
        async_load(x, [i * BT, 16 if FAULT == "a block outside" else 0], bar, ring.index(i % STAGES))


@gluon.jit
def square_rows(ring, y, last, squares, full, empty, chunks, STAGES: gl.constexpr, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    none = gl.zeros([BT, BT], gl.float32, layout)
    out = none
    for i in range(chunks):
        rows = ring.index(i % STAGES)
        if FAULT != "no wait for the bytes":
            mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
        square = warpgroup_mma(rows, rows.permute((1, 0)), none, use_acc=False, is_async=True)
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
        mbarrier.arrive(empty.index(i % STAGES), count=2 if FAULT == "too many arrivals" else 1)
    if FAULT != "no wait at the end" and FAULT != "no wait for a store":
        tma.store_wait(0)
    at = gl.arange(0, BT, gl.SliceLayout(1, layout))[:, None] * BT
    at += gl.arange(0, BT, gl.SliceLayout(0, layout))[None, :]
    if FAULT == "an address outside":
        at += 1
    gl.store(last + at, out)


@described(x=lambda x: (16, 16, 16), y=lambda x: (16, 16, 16))
@gluon.jit
def squares_of(x, y, last, rows, STAGES: gl.constexpr, FAULT: gl.constexpr):
    """Write 2 X X^T of each chunk X of 16 rows to y, and that of the last chunk to last."""
    ring = gl.allocate_shared_memory(x.dtype, [STAGES, BT, BT], x.layout)
    squares = gl.allocate_shared_memory(y.dtype, [BT, BT], y.layout)
    full, empty = barriers(STAGES, 1, 1)
    gl.warp_specialize([(square_rows, (ring, y, last, squares, full, empty, rows // BT, STAGES, FAULT)),
                        (load_rows, (ring, x, full, empty, rows // BT, STAGES, FAULT))], [1], [40])


def squared(fault: str, seed: int) -> bool:
    """Return True if the kernel with this fault gives the right results."""
    x = torch.randn(160, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    y, last = torch.zeros_like(x), torch.zeros(16, 16)
    emulate(squares_of, 1, dict(x=x, y=y, last=last, rows=160, STAGES=3, FAULT=fault), seed)
    parts = x.float().view(10, 16, 16)
    right = 2 * parts @ parts.mT
    return torch.equal(y.float().view(10, 16, 16), right.bfloat16().float()) and torch.equal(last, right[-1])


FAULTS: dict[str, tuple[type[Exception], str]] = {
    "bytes that never come": (TimeoutError, "no thread completes"),
    "bytes not expected": (RuntimeError, "not expect"), "a block outside": (IndexError, "a block at 0, 16"),
    "no wait for a product": (TypeError, "unsupported operand"),
    "no fence": (RuntimeError, "without a fence"),
    "too many arrivals": (RuntimeError, "too many arrivals"),
    "no wait at the end": (RuntimeError, "without waiting"),
    "an address outside": (IndexError, "an address outside")}


@pytest.mark.parametrize("seed", range(4))
def test_a_right_kernel_gives_the_same_in_every_order(seed: int) -> None:
    assert squared("", seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_these_faults_are_errors(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_on_cpu, "SECONDS", 0.2)
    kind, text = FAULTS[fault]
    with pytest.raises(kind, match=text):
        squared(fault, 0)


@pytest.mark.parametrize("fault", ["no wait for a slot", "no wait for the bytes", "no wait for a store"])
def test_these_faults_change_results_or_are_errors(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_on_cpu, "SECONDS", 0.2)
    for seed in range(8):
        try:
            if not squared(fault, seed):
                return
        except (RuntimeError, TimeoutError):
            return
    pytest.fail("the fault was not seen")
