"""A scan whose loads, products and stores overlap, in Gluon for Hopper, beside the planned one.

    python -m benchmarks.overlapping --out benchmarks/results

The scan of scalar decays (``kernels/simple_gla/forward.py``) at heads of 128, in bf16, dense, without states
in or out. Plain Triton waits for every product before the next one. Here one warp loads q, k and v of the
next chunks (TMA, a ring of STAGES), and four multiply: q k^T and q h run while w = e^{G_L - G} v is made, the
state's update runs beside (q k^T) v, and o is stored behind the next chunk. Nothing of flashlin starts it:
this decides whether something should.
"""
from __future__ import annotations

import sys
from typing import Any

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import flashlin
from benchmarks import sweep, timing
from benchmarks.calls import Shape, find
from matrix import record

D, BV, BT, ROUNDS = 128, 64, 64, 9
SHAPES = (Shape(4, 4096, 32, D), Shape(1, 8192, 32, D), Shape(16, 4096, 16, D))


@gluon.jit
def load(q, k, v, ring_q, ring_k, ring_v, full, empty, row0, col, vcol, chunks, STAGES: gl.constexpr):
    """The warp that loads."""
    for i in range(chunks):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 64 * 128 * 4 + 64 * 64 * 2)
        tma.async_copy_global_to_shared(q, [row0 + i * 64, col], bar, ring_q.index(slot))
        tma.async_copy_global_to_shared(k, [row0 + i * 64, col], bar, ring_k.index(slot))
        tma.async_copy_global_to_shared(v, [row0 + i * 64, vcol], bar, ring_v.index(slot))


@gluon.jit
def multiply(o, G, ring_q, ring_k, ring_v, s_h, s_w, s_o, full, empty, line, row0, vcol, chunks, scale,
             STAGES: gl.constexpr, GATED: gl.constexpr):
    """The four warps that multiply."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    h = gl.zeros([128, 64], gl.float32, layout)
    zero = gl.zeros([64, 64], gl.float32, layout)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    causal = rows[:, None] >= columns[None, :]
    for i in range(chunks):
        slot = i % STAGES
        s_h.store(h.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        b_k = ring_k.index(slot)
        scores = warpgroup_mma(ring_q.index(slot), b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        out = warpgroup_mma(ring_q.index(slot), s_h, zero, use_acc=False, is_async=True)
        if GATED:
            own = gl.load(G + line + i * 64 + rows)
            across = gl.load(G + line + i * 64 + columns)
            total = gl.load(G + line + i * 64 + 63)
            w = ring_v.index(slot).load(layout).to(gl.float32) * gl.exp2(total - own)[:, None]
            s_w.store(w.to(gl.bfloat16))
            decay = gl.exp2(gl.where(causal, own[:, None] - across[None, :], float("-inf"))) * scale
            h = h * gl.exp2(total)
            fence_async_shared()
            scores = warpgroup_mma_wait(1, [scores])
            weights = (scores * decay).to(gl.bfloat16)
            out = warpgroup_mma_wait(0, [out]) * (gl.exp2(own) * scale)[:, None]
            h = warpgroup_mma(b_k.permute((1, 0)), s_w, h, is_async=True)
            out = warpgroup_mma(gl.convert_layout(weights, left), ring_v.index(slot), out, is_async=True)
        else:
            h = warpgroup_mma(b_k.permute((1, 0)), ring_v.index(slot), h, is_async=True)
            scores = warpgroup_mma_wait(2, [scores])
            weights = gl.where(causal, scores * scale, 0.0).to(gl.bfloat16)
            out = warpgroup_mma_wait(1, [out]) * scale
            out = warpgroup_mma(gl.convert_layout(weights, left), ring_v.index(slot), out, is_async=True)
        out, h = warpgroup_mma_wait(0, [out, h])
        mbarrier.arrive(empty.index(slot), count=1)
        tma.store_wait(0)
        s_o.store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(o, [row0 + i * 64, vcol], s_o)
    tma.store_wait(0)


@gluon.jit
def scan(q, k, v, o, G, T, H, R, scale, STAGES: gl.constexpr, GATED: gl.constexpr, num_warps: gl.constexpr):
    """q, k, v, o: descriptors of [rows, H 128]. G: [H, R], summed in chunks of 64, to base 2. A program: 64
    columns of one head's state."""
    program = gl.program_id(0)
    own = program // 2
    i_h = own % H
    row0 = own // H * T
    ring_q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], q.layout)
    ring_k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], k.layout)
    ring_v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], v.layout)
    s_o = gl.allocate_shared_memory(gl.bfloat16, [64, 64], o.layout)
    s_w = gl.allocate_shared_memory(gl.bfloat16, [64, 64], v.layout)
    s_h = gl.allocate_shared_memory(gl.bfloat16, [128, 64], v.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    col = i_h * 128
    vcol = col + program % 2 * 64
    gl.warp_specialize(
        [(multiply, (o, G, ring_q, ring_k, ring_v, s_h, s_w, s_o, full, empty, i_h * R + row0, row0, vcol,
                     T // 64, scale, STAGES, GATED)),
         (load, (q, k, v, ring_q, ring_k, ring_v, full, empty, row0, col, vcol, T // 64, STAGES))],
        [1], [24])


def arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, G: torch.Tensor | None,
              scale: float) -> tuple[Any, ...]:
    """What scan takes before its constants, of tensors [B, T, H, 128]."""
    B, T, H = q.shape[:3]

    def described(x: torch.Tensor, wide: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([BT, wide], gl.bfloat16)
        return TensorDescriptor.from_tensor(x.view(B * T, H * D), [BT, wide], layout)
    return described(q, D), described(k, D), described(v, BV), described(o, BV), G, T, H, B * T, scale


def row(gated: bool, shape: Shape) -> dict[str, Any]:
    """Microseconds of both, by stages, and how far apart their outputs are."""
    op = find("chunk_simple_gla")._replace(arguments="q k v g" if gated else "q k v")
    start = sweep.captured(op, shape)["simple_gla_scan"]
    given = start.arguments
    right = given["o"].clone()
    calls: dict[str, Any] = {"planned": lambda: start.run(start.launch.num_warps, start.launch.num_stages)}
    found: dict[str, Any] = {"gated": gated, "shape": str(shape)}
    for stages in (2, 3):
        o = torch.full_like(right, float("nan"))
        values = arguments(given["q"], given["k"], given["v"], o, given["G"], given["scale"])
        options = {"STAGES": stages, "GATED": gated, "num_warps": 4}

        def run(values: Any = values, options: Any = options) -> None:
            scan[(shape.B * shape.H * D // BV,)](*values, **options)
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:
            found[f"gluon, {stages} stages"] = record.raised(error)
            continue
        distance = float((o.float() - right.float()).norm() / right.float().norm())
        found[f"gluon, {stages} stages, distance"] = float(f"{distance:.2g}")
        calls[f"gluon, {stages} stages"] = run
    for which, taken in timing.compared(calls, ROUNDS).items():
        found[which] = taken["failed"] if "failed" in taken else round(1e3 * taken["device_ms"]["median"], 1)
    return found


def main() -> int:
    given = record.parser(__doc__).parse_args()
    flashlin.settings(canary="off")
    rows = []
    for gated in (False, True):
        for shape in SHAPES:
            rows.append(row(gated, shape))
            print(rows[-1], flush=True)
            if given.out:
                record.write(given.out, "overlapping", record.this_card(), dtype="bfloat16", rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
