"""Which launches a token-by-token problem makes. Plain Python: no tensor, no torch, no triton. Problem.H
counts value heads, which own the states."""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.family import Recipe, over_heads
from flashlin.guards.plan_types import Launch, Problem, traits_of
from flashlin.kernels.configs import Config, is_hopper, padded, token
from flashlin.kernels.scans import state_launch

SEGMENT = 64  # tokens between the states that forward keeps for backward
# elements of the state per program, 16 to a thread: backward holds two to four such tiles, and should not
# spill
BACKWARD_TILE = 2048
# Who takes back what it reads (delta rules, DPLR) sums over K twice a token, for which warps wait for each
# other; one warp has its own sums, of COLUMNS or of as many as leave it OF_A_WARP elements. The only token of a
# call is read best in rows twice as wide where it erases, which takes most registers, and otherwise, of MANY
# states (heads of all sequences), by 4 warps in wide rows, unless a third vector over K takes their registers.
# On Hopper, where it was timed, and where 32 columns by one warp made a loop over tokens slow
# (benchmarks/results/decode-tiles-*).
COLUMNS, OF_A_WARP, OF_MANY, MANY = 16, 2048, 8192, 1024


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launch, and backward's if gradients are wanted; or the one on a pool of states."""
    if "pool" in problem.options:
        return (_launch("recurrent_pool", token(problem.K, problem.V), problem),)
    if not problem.needs_grad:
        return (forward(problem, target),)
    BK = padded(problem.K)
    BV = max(4, min(32, padded(problem.V), BACKWARD_TILE // BK))
    return forward(problem, target), _launch("recurrent_backward", Config(1, BK, BV, max(1, BK * BV // 512), 1),
                                     problem)


def or_token_by_token(chunked: Recipe) -> Recipe:
    """The recipe of a family that goes chunk by chunk or, in the mode fused_recurrent, token by token. Before
    the mode is chosen there is nothing to say."""
    def recipe(problem: Problem, target: Target) -> tuple[Launch, ...]:
        if problem.mode == "auto":
            return ()
        return (launches if problem.mode == "fused_recurrent" else chunked)(problem, target)
    return recipe


def forward(problem: Problem, target: Target) -> Launch:
    """Forward's launch, which families with a chunked backward share."""
    config = token(problem.K, problem.V)
    options, alone = set(problem.options), problem.T == 1 and not problem.invariant
    if is_hopper(target) and {"delta", "b"} & options and (128 if alone else 64) <= config.BK <= 256:
        BV, num_warps = min(COLUMNS, OF_A_WARP // config.BK), 1
        # with gradients it is another recurrence (ops/_common/recurrent.py)
        if alone and "erase" in options and not problem.needs_grad:
            BV *= 2
        elif alone and problem.N * problem.H >= MANY and not {"b", "erase", "undecayed"} & options:
            BV, num_warps = OF_MANY // config.BK, 4
        config = config._replace(BV=min(BV, padded(problem.V)), num_warps=num_warps)
    return _launch("recurrent_forward", config, problem)


def _launch(kernel: str, config: Config, problem: Problem) -> Launch:
    # shared: a tile that changes its layout (states of [V, K]), and the sums that warps exchange
    return state_launch(kernel, config, problem, 8 * config.BK * config.BV + 4096, traits_of(problem))


def kept(T: int, N: int, packed: bool) -> int:
    """How many states forward keeps for backward: one per full segment before a sequence's last token."""
    return T // SEGMENT if packed else N * (max(T - 1, 0) // SEGMENT)


SPECS = (over_heads("recurrent", launches),)  # its ops stand beside those that go chunk by chunk
