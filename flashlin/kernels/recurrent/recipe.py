"""The launches of the token-by-token recurrence.

Problem.H is the number of value heads; each of them has a state. Plain Python: this module imports neither
torch nor triton.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Recipe, over_heads
from flashlin.guards.plan_types import Launch, Problem, traits_of
from flashlin.kernels.configs import Config, is_hopper, padded, token
from flashlin.kernels.scans import state_launch

SEGMENT = 64  # tokens between the states that forward keeps for backward
# State elements per program of backward, which is 16 per thread. Backward has two to four such tiles in
# registers, and should not spill.
BACKWARD_TILE = 2048
# Tiles of forward on Hopper; other GPUs have not been timed (benchmarks/results/decode-tiles-*). Delta rules
# and DPLR reduce over K twice per token, and warps wait for each other in a reduction. One warp per program
# does not wait. Its tile has at most COLUMNS columns and OF_A_WARP elements; with 32 columns, a loop over
# tokens was slow. Two kinds of calls with a single token are faster with another tile:
# - A call with ``erase``, whose kernel needs the most registers, has a tile with twice as many columns.
# - A call with MANY states (heads of all sequences) or more has 4 warps and a tile of OF_MANY elements. The
#   exception are calls with a third vector over K, which needs the registers.
COLUMNS, OF_A_WARP, OF_MANY, MANY = 16, 2048, 8192, 1024


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the launches of a token-by-token problem.

    They are forward and, for gradients, backward; or the single launch on a pool of states.
    """
    if "pool" in problem.options:
        return (_launch("recurrent_pool", token(problem.K, problem.V), problem),)
    if not problem.needs_grad:
        return (forward(problem, target),)
    BK = padded(problem.K)
    BV = max(4, min(32, padded(problem.V), BACKWARD_TILE // BK))
    return forward(problem, target), _launch("recurrent_backward", Config(1, BK, BV, max(1, BK * BV // 512), 1),
                                     problem)


def or_token_by_token(chunked: Recipe) -> Recipe:
    """Return a recipe that calls ``chunked`` or, in mode "fused_recurrent", plans token-by-token kernels.

    In mode "auto" it returns no launches, because planning chooses the mode later.
    """
    def recipe(problem: Problem, target: Target) -> tuple[Launch, ...]:
        if problem.mode == "auto":
            return ()
        return (launches if problem.mode == "fused_recurrent" else chunked)(problem, target)
    return recipe


def forward(problem: Problem, target: Target) -> Launch:
    """Return the launch of the forward kernel; families with a chunked backward also use it."""
    config = token(problem.K, problem.V)
    options, alone = set(problem.options), problem.T == 1 and not problem.invariant
    if is_hopper(target) and {"delta", "b"} & options and (128 if alone else 64) <= config.BK <= 256:
        BV, num_warps = min(COLUMNS, OF_A_WARP // config.BK), 1
        # with gradients, another recurrence runs (ops/_common/recurrent.py)
        if alone and "erase" in options and not problem.needs_grad:
            BV *= 2
        elif alone and problem.N * problem.H >= MANY and not {"b", "erase", "undecayed"} & options:
            BV, num_warps = OF_MANY // config.BK, 4
        config = config._replace(BV=min(BV, padded(problem.V)), num_warps=num_warps)
    return _launch("recurrent_forward", config, problem)


def _launch(kernel: str, config: Config, problem: Problem) -> Launch:
    # Shared memory: a tile that changes its layout (for states [V, K]), and the sums that warps exchange.
    return state_launch(kernel, config, problem, 8 * config.BK * config.BV + 4096, traits_of(problem))


def kept(T: int, N: int, packed: bool) -> int:
    """Return the number of states that forward keeps for backward.

    It keeps one for each full segment of 64 tokens before the last token of a sequence. For packed sequences
    it is an upper limit.
    """
    return T // SEGMENT if packed else N * (max(T - 1, 0) // SEGMENT)


SPECS = (over_heads("recurrent", launches),)  # the chunked families list the public ops that use it
