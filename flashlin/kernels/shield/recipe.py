"""The one launch of a kernel that is the user's own, as the remedies leave it. Plain Python: no tensor, no
torch, no triton."""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.compat.traits import with_operands
from flashlin.guards.family import Family
from flashlin.guards.plan_types import Launch, Problem


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """The given launch: for a part of the batch, with at most max_warps, on fp32 copies. Its tile and stages
    are the user's choice."""
    given = problem.given
    assert given is not None  # shielding/launcher.py makes every problem of this family
    launch, part = given.launch, problem.batch_part or problem.N
    grid = tuple(size // problem.N * part if axis == given.axis and not given.whole else size
                 for axis, size in enumerate(launch.grid))
    traits = launch.traits
    if problem.dot == "fp32":
        traits = with_operands(traits, frozenset({"float32"}), given.half, launch.tile)
    span = max((base + part * step for base, step in given.reach), default=launch.span)
    return (launch._replace(grid=grid, num_warps=min(launch.num_warps, problem.max_warps), traits=traits,
                            span=span),)


SPECS = (Family("shield", launches),)  # whose problems have sizes of their own, see Given
