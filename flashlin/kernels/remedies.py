"""The remedies: rewrites of a Problem that avoid a reason why its launches cannot run.

A remedy returns the rewritten Problem, or None if it cannot help. It lowers its own measure and raises the
measure of no other remedy, so planning ends.

A remedy changes only the Problem, not the call. Recipes plan launches for the rewritten Problem, and
ops/_common/casting.py casts operands to its dtypes. To add a remedy, add a line to REMEDIES. Some remedies
only forbid a trait of launches. These use the function ``other_tile``, ``Problem.avoid`` carries the trait,
and the recipes leave out launches that have it.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flashlin.compat.target import Target
from flashlin.guards.plan_types import Problem, Reason

Rewrite = Callable[[Problem, Target, Reason], Problem | None]


def in_mode(mode: str) -> Rewrite:
    """Return the remedy that sets the mode of a call with mode="auto"."""
    return lambda problem, target, reason: problem._replace(mode=mode) if problem.mode == "auto" else None


def limit_num_warps(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Halve the limit on warps: 8, then 4, then 2.

    Two warps use no warpgroup instructions, so a lower limit would not help.
    """
    return problem._replace(max_warps=problem.max_warps // 2) if problem.max_warps > 2 else None


def via_fp32(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Run on fp32 copies of 16-bit tensors.

    torch casts the tensors before the launch and the results after it, because even a 16-bit load may fail to
    compile.
    """
    if problem.given is not None and not problem.given.outputs:  # which copies to write back is unknown
        return None
    return problem._replace(dot="fp32") if problem.dot == "native" and problem.dtype in ("float16",
                                                                                         "bfloat16") else None


def chunk_batch(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Halve the number of sequences in a launch.

    A slice of packed sequences uses the view ``cu_seqlens[n0:n1 + 1]``, so the host reads no values.
    """
    if problem.given is not None and problem.given.whole:
        return None
    whole = problem.batch_part or problem.N
    return problem._replace(batch_part=-(-whole // 2)) if whole > 1 else None


def other_tile(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Forbid launches with the traits that the reason names."""
    return problem._replace(avoid=problem.avoid | reason.avoid) if reason.avoid - problem.avoid else None


def share_heads(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Give each rank whole sequences of H / ranks of the heads, by an all-to-all exchange."""
    if problem.over or problem.ranks == 1 or problem.H % problem.ranks:
        return None
    return problem._replace(over="heads", T=problem.T * problem.ranks, H=problem.H // problem.ranks)


def carry_states(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Let each rank keep its tokens, and exchange states between ranks."""
    return problem._replace(over="tokens") if problem.ranks > 1 and not problem.over else None


def torch_path(problem: Problem, target: Target, reason: Reason) -> Problem | None:
    """Run the op in plain torch; a user's own kernel has no torch path."""
    return problem._replace(path="torch") if problem.path != "torch" and problem.given is None else None


class Remedy(NamedTuple):
    """One remedy, with its properties for planning and messages.

    rewrite: returns the rewritten Problem, or None if the remedy cannot help.
    measure: a number of the Problem that this remedy lowers and no remedy raises.
    exact: True if the same kernels run on the same operands, so results are equal and speed is similar.
    means: the effect, as the rest of a sentence that begins with the op's name.
    note: the effect in a few words, printed after the path; a format string over the Problem.
    burden: rank of the remedy by its distance from the normal path; higher is worse.
    cost: the price in time and memory of a remedy that is not exact.
    """
    rewrite: Rewrite
    measure: Callable[[Problem], int]
    exact: bool
    means: str
    note: str = ""
    burden: int = 1
    cost: str = ""


# Notes are printed in this order.
REMEDIES: dict[str, Remedy] = {
    "chunk_mode": Remedy(in_mode("chunk"), lambda p: p.mode == "auto", True, "runs chunk by chunk"),
    "recurrent_mode": Remedy(in_mode("fused_recurrent"), lambda p: p.mode == "auto", True,
                             "runs token by token"),
    "other_tile": Remedy(other_tile, lambda p: -len(p.avoid), True, "runs with another tile"),
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
