from flashlin.compat.target import Target
from flashlin.guards.problem import Launch, Problem
def launches(problem: Problem, target: Target) -> tuple[Launch, ...]:
    return ()
