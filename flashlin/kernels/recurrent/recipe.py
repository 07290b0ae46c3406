"""Which launches a token-by-token problem makes. Plain Python: no tensor, no torch, no triton."""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.guards.problem import Launch, Problem
from flashlin.kernels.configs import padded

SEGMENT = 64  # tokens between the states that forward keeps for backward
# Elements of the state a program and a thread have: forward holds one such tile, backward two to four, and neither should spill.
FORWARD_TILE, BACKWARD_TILE = (4096, 32), (2048, 16)


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Forward's launch, and backward's if gradients are wanted. Problem.H counts value heads, each of which has a state."""
    found = [_launch("recurrent_forward", FORWARD_TILE, problem)]
    if problem.needs_grad:
        found.append(_launch("recurrent_backward", BACKWARD_TILE, problem))
    return tuple(found)


def _launch(kernel: str, tile: tuple[int, int], problem: Problem) -> Launch:
    (elements, of_thread), BK = tile, padded(problem.K)
    BV = max(4, min(32, padded(problem.V), elements // BK))
    warps = min(4, max(1, BK * BV // (32 * of_thread)))
    # shared: a tile that changes its layout (states of [V, K]) and the sums that warps exchange
    traits = frozenset({"bf16"}) if problem.dtype == "bfloat16" and problem.dot == "native" else frozenset()
    programs = (problem.batch_part or problem.N) * problem.H * -(-problem.V // BV)
    return Launch(kernel, (programs,), warps, 1, (("BT", 1), ("BK", BK), ("BV", BV)), 8 * BK * BV + 4096, problem.K * problem.V, traits)


def kept(T: int, N: int, packed: bool) -> int:
    """How many states forward keeps for backward: one per full segment before a sequence's last token."""
    return T // SEGMENT if packed else N * (max(T - 1, 0) // SEGMENT)
