"""The remedies. Each moves one field of the Problem one way (avoid grows, the others get smaller), or answers
None where it cannot help: that is why planning ends.

Nothing wraps a call: the rewritten Problem is the instruction. Recipes read it (warps, parts of the batch),
and ops/_common/casting.py what it says of operands. Adding a remedy is a function and its line in VARIANTS.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.problem import Problem, Reason


def chunk_mode(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    return problem._replace(mode="chunk") if problem.mode == "auto" else None


def recurrent_mode(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    return problem._replace(mode="fused_recurrent") if problem.mode == "auto" else None


def limit_num_warps(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """8 -> 4 -> 2: two warps use no warpgroup instructions, so nothing smaller helps."""
    return problem._replace(max_warps=problem.max_warps // 2) if problem.max_warps > 2 else None


def via_fp32(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """16-bit tensors are cast to fp32 in torch before the launch and results back after it (a 16-bit load may
    not even compile)."""
    if problem.given is not None and not problem.given.outputs:  # nobody knows which copies to write back
        return None
    return problem._replace(dot="fp32") if problem.dot == "native" and problem.dtype in ("float16",
                                                                                         "bfloat16") else None


def chunk_batch(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Half as many sequences per launch; with cu_seqlens a part is the view ``cu_seqlens[n0:n1 + 1]``, so
    nothing is read on the host."""
    if problem.given is not None and problem.given.whole:
        return None
    whole = problem.batch_part or problem.N
    return problem._replace(batch_part=-(-whole // 2)) if whole > 1 else None


def other_tile(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """The recipe's next candidate: one without the facts of a tile that the reason objects to."""
    return problem._replace(avoid=problem.avoid | reason.avoid) if reason.avoid - problem.avoid else None


def share_heads(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Whole sequences of a share of the heads for each rank."""
    if problem.over or problem.ranks == 1 or problem.H % problem.ranks:
        return None
    return problem._replace(over="heads", T=problem.T * problem.ranks, H=problem.H // problem.ranks)


def carry_states(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Ranks keep their tokens, and exchange states."""
    return problem._replace(over="tokens") if problem.ranks > 1 and not problem.over else None


def torch_path(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """A user's own kernel has none."""
    return problem._replace(path="torch") if problem.path != "torch" and problem.given is None else None


class Variant(NamedTuple):
    """A remedy: all that anybody has to know about it.

    exact: the same kernels on the same operands, so the same numbers at the same speed class. means: after
    the op's name, in a sentence. note: the same in a word or two, with the Problem's fields, beside the path.
    burden: how far from the plain way. cost: what it takes where it is not exact.
    """
    rewrite: Callable[[Problem, Target, Reason], Problem | None]
    exact: bool
    means: str
    note: str = ""
    burden: int = 1
    cost: str = ""


# Notes come in this order.
VARIANTS: dict[str, Variant] = {
    "chunk_mode": Variant(chunk_mode, True, "runs chunk by chunk"),
    "recurrent_mode": Variant(recurrent_mode, True, "runs token by token"),
    "other_tile": Variant(other_tile, True, "runs with another tile"),
    "share_heads": Variant(share_heads, True, "gives each rank a share of the heads, by an all-to-all"),
    "carry_states": Variant(carry_states, True, "carries states from rank to rank"),
    "via_fp32": Variant(via_fp32, False, "runs on fp32 copies", "via fp32", 2,
                        "a cast there and one back, twice the memory for each 16-bit tensor, no tensor cores "
                        "in its products"),
    "chunk_batch": Variant(chunk_batch, True, "runs the batch in parts", "in parts"),
    "limit_num_warps": Variant(limit_num_warps, True, "runs with fewer warps", "with {0.max_warps} warps"),
    "torch_path": Variant(torch_path, False, "runs in plain torch", "", 3,
                          "torch's own kernels one after the other: each step reads and writes GPU memory, "
                          "and keeps what backward needs there"),
}
