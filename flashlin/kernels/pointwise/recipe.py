"""Which launches an elementwise op makes, and with which tiles. Plain Python: no tensor, no torch, no triton.

A Problem has T rows of H * K columns: H heads of K, or H = 1 where there are none. Parameters belong to columns (or heads), so their gradients
are sums over rows. Like a norm, an elementwise op only moves memory: the choice is how much of it is under way.
"""
from __future__ import annotations

from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.problem import Launch, Problem

# Families, and their kernels.
GATE, MIX, KEY, CORRECTION = "pointwise_gate", "pointwise_mix", "pointwise_key", "pointwise_correction"
SCALE, SKIP = "pointwise_scale", "pointwise_skip"
FAMILIES = (GATE, MIX, KEY, CORRECTION, SCALE, SKIP)
APART = (SCALE, SKIP)  # parts of a scan, which take slices of a projection as they lie
BY_HEAD = (CORRECTION, SCALE)  # add up a head's columns


class Config(NamedTuple):
    """Programs of ``elements`` (rows times columns) and ``num_warps``, and so many per multiprocessor if they share out the rows."""
    elements: int
    num_warps: int
    per_sm: int = 0


FORWARD, BACKWARD = Config(2048, 4), Config(1024, 4, 4)  # backward keeps a sum for each parameter in registers, as many as six


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launch and backward's."""
    found = [_launch(problem.family, FORWARD, problem, target)]
    if problem.needs_grad:  # a scale has no parameters
        found.append(_launch(problem.family + "_backward", FORWARD if problem.family == SCALE else BACKWARD, problem, target))
    return tuple(found)


def strip_width(problem: Problem, BD: int) -> int:
    """Columns of a program: BD of them, or a whole head where they are added up."""
    return problem.K if problem.family in BY_HEAD else BD


def _launch(kernel: str, config: Config, problem: Problem, target: Target) -> Launch:
    if problem.family in BY_HEAD:
        BD = max(8, 1 << (problem.K - 1).bit_length())
        config = config._replace(elements=max(config.elements, BD), num_warps=max(config.num_warps, BD // 256))
    else:
        BD = min(max(8, 1 << (problem.H * problem.K - 1).bit_length()), config.elements)
    BT = config.elements // BD
    strips, blocks = -(-problem.H * problem.K // strip_width(problem, BD)), -(-problem.T // BT)
    if config.per_sm:
        blocks = min(blocks, -(-config.per_sm * target.sms // max(strips, 1)))
    # shared: the sums of each warp
    traits = frozenset({"bf16"}) if problem.dtype == "bfloat16" and problem.dot == "native" else frozenset()
    warps = config.num_warps if problem.max_warps >= 8 else min(config.num_warps, problem.max_warps)
    return Launch(kernel, (strips * blocks,), warps, 1, (("BT", BT), ("BD", BD)), 4 * config.elements + 4096, BT * problem.H * problem.K, traits)
