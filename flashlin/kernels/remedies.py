"""The remedies. Each rewrites the Problem, or returns None where it cannot help. It lowers its own measure
and raises that of no other remedy, so planning ends.

Nothing wraps a call: the rewritten Problem is the instruction. Recipes obey it, and ops/_common/casting.py
casts operands as it says. To add a remedy, add its line to REMEDIES. If its instruction is that a launch must
not have some fact, ``avoiding`` makes its function, ``Problem.avoid`` carries the fact, and the recipe that
has launches without it obeys.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.plan_types import Problem, Reason

Rewrite = Callable[[Problem, Target, Reason], Problem | None]


def in_mode(mode: str) -> Rewrite:
    """Make the remedy by which a call that leaves the mode open runs in this one."""
    def choose(problem: Problem, target: Target, reason: Reason) -> Problem | None:
        return problem._replace(mode=mode) if problem.mode == "auto" else None
    return choose


def limit_num_warps(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """8 -> 4 -> 2: two warps use no warpgroup instructions, so nothing smaller helps."""
    return problem._replace(max_warps=problem.max_warps // 2) if problem.max_warps > 2 else None


def via_fp32(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """16-bit tensors are cast to fp32 in torch before the launch and results back after it (a 16-bit load may
    not even compile)."""
    if problem.given is not None and not problem.given.outputs:  # it is unknown which copies to write back
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


def avoiding(*facts: str) -> Rewrite:
    """Make the remedy by which recipes start no launch with these facts, or with those that the reason
    objects to."""
    def avoid(problem: Problem, target: Target, reason: Reason) -> Problem | None:
        more = frozenset(facts) | reason.avoid
        return problem._replace(avoid=problem.avoid | more) if more - problem.avoid else None
    return avoid


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


class Remedy(NamedTuple):
    """A remedy, with all that other modules need to know about it.

    measure: a number of the Problem that the remedy lowers, and that no remedy raises. exact: the same
    kernels run on the same operands, so the numbers and the class of speed are the same. means: what happens,
    after the op's name in a sentence. note: the same in a word or two, with the Problem's fields, after the
    path. burden: how far it is from the plain way. cost: what it takes, if it is not exact.
    """
    rewrite: Rewrite
    measure: Callable[[Problem], int]
    exact: bool
    means: str
    note: str = ""
    burden: int = 1
    cost: str = ""


# Notes come in this order.
REMEDIES: dict[str, Remedy] = {
    "chunk_mode": Remedy(in_mode("chunk"), lambda p: p.mode == "auto", True, "runs chunk by chunk"),
    "recurrent_mode": Remedy(in_mode("fused_recurrent"), lambda p: p.mode == "auto", True,
                             "runs token by token"),
    "other_tile": Remedy(avoiding(), lambda p: -len(p.avoid), True, "runs with another tile"),
    "share_heads": Remedy(share_heads, lambda p: not p.over, True,
                          "gives each rank a share of the heads, by an all-to-all"),
    "carry_states": Remedy(carry_states, lambda p: not p.over, True, "carries states from rank to rank"),
    "via_fp32": Remedy(via_fp32, lambda p: p.dot == "native", False, "runs on fp32 copies", "via fp32", 2,
                       "a cast there and one back, twice the memory for each 16-bit tensor, no tensor cores "
                       "in its products"),
    "chunk_batch": Remedy(chunk_batch, lambda p: p.batch_part or p.N + 1, True, "runs the batch in parts",
                          "in parts"),
    "limit_num_warps": Remedy(limit_num_warps, lambda p: p.max_warps, True, "runs with fewer warps",
                              "with {0.max_warps} warps"),
    "torch_path": Remedy(torch_path, lambda p: p.path != "torch", False, "runs in plain torch", "", 3,
                         "torch's own kernels one after the other: each step reads and writes GPU memory, "
                         "and keeps what backward needs there"),
}
