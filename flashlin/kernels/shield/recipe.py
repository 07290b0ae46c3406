"""Recipe of a user's own kernel: its single launch, after the remedies.

This module is plain Python: it needs no tensors, torch or triton.
"""
from __future__ import annotations

from flashlin.compat.target import Target
from flashlin.compat.traits import with_operands
from flashlin.guards.family import Family
from flashlin.guards.plan_types import Launch, Problem


def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    """Return the user's launch, adapted to the remedies of the Problem.

    Remedies can limit it to a slice of the batch, limit its warps to max_warps, or run it on fp32 copies.
    They do not change its tile and stages, which the user chooses.
    """
    given = problem.given
    assert given is not None  # shielding/launcher.py creates every Problem of this family
    launch, part = given.launch, problem.batch_part or problem.N
    grid = tuple(size // problem.N * part if axis == given.axis and not given.whole else size
                 for axis, size in enumerate(launch.grid))
    traits = launch.traits
    if problem.dot == "fp32":
        traits = with_operands(traits, frozenset({"float32"}), given.half, launch.tile)
    span = max((base + part * step for base, step in given.reach), default=launch.span)
    return (launch._replace(grid=grid, num_warps=min(launch.num_warps, problem.max_warps), traits=traits,
                            span=span),)


SPECS = (Family("shield", launches),)  # the sizes of its Problems are described in Given
