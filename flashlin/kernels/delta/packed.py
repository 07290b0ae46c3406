"""Packed sequences for the Gluon kernels of the delta families, which compute whole chunks only.

A sequence has whole chunks and, unless its length is a multiple of a chunk, a tail of fewer tokens. The Gluon
kernels compute the whole chunks where they are. The tails are copied into a dense batch of one chunk for each
sequence, padded with zeros. A padded token writes nothing and keeps the state, because its k, beta and g are
zero. This batch is a call of its own, whose initial states are the states after the whole chunks. Its results
are copied back.

The host reads no lengths. ``whole_chunks`` lists the whole chunks on the GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlin.compat.launch import start
from flashlin.guards.plan_types import Plan
from flashlin.kernels.tile_ops import zero_gaps


@triton.jit(do_not_specialize=["N", "chunks", "steps"])
def whole_chunks(bounds, rows, N, chunks, steps, BT: tl.constexpr, BC: tl.constexpr):
    """Write the first row of each whole chunk to rows, and -1 to the other entries.

    Chunk j of sequence n has the entry bounds[n] // BT + j. Entries of different sequences never overlap, and
    a sequence without whole chunks has none.

    bounds: [N + 1].
    rows: [chunks], int32.
    steps: at least log2(N) + 1, the steps of a binary search for the sequence of an entry.
    """
    own = tl.program_id(0) * BC + tl.arange(0, BC)
    low = tl.zeros([BC], dtype=tl.int32)
    high = low + N
    for _ in range(steps):
        middle = (low + high) // 2
        begun = tl.load(bounds + middle) // BT <= own
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    first = tl.load(bounds + low).to(tl.int32)
    chunk = own - first // BT
    whole = (tl.load(bounds + low + 1).to(tl.int32) - first) // BT
    tl.store(rows + own, tl.where((chunk >= 0) & (chunk < whole), first + chunk * BT, -1), mask=own < chunks)


@triton.jit(do_not_specialize=["T", "N"])
def copy_tails(x, y, bounds, T, N, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BACK: tl.constexpr):
    """Copy the tails of packed sequences from x to y, with zeros behind them, or back.

    With BACK, also write zeros into the rows of x that belong to no sequence. One program copies BC columns
    of one tail.

    x: [rows, W].
    y: [N, BT, W].
    bounds: [N + 1].
    T: number of rows of x.
    """
    STRIPS: tl.constexpr = (W + BC - 1) // BC
    program = tl.program_id(0)
    c0 = program % STRIPS * BC
    n = program // STRIPS
    first, after = tl.load(bounds + n).to(tl.int64), tl.load(bounds + n + 1).to(tl.int64)
    tail = (after - first) % BT
    rows, columns = tl.arange(0, BT)[:, None], c0 + tl.arange(0, BC)[None, :]
    inside = columns < W
    at = x + (after - tail + rows) * W + columns
    to = y + (n.to(tl.int64) * BT + rows) * W + columns
    if BACK:
        zero_gaps(x, bounds, n, T, N, 0, 1, D=W, d0=c0, BT=BT, BD=BC)
        tl.store(at, tl.load(to, mask=inside & (rows < tail), other=0.0), mask=inside & (rows < tail))
    else:
        tl.store(to, tl.load(at, mask=inside & (rows < tail), other=0.0), mask=inside)


def _copy(plan: Plan, x: torch.Tensor, y: torch.Tensor, bounds: torch.Tensor, back: bool) -> None:
    """Launch ``copy_tails`` for x [1, T, ...] and y [N, BT, ...]."""
    N, T = y.shape[0], x.shape[1]
    W = x[0, 0].numel()
    launch = plan.launch("copy_tails")
    start(launch, copy_tails, N * -(-W // launch.block("BC")), dict(
        x=x, y=y, bounds=bounds, T=T, N=N, W=W, BACK=back))


def tails_of(plan: Plan, x: Any, *names: str, **more: torch.Tensor) -> dict[str, Any]:
    """Return the tails of tensors [1, T, ...] by name, as dense tensors [N, BT, ...].

    x: the inputs of a packed call. names: fields of x. more: further tensors with one row for each token.
    """
    bounds, made = x.bounds, dict[str, Any]()
    BT = plan.launch("copy_tails").block("BT")
    for name, one in {**{name: getattr(x, name) for name in names}, **more}.items():
        made[name] = None
        if one is not None:
            y = made[name] = one.new_empty(bounds.shape[0] - 1, BT, *one.shape[2:])
            _copy(plan, one, y, bounds, False)
    return made


def put_tails(plan: Plan, x: torch.Tensor, y: torch.Tensor, bounds: torch.Tensor) -> None:
    """Copy tails y [N, BT, ...] into the rows of x [1, T, ...], and zero the rows of no sequence."""
    _copy(plan, x, y, bounds, True)


def chunk_rows(plan: Plan, bounds: torch.Tensor, T: int) -> torch.Tensor:
    """Return the first rows of the whole chunks, see ``whole_chunks``."""
    launch = plan.launch("whole_chunks")
    chunks, N = T // launch.block("BT"), bounds.shape[0] - 1
    rows = torch.empty(chunks, dtype=torch.int32, device=bounds.device)
    start(launch, whole_chunks, -(-chunks // launch.block("BC")), dict(
        bounds=bounds, rows=rows, N=N, chunks=chunks, steps=N.bit_length() + 1))
    return rows
