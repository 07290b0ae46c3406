"""Backward of the cross entropy.

The symbols x, L, s, c, e, a and V are defined in forward.py. Let p = e^(x - L), and 1[target] be a row with 1
at the target and 0 elsewhere. Then:

    dlogits = dloss (p (1 + 2 a L) - (1 - e) 1[target] - e / V) (1 - tanh^2(s logits / c)) s

The gradient is zero for rows that do not count. Without a softcap c, the factor with tanh is 1. A program
computes BT rows and BV columns. It reads its elements before it writes them, and no other program reads them,
so dlogits may share the memory of logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start_planned
from flashlin.guards.plan_types import Plan
from flashlin.kernels.cross_entropy.forward import tanh, targets_of


@triton.jit(do_not_specialize=["rows", "scale", "cap", "smoothing", "squares", "ignore_index"])
def cross_entropy_backward(
    logits,  # [rows, V]
    target, lse, dloss,  # [rows]
    dlogits,  # [rows, V]
    stride,  # elements from one row of logits to the next
    dstride,  # elements from one row of dlogits to the next
    rows,
    scale,  # s, scale of the logits
    cap,  # c, softcap
    smoothing,  # e, label smoothing
    squares,  # a, weight of L^2
    ignore_index,  # target of rows that do not count
    V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, CAPPED: tl.constexpr,
):
    """Compute dlogits [rows, V], the gradient of the logits; a program computes BT rows and BV columns."""
    STRIPS: tl.constexpr = (V + BV - 1) // BV
    first = (tl.program_id(0) // STRIPS).to(tl.int64) * BT
    row = tl.arange(0, BT)
    col = tl.program_id(0) % STRIPS * BV + tl.arange(0, BV)
    inside = first + row < rows
    t, counts = targets_of(target, first, rows, ignore_index, V, BT)
    level = tl.load(lse + first + row, mask=inside, other=0.0)
    factor = tl.load(dloss + first + row, mask=inside, other=0.0) * scale
    there = inside[:, None] & (col < V)[None, :]
    x = tl.load(logits + first * stride + (row[:, None] * stride + col[None, :]), mask=there,
                other=0.0).to(tl.float32) * scale
    if CAPPED:
        th = tanh(x / cap)
        x = cap * th
    d = tl.exp(x - level[:, None]) * (1 + 2 * squares * level)[:, None] - smoothing / V
    d -= tl.where(t[:, None] == col[None, :], 1 - smoothing, 0.0)
    if CAPPED:
        d *= 1 - th * th
    d = tl.where(counts[:, None], d * factor[:, None], 0.0)
    tl.store(dlogits + first * dstride + (row[:, None] * dstride + col[None, :]),
             d.to(dlogits.dtype.element_ty), mask=there)


def launch_backward(plan: Plan, logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, scale: float,
                    cap: float | None, smoothing: float, squares: float, ignore_index: int,
                    in_place: bool) -> Tensor:
    """Launch the backward kernel of the cross entropy; return dlogits [N, V] in the dtype of logits.

    lse, dloss: [N] in fp32, contiguous: the log-sum-exp of each row, and the gradient of its loss.
    in_place: True to overwrite logits with dlogits.

    The other arguments are described in launch_forward.
    """
    N, V = logits.shape
    dlogits = logits if in_place else torch.empty((N, V), dtype=logits.dtype, device=logits.device)
    if N:
        start_planned(plan, cross_entropy_backward, dict(
            logits=logits, target=target, lse=lse, dloss=dloss, dlogits=dlogits,
            stride=logits.stride(0), dstride=dlogits.stride(0), rows=N, scale=scale,
            cap=cap or 1.0, smoothing=smoothing, squares=squares, ignore_index=ignore_index,
            V=V, CAPPED=cap is not None))
    return dlogits
