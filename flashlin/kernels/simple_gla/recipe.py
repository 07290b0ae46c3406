"""Which launches a scalar-decay problem makes. Plain Python: no tensor, no torch, no triton."""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.problem import Launch, Problem
from flashlin.kernels.configs import Config, over_k, over_v
from flashlin.kernels.recurrent import recipe as recurrent
from flashlin.kernels.scans import cumsum_launch, dot_traits, fitting, operand_bytes, over_tokens, shared_bytes, state_launch


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launches, then backward's if gradients are wanted; backward of the token kernel is the chunked one."""
    if problem.mode == "auto":  # nothing to say before the mode is chosen
        return ()
    bytes_each, dots = operand_bytes(problem), dot_traits(problem) | {"v_first"} & set(problem.options)

    def shared(config: Config) -> int:
        return shared_bytes(config, bytes_each, target)
    size = problem.K, problem.V, bytes_each, problem.max_warps
    wide = fitting(over_v(*size, target), shared, problem, target)
    gated = "g" in problem.options
    if problem.mode == "fused_recurrent":
        found = [recurrent.forward(problem)]
    else:
        found = [state_launch("simple_gla_scan", wide, problem, shared(wide), dots)]
    if problem.needs_grad:
        tall = fitting(over_k(*size, target), shared, problem, target)
        found += [state_launch("simple_gla_dq", tall, problem, shared(tall), dots),
                  state_launch("simple_gla_dk", tall, problem, shared(tall), dots),
                  state_launch("simple_gla_dv", wide, problem, shared(wide), dots)]
        if gated:
            found.append(over_tokens("simple_gla_dg", problem, dict(BT=tall.BT), problem.H))
    if gated and (problem.needs_grad or problem.mode == "chunk"):
        found.insert(0, cumsum_launch(problem))
    return tuple(found)
