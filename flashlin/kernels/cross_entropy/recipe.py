"""Which launches a cross entropy makes, and with which tiles. Plain Python: no tensor, no torch, no triton.

A Problem has T rows of K logits. Like a norm, this only moves memory: forward reads the logits once, backward
reads and writes them once.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.family import Family, Op, Sizes
from flashlin.guards.problem import Launch, Problem

FAR = 2**20  # elements from one row of logits to the next; rows that lie farther apart are copied


class Config(NamedTuple):
    """Programs of ``elements`` logits, of at most BV columns, and ``num_warps``."""
    elements: int
    BV: int
    num_warps: int


# Forward walks a row in blocks of BV; each block ends in a sum over all warps, so blocks are large.
FORWARD, BACKWARD = Config(8192, 8192, 8), Config(4096, 4096, 8)


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launch, a program for BT rows; backward's, a program for BT rows and BV columns."""
    found = [_launch("cross_entropy_forward", FORWARD, problem)]
    if problem.needs_grad:
        found.append(_launch("cross_entropy_backward", BACKWARD, problem))
    return tuple(found)


def _launch(kernel: str, config: Config, problem: Problem) -> Launch:
    BV = min(max(16, 1 << (problem.K - 1).bit_length()), config.BV)
    BT = config.elements // BV
    strips = -(-problem.K // BV) if kernel == "cross_entropy_backward" else 1
    # shared: what is measured is an exchange of a tile between warps and the sums of each warp
    traits = frozenset({"bf16"}) if problem.dtype == "bfloat16" and problem.dot == "native" else frozenset()
    warps = config.num_warps if problem.max_warps >= 8 else min(config.num_warps, problem.max_warps)
    return Launch(kernel, (-(-problem.T // BT) * strips,), warps, 1, (("BT", BT), ("BV", BV)),
                  4 * config.elements + 4096, BT * FAR, traits)


def counted(sizes: Sizes) -> Sizes:
    return Sizes(T=sizes.B * sizes.T * sizes.H, K=sizes.K, V=sizes.K)


SPECS = (Family(
    "cross_entropy", launches,
    (Op("cross_entropy_loss", "cross_entropy"), Op("fused_linear_cross_entropy_loss", "cross_entropy")),
    axes={"T": "rows", "K": "logits of a row"},
    typical={"training": Sizes(T=16384, K=128256), "decoding": Sizes(T=64, K=128256)},
    counted=counted),)
