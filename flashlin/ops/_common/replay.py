"""Caches that reduce the host work of calls and runs that repeat earlier ones.

A call has a key (``key_of``): dtypes, shapes, strides and devices of its tensors, and its other arguments.
Checks read nothing else. So after one call has passed the checks, later calls with the same key also pass.
They have the same Problem and need the same casts (``Call``). Only the plan is requested again in each call,
because it also depends on settings and on tables of results.

A run of a family's forward or backward depends only on the call, the plan and the alignment of its tensors.
The first run is an ordinary one, in which kernels compile in parallel (compile_ahead.py). The second run is
watched: its buffers, its launches, its torch operations and the origin of each tensor (recipe.py). If all of
this can be repeated with other tensors, later runs are replays. A replay allocates one buffer for each result
and one for all scratch. It launches the compiled kernels with the same numbers and the new addresses.

Some runs stay ordinary: a run with operations that cannot be repeated, a run while hooks of Triton are set,
and a run for which Triton would compile again.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from flashlin.compat import launch, tf32
from flashlin.compat.installed_triton import possible, triton_module
from flashlin.compat.launch_cache import TENSORS, current, watched
from flashlin.guards.plan_types import Plan, Problem
from flashlin.ops._common import compile_ahead, recipe
from flashlin.ops._common.casting import ALIGNED, aligned
from flashlin.ops._common.recipe import Recipe, Start

MOST = 4096  # maximum number of cached calls, and of cached runs; the cache of plans has the same size
LOOKED_AT = frozenset((*TENSORS, NoneType))
_STRIDED, _tracing = torch.strided, torch.compiler.is_compiling
_address_of = torch.Tensor.data_ptr

calls: dict[Any, Call] = {}  # by key; a key is never None
# Recipes by the key of a run. False: one ordinary run was made. None: the run cannot be replayed.
_recipes: dict[Any, Recipe | bool | None] = {}


# --- calls ---

@dataclass(frozen=True, eq=False)
class Call:
    """The record of all calls with one key.

    Records are compared by identity. So the key of a run contains the record instead of the long key of the
    call.
    problem: the Problem of the calls. how: their scalars.
    copied: (place, dtype) of each tensor that kernels get as a contiguous copy in that dtype.
    """
    problem: Problem
    how: Any
    copied: tuple[tuple[int, torch.dtype], ...]

    def cast(self, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the given tensors in the form that the kernels need."""
        cast: list[Any] = list(given)
        for at, dtype in self.copied:
            cast[at] = cast[at].to(dtype).contiguous()
        return cast


def key_of(tensors: Sequence[Any], *others: Any) -> Any:
    """Return a key that is equal for calls with equal arguments.

    Return None under torch.compile, and for arguments that the checks may reject.
    others: the arguments other than tensors. Their types are part of the key, because True equals 1.
    """
    if _tracing():
        return None
    key: list[Any] = [torch.is_grad_enabled()]
    try:
        for x in tensors:
            if x is None:
                key.append(None)
            elif type(x) in TENSORS and x.layout is _STRIDED:
                key.append((x.dtype, x.shape, x.stride(), x.device, x.requires_grad))
            else:
                return None
        hash(others)
    except (RuntimeError, TypeError):  # nested tensors have no shape, and lists have no hash
        return None
    return *key, *others, *map(type, others)


def remember(key: Any, plan: Plan | None, given: Sequence[Tensor | None], cast: Sequence[Tensor | None],
             how: Any) -> Call | None:
    """Store and return the record of a call that is about to run its kernels.

    cast: the given tensors; some were cast or made contiguous, and none changed otherwise.
    Return None for a plan whose remedy changes the dtype in which kernels compute, because a later
    plan may lack that remedy and need other casts.
    """
    if key is None or plan is None or plan.problem.dot != "native":
        return None
    if len(calls) >= MOST:
        calls.clear()
    pairs = enumerate(zip(given, cast, strict=True))
    call = calls[key] = Call(plan.asked, how, tuple([(at, y.dtype) for at, (x, y) in pairs
                                                     if y is not None and y is not x]))
    return call


# --- runs ---

