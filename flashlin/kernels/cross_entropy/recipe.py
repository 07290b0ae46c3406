"""Recipe of the cross entropy: its launches and their tiles.

A Problem has T rows of K logits. The kernels are limited by memory bandwidth: forward reads the logits once,
and backward reads and writes them once. This module is plain Python: it needs no tensors, torch or triton.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Op, Sizes
from flashlin.guards.plan_types import Launch, Problem
from flashlin.kernels.elementwise import block, cdiv, heads_as_rows, moving

FAR = 2**20  # largest stride between rows of logits, in elements; rows that are farther apart are copied


# Number of logits that a program loads at a time. Forward reads a row in blocks of BV. Each block ends in a
# sum over all warps, so blocks are large.
FORWARD, BACKWARD = 8192, 4096


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the launch of forward and, if gradients are needed, that of backward.

    A program of forward computes BT rows. A program of backward computes BT rows and BV columns.
    """
    def launch(kernel: str, elements: int, by_column: bool) -> Launch:
        BV = block(problem.K, 16, elements)
        BT = elements // BV
        # This bound on shared memory was measured. It covers one fp32 tile, which warps exchange, and the
        # sums of each warp.
        return moving(kernel, problem, cdiv(problem.T, BT) * (cdiv(problem.K, BV) if by_column else 1),
                      dict(BT=BT, BV=BV), shared=4 * elements + 4096, span=BT * FAR, num_warps=8)
    forward = launch("cross_entropy_forward", FORWARD, False)
    return (forward, launch("cross_entropy_backward", BACKWARD, True)) if problem.needs_grad else (forward,)


SPECS = (Family(
    "cross_entropy", launches,
    (Op("cross_entropy_loss", "cross_entropy"), Op("fused_linear_cross_entropy_loss", "cross_entropy")),
    axes={"T": "rows", "K": "logits of a row"},
    typical={"training": Sizes(T=16384, K=128256), "decoding": Sizes(T=64, K=128256)},
    counted=heads_as_rows),)
