"""Forward of the cross entropy.

Let x = c tanh(s logits / c), or x = s logits without a softcap c. Let L be log sum e^x over the V columns of
a row. Then:

    loss = L - (1 - e) x_target - e mean(x) + a L^2
    z_loss = a L^2

Here s is the scale, e the label smoothing, and a the weight of L^2. The loss is 0 for rows that do not count:
their target is ignore_index, or is not a column. A program computes BT rows. It reads their columns in blocks
of BV, with a running maximum and a running sum (Milakov and Gimelshein 2018).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashlin.compat.launch import start_planned
from flashlin.guards.plan_types import Plan


@triton.jit
def targets_of(target, first, rows, ignore_index, V: tl.constexpr, BT: tl.constexpr):
    """Return the targets of BT rows, and True for each row that counts; both are [BT].

    A row counts if its target is one of the V columns and not ignore_index. Other targets must not be used as
    an index, because they may be out of range.
    """
    row = tl.arange(0, BT)
    t = tl.load(target + first + row, mask=first + row < rows, other=-1).to(tl.int64)
    return t, (t >= 0) & (t < V) & (t != ignore_index)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of x, computed from a sigmoid."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def shaped(logits, scale, cap, CAPPED: tl.constexpr):
    """Return the scaled logits in fp32, limited to +-cap by tanh if CAPPED."""
    x = logits.to(tl.float32) * scale
    if CAPPED:
        x = cap * tanh(x / cap)
    return x


@triton.jit(do_not_specialize=["rows", "scale", "cap", "smoothing", "squares", "ignore_index"])
def cross_entropy_forward(
    logits,  # [rows, V]
    target, loss, z_loss, lse,  # [rows]
    stride,  # elements from one row of logits to the next
    rows,
    scale,  # s, scale of the logits
    cap,  # c, softcap
    smoothing,  # e, label smoothing
    squares,  # a, weight of L^2
    ignore_index,  # target of rows that do not count
    V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
):
    """Compute loss, z_loss and lse (the log-sum-exp L), each [rows] in fp32.

    A program computes BT rows, and reads BV columns of them at a time.
    """
    first = tl.program_id(0).to(tl.int64) * BT
    row = tl.arange(0, BT)
    inside = first + row < rows
    base = logits + first * stride
    highest = tl.full([BT], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BT], dtype=tl.float32)
    plain = tl.zeros([BT], dtype=tl.float32)
    for v0 in range(0, V, BV):
        col = v0 + tl.arange(0, BV)
        there = inside[:, None] & (col < V)[None, :]
        x = shaped(tl.load(base + (row[:, None] * stride + col[None, :]), mask=there, other=0.0), scale, cap,
                   CAPPED)
        if SMOOTHED:
            plain += tl.sum(tl.where(there, x, 0.0), 1)
        x = tl.where(there, x, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # avoids NaN if all logits so far are -inf
        total = total * tl.exp(highest - level) + tl.sum(tl.exp(x - level[:, None]), 1)
        highest = higher
    found = tl.where(highest == float("-inf"), 0.0, highest) + tl.log(tl.where(inside, total, 1.0))
    t, counts = targets_of(target, first, rows, ignore_index, V, BT)
    chosen = shaped(tl.load(base + (row.to(tl.int64) * stride + t), mask=counts, other=0.0), scale, cap,
                    CAPPED)
    z = squares * found * found
    if SMOOTHED:
        chosen += smoothing * (plain / V - chosen)
    tl.store(loss + first + row, tl.where(counts, found - chosen + z, 0.0), mask=inside)
    tl.store(z_loss + first + row, tl.where(counts, z, 0.0), mask=inside)
    tl.store(lse + first + row, found, mask=inside)


def launch_forward(plan: Plan, logits: Tensor, target: Tensor, scale: float, cap: float | None,
                   smoothing: float, squares: float, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel; return the loss, z_loss and log-sum-exp of each row, each [N] in fp32.

    logits: [N, V] of any dtype; the V elements of a row are contiguous.
    target: [N], int32 or int64, contiguous. Rows whose target is not a column do not count.
    scale: factor of the logits.
    cap: softcap of the scaled logits, or None.
    smoothing: label smoothing.
    squares: weight of the squared log-sum-exp, which is added to the loss.
    ignore_index: target of rows that do not count.
    """
    N, V = logits.shape
    loss, z_loss, lse = (torch.empty(N, dtype=torch.float32, device=logits.device) for _ in range(3))
    if N:
        start_planned(plan, cross_entropy_forward, dict(
            logits=logits, target=target, loss=loss, z_loss=z_loss, lse=lse,
            stride=logits.stride(0), rows=N, scale=scale, cap=cap or 1.0,
            smoothing=smoothing, squares=squares, ignore_index=ignore_index,
            V=V, CAPPED=cap is not None, SMOOTHED=smoothing > 0))
    return loss, z_loss, lse
