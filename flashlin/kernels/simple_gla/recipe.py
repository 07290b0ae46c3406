"""Which launches a scalar-decay problem makes. Plain Python: no tensor, no torch, no triton."""
from __future__ import annotations

from collections.abc import Iterable

from flashlin.compat.target import Target
from flashlin.compat.versions import release
from flashlin.guards.problem import Launch, Problem
from flashlin.kernels.configs import BLOCK, Config, over_k, over_v, token

HEADS = 16  # heads per program of the cumulative sum


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launches, then backward's if gradients are wanted; backward of the token kernel is the chunked one."""
    if problem.mode == "auto":  # nothing to say before the mode is chosen
        return ()
    bytes_each = 4 if problem.dot == "fp32" or problem.dtype == "float32" else 2
    dots = _dot_traits(problem, bytes_each)
    wide = list(over_v(problem.K, problem.V, bytes_each, problem.max_warps))
    gated = "g" in problem.options
    if problem.mode == "fused_recurrent":
        found = [_launch("simple_gla_step", token(problem.K, problem.V), problem, 4096, dots & {"bf16"})]
    else:
        found = [_fitting("simple_gla_scan", wide, problem, target, bytes_each, dots)]
    if problem.needs_grad:
        tall = list(over_k(problem.K, problem.V, bytes_each, problem.max_warps))
        found += [_fitting("simple_gla_dq", tall, problem, target, bytes_each, dots),
                  _fitting("simple_gla_dk", tall, problem, target, bytes_each, dots),
                  _fitting("simple_gla_dv", wide, problem, target, bytes_each, dots)]
        if gated:
            found.append(_over_tokens("simple_gla_dg", problem, dict(BT=found[-2].block("BT")), problem.H))
    if gated and (problem.needs_grad or problem.mode == "chunk"):
        found.insert(0, _over_tokens("simple_gla_cumsum", problem, dict(BT=BLOCK, BH=HEADS), -(-problem.H // HEADS)))
    return tuple(found)


def _over_tokens(kernel: str, problem: Problem, tile: dict[str, int], columns: int) -> Launch:
    """The two small kernels on the gate: a program per block of tokens and column of heads, no dots."""
    n = problem.batch_part or problem.N
    rows = problem.T if problem.varlen else n * problem.T
    shares = max(1, -(-rows // (tile["BT"] * max(n, 1))))
    return Launch(kernel, (n * shares * columns,), 4, 1, tuple(tile.items()), 8192, tile["BT"] * problem.H, frozenset())


def shared_bytes(config: Config, bytes_each: int, target: Target) -> int:
    """An upper estimate of a scan's shared memory: its tiles once per stage, the state and the scores as operands of dots."""
    tiles = config.BT * (2 * max(config.BK, config.BV) + min(config.BK, config.BV))
    # Before 3.3 the two halves that three tf32 products split an operand into both go through shared memory.
    copies = 2 if bytes_each == 4 and target.capability >= (8, 0) and release(target.triton) < (3, 3) else 1
    return copies * bytes_each * (config.num_stages * tiles + config.BK * config.BV + config.BT * config.BT)


def _fitting(kernel: str, configs: Iterable[Config], problem: Problem, target: Target, bytes_each: int, traits: frozenset[str]) -> Launch:
    """The first candidate whose shared memory fits; the last one, which check_shared then refuses, if none does."""
    config = None
    for config in configs:
        if shared_bytes(config, bytes_each, target) <= target.shared:
            break
    assert config is not None  # a kernel without candidates is a mistake in configs.py
    if config.BK >= 256:
        traits = traits | {"tall_state"}
    return _launch(kernel, config, problem, shared_bytes(config, bytes_each, target), traits)


def _launch(kernel: str, config: Config, problem: Problem, shared: int, traits: frozenset[str]) -> Launch:
    strips = -(-problem.K // config.BK) * -(-problem.V // config.BV)
    span = config.BT * problem.H * max(problem.K, problem.V)
    return Launch(kernel, ((problem.batch_part or problem.N) * problem.H * strips,), min(config.num_warps, problem.max_warps), config.num_stages,
                  (("BT", config.BT), ("BK", config.BK), ("BV", config.BV)), shared, span, traits)


def _dot_traits(problem: Problem, bytes_each: int) -> frozenset[str]:
    kinds = {"dot", "rmw_acc", "half_dot" if bytes_each == 2 else "fp32_dot"}
    if problem.dtype == "bfloat16" and problem.dot == "native":
        kinds.add("bf16")
    return frozenset(kinds)
