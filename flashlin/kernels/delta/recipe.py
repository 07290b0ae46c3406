"""Which launches a chunked delta-rule problem makes. Plain Python: no tensor, no torch, no triton. Problem.H counts value heads."""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.problem import Launch, Problem
from flashlin.kernels.configs import Config, over_v, padded
from flashlin.kernels.scans import cumsum_launch, dot_traits, fitting, operand_bytes, over_tokens, shared_bytes, state_launch, tf32_copies

STRIP = 64  # columns of q, k, v and of the state at a time where a program has a chunk to itself


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """The inverse of each chunk and the scan; for gradients the scan that rebuilds states, the reverse scan, and the chunk's gradients."""
    bytes_each, dots = operand_bytes(problem), dot_traits(problem)
    copies = tf32_copies(bytes_each, target)

    def shared(config: Config) -> int:  # the inverse too, and a product of its size
        return shared_bytes(config, bytes_each, target) + copies * bytes_each * (config.num_stages + 1) * config.BT ** 2
    scan = fitting(over_v(problem.K, problem.V, bytes_each, problem.max_warps), shared, target)
    BT, BK, BV = scan.BT, min(STRIP, padded(problem.K)), min(STRIP, padded(problem.V))
    whole = min(2 * STRIP, padded(problem.K))
    found = [over_tokens("delta_inverse", problem, dict(BT=BT, BK=whole), problem.H,
                         copies * bytes_each * BT * whole + 16 * BT ** 2, dots - {"rmw_acc"}),
             state_launch("delta_scan", scan, problem, shared(scan), dots)]
    if "g" in problem.options:
        found.insert(0, cumsum_launch(problem))
    if problem.needs_grad:
        tiles = [copies * bytes_each * (stages * (3 * BT * BV + 2 * BK * BV) + 4 * BT * BK + 2 * BT ** 2) for stages in (2, 1)]
        stages = 2 if tiles[0] <= target.shared else 1
        reverse = scan._replace(num_stages=1)  # it has no registers to spare for a second stage (benchmarks/results/kernels-*)
        found += [state_launch("delta_states", scan, problem, shared(scan), dots),
                  state_launch("delta_reverse", reverse, problem, shared(reverse), dots),
                  over_tokens("delta_grads", problem, dict(BT=BT, BK=BK, BV=BV), problem.H, tiles[2 - stages],
                              dots - {"rmw_acc"}, stages)]
    return tuple(found)