def run_replayed(function: Callable[..., Any], plan: Plan, tensors: Sequence[Tensor | None],
                 others: tuple[Any, ...],
                 arguments: Callable[[Sequence[Tensor | None]], tuple[Any, ...]] | None = None,
                 forward_of: Any = None, call: Call | None = None, own: int = 0, align: bool = False) -> Any:
    """Return ``function(plan, *arguments(tensors))``, by a replay if a recipe exists.

    tensors: all tensors among the arguments. others: the other arguments. Without ``arguments`` the function
        gets the tuple of tensors and the others.
    forward_of: the Operator if the function is its forward.
    call: the record of the call if these are its tensors.
    own: the last ``own`` tensors belong to this run alone and may be empty afterwards.
    align: pass copies of unaligned tensors to the function.
    """
    found = _key_of_run(function, plan, tensors, others, call)
    if align and (found is None or found[2]):
        tensors = aligned(tensors)
        found = found and _key_of_run(function, plan, tensors, others, call)
    if found is not None and isinstance(made := _recipes.get(found[0]), Recipe):
        key, addresses, _, device = found
        if current(made.compiled, device):
            return _replay(made, tensors, addresses, device)
        _recipes.pop(key, None)
        found = None
    given = (tensors, *others) if arguments is None else arguments(tensors)
    if found is None:
        return function(plan, *given)
    key, addresses, _, device = found
    if made is False and not compile_ahead.capturing():  # a recipe must not keep memory of a CUDA graph
        returned, _recipes[key] = recipe.watched_run(function, plan, tensors, addresses, given, own)
        return returned
    if key not in _recipes and all(x is None or x.device.index in (None, device) for x in tensors):
        if len(_recipes) >= MOST:
            _recipes.clear()
        _recipes[key] = False
        return compile_ahead.compile_together(function, plan, given, device,
                                      forward_of and (forward_of, tensors, *others))
    return function(plan, *given)


def _key_of_run(function: Callable[..., Any], plan: Plan, tensors: Sequence[Tensor | None],
                others: tuple[Any, ...], call: Call | None) -> tuple[Any, list[int], int, int] | None:
    """Return (key, addresses, misalignment, device) of a run; None for a run that must be an ordinary one.

    addresses: address of each tensor, 0 for None.
    misalignment: 0 if all tensors are aligned.
    device: the current device.
    """
    if launch.replaced or not possible() or watched() or torch._C._len_torch_dispatch_stack():
        return None
    device = triton_module().runtime.driver.active.get_current_device()
    types = [*map(type, tensors)]
    if not LOOKED_AT.issuperset(types):
        return None
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    begins = [address for address in addresses if address]
    if len(begins) < len(types) - types.count(NoneType):  # an empty tensor has no address
        return None
    looks: tuple[Any, ...] = (call,)
    same = None
    if (shared := len(set(begins)) < len(begins)) or call is None:
        looks = *[None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in tensors],
    if shared:
        same = tuple(map(addresses.index, addresses))
        if any(looks[at] != look for at, look in zip(same, looks, strict=True)):
            return None  # a recipe could not distinguish the two tensors at one address
    apart = reduce(or_, begins, 0) % ALIGNED
    return ((function, id(plan), others, tf32.setting() == "tf32", device, same,
             apart and tuple([address % ALIGNED for address in addresses]), *looks), addresses, apart, device)


def _replay(made: Recipe, tensors: Sequence[Tensor | None], addresses: list[int], device: int) -> Any:
    """Run a recipe's steps on these tensors, and return the result of the run."""
    there: list[Any] = [*tensors]
    stream = triton_module().runtime.driver.active.get_current_stream(device)
    every: list[Any] = [stream, *made.numbers, *addresses]
    for stage in made.stages:
        for at in stage.gone:
            if at < len(tensors):  # the caller keeps the tensor object, so empty it to free its memory
                there[at].data = made.nothing
            there[at] = None
        first = len(there)
        there += [torch.empty_like(x, memory_format=torch.contiguous_format) for x in stage.made]
        begins = [*map(_address_of, there[first:])]
        if reduce(or_, begins, 0) % ALIGNED:
            there[first:] = map(_aligned, there[first:])
            begins = [*map(_address_of, there[first:])]
        every += begins
        every += [every[at] + beyond for at, beyond in stage.inside]
        for step in stage.steps:
            if isinstance(step, Start):
                step.run(*step.arguments(every))
            else:
                step.function(*_put(there, step.arguments), **_put(there, step.keywords))
    return _put(there, made.returned)


def _aligned(x: Tensor) -> Tensor:
    """Return an empty tensor like x that begins at an aligned address."""
    room = torch.empty(x.nbytes + ALIGNED, dtype=torch.uint8, device=x.device)
    return room[-room.data_ptr() % ALIGNED:][:x.nbytes].view(x.dtype).view(x.shape)


def _put(there: Sequence[Tensor | None], places: Any) -> Any:
    """Return the tuple or dict with each place replaced by its tensor from ``there``."""
    if type(places) is dict:
        return {name: there[x] if type(x) is recipe.Place else x for name, x in places.items()}
    return tuple([there[x] if type(x) is recipe.Place else x for x in places])
