"""Calls like one that was made before. Checks ask nothing of a call but its facts: dtypes, shapes, strides
and devices of its tensors, and its other arguments. So where one call has passed them, those with the same
facts do, too, are the same Problem and need the same casts. Only the plan is asked for by each: it depends on
settings and on tables of verdicts, too."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashlin.compat.direct import TENSORS
from flashlin.guards.problem import Plan, Problem
from flashlin.ops._common.planned import planned

_STRIDED, _tracing = torch.strided, torch.compiler.is_compiling
MOST = 4096  # calls that are kept, as many as plans

_seen: dict[Any, Seen] = {}


@dataclass(frozen=True, eq=False)
class Seen:
    """Calls with some facts; no two are equal, so it stands for its facts. problem: what to plan. how: the
    scalars beside the tensors. copied: which tensors do not go to the kernels as they come, and the dtype of
    the contiguous copies that do."""
    problem: Problem
    how: Any
    copied: tuple[tuple[int, torch.dtype], ...]


def facts_of(tensors: Sequence[Any], *others: Any) -> Any:
    """What tells calls with these arguments apart; None where nothing does: under torch.compile, and for
    arguments that checks may object to. others: with their types, since True is no 1."""
    if _tracing():
        return None
    try:
        found = [None if x is None else (x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
                 for x in tensors if x is None or (type(x) in TENSORS and x.layout is _STRIDED)]
        hash(others)
    except (RuntimeError, TypeError):  # a nested tensor has no shape, a list no hash
        return None
    if len(found) < len(tensors):
        return None
    return torch.is_grad_enabled(), *found, *others, *map(type, others)


def seen(facts: Any,
         given: Sequence[Tensor | None]) -> tuple[Plan, Sequence[Tensor | None], Any, Seen] | None:
    """(plan, tensors as kernels take them, scalars beside them, what is known) of a call with such facts,
    unless it is the first one, or is planned another way now."""
    known = None if facts is None else _seen.get(facts)
    if known is None or given[0] is None:
        return None
    plan = planned(known.problem, given[0].device)
    if plan.path != "triton" or plan.problem.dot != "native":
        return None
    if not known.copied:
        return plan, given, known.how, known
    taken: list[Any] = list(given)
    for at, dtype in known.copied:
        taken[at] = taken[at].to(dtype).contiguous()
    return plan, taken, known.how, known


def see(facts: Any, plan: Plan | None, given: Sequence[Tensor | None], taken: Sequence[Tensor | None],
        how: Any) -> Seen | None:
    """What is known from now on of calls with such facts, one of which is about to start its kernels. taken:
    the given tensors, of which some were cast or made contiguous, and nothing else was done to any. Where a
    remedy changes what kernels compute in, another plan may not."""
    if facts is None or plan is None or plan.problem.dot != "native":
        return None
    if len(_seen) >= MOST:
        _seen.clear()
    pairs = enumerate(zip(given, taken, strict=True))
    known = _seen[facts] = Seen(plan.asked, how, tuple([(at, y.dtype) for at, (x, y) in pairs
                                                        if y is not None and y is not x]))
    return known
