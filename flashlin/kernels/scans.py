"""What the recipes of the chunked families share: from candidates to Launches. Plain Python: no tensor, no
torch, no triton."""
from __future__ import annotations

from collections.abc import Callable, Iterable

from flashlin.compat.target import Target
from flashlin.compat.versions import release
from flashlin.guards.problem import Launch, Problem
from flashlin.kernels.configs import BLOCK, Config

PADDING = 16  # elements, of a row that changes its layout
HEADS = 16  # heads per program of the cumulative sum


def operand_bytes(problem: Problem) -> int:
    """Size in bytes of a dot operand."""
    return 4 if problem.dot == "fp32" or problem.dtype == "float32" else 2


def cumsum_launch(problem: Problem, BT: int = BLOCK) -> Launch:
    """The kernel that sums the decays of heads within blocks of BT tokens."""
    return over_tokens("gate_cumsum", problem, dict(BT=BT, BH=HEADS), -(-problem.H // HEADS))


def over_tokens(kernel: str, problem: Problem, tile: dict[str, int], columns: int, shared: int = 8192,
                traits: frozenset[str] = frozenset(), num_stages: int = 1, num_warps: int = 4) -> Launch:
    """A kernel with a program for each chunk of ``tile["BT"]`` tokens and each of ``columns``, usually the
    heads. shared: bytes, an upper estimate."""
    n = problem.batch_part or problem.N
    rows = problem.T if problem.varlen else n * problem.T
    shares = max(1, -(-rows // (tile["BT"] * max(n, 1))))
    span = tile["BT"] * problem.H * max(problem.K, problem.V)
    return Launch(kernel, (n * shares * columns,), min(num_warps, problem.max_warps), num_stages,
                  tuple(tile.items()), shared, span, traits)


def shared_bytes(config: Config, bytes_each: int, target: Target) -> int:
    """An upper estimate of a scan's shared memory: its tiles once per stage, the state and the scores as
    operands of dots."""
    tiles = config.BT * (2 * max(config.BK, config.BV) + min(config.BK, config.BV))
    moved = config.BT * (min(config.BK, config.BV) + PADDING) if moves(target) else 0
    elements = config.num_stages * tiles + config.BK * config.BV + config.BT * config.BT + moved
    return tf32_copies(bytes_each, target) * bytes_each * elements


def moves(target: Target) -> bool:
    """Before 3.3, and on old tensor cores, tiles that change their layout go through shared memory of their
    own, in padded rows."""
    return release(target.triton) < (3, 3) or target.capability < (8, 0)


def tf32_copies(bytes_each: int, target: Target) -> int:
    """Before 3.3 the two halves that three tf32 products split an operand into both go through shared
    memory."""
    return 2 if bytes_each == 4 and target.capability >= (8, 0) and release(target.triton) < (3, 3) else 1


def narrow_state(config: Config) -> frozenset[str]:
    """Facts of a scan's tile, see ``TILE_FACTS``."""
    return frozenset({"narrow_state"} if config.BT >= 64 > min(config.BK, config.BV) else ())


def fitting(configs: Iterable[Config], shared: Callable[[Config], int], problem: Problem, target: Target,
            facts: Callable[[Config], frozenset[str]] = narrow_state) -> Config:
    """The first candidate whose shared memory fits and that has none of the facts which the problem has to
    avoid; if there is none, the last one, which the checks then refuse."""
    config = None
    for config in configs:
        if shared(config) <= target.shared and not facts(config) & problem.avoid:
            break
    assert config is not None  # a kernel without candidates is a mistake in configs.py
    return config


def state_launch(kernel: str, config: Config, problem: Problem, shared: int, traits: frozenset[str],
                 tall: bool = True) -> Launch:
    """A program per sequence, head and tile of the state. tall: whether a state taller than its chunks
    crashes compilers (tall-state-32)."""
    if tall and config.BT < 64 <= config.BK and "half_dot" in traits:
        traits = traits | {"tall_state"}
    if "dot" in traits:
        traits = traits | narrow_state(config)
    strips = -(-problem.K // config.BK) * -(-problem.V // config.BV)
    span = config.BT * problem.H * max(problem.K, problem.V)
    return Launch(kernel, ((problem.batch_part or problem.N) * problem.H * strips,),
                  min(config.num_warps, problem.max_warps), config.num_stages,
                  (("BT", config.BT), ("BK", config.BK), ("BV", config.BV)), shared, span, traits)


def dot_traits(problem: Problem) -> frozenset[str]:
    """The traits of a scan with products of the problem's operands."""
    kinds = {"dot", "rmw_acc", "half_dot" if operand_bytes(problem) == 2 else "fp32_dot"}
    if problem.dtype == "bfloat16" and problem.dot == "native":
        kinds.add("bf16")
    return frozenset(kinds)
