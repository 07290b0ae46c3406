"""Runs of kernels that are made again. What a family's forward.run and backward.run find out from a plan and
the facts of their tensors (kernels by name, grids, sizes of scratch, order of arguments) is always the same.

The first run with some facts is an ordinary one. The second is watched: which buffers it makes, which kernels
it starts, what else torch does, and where each tensor comes from. If all of that can be done again with other
tensors, later runs do no more than that: a buffer for each result and one for all scratch, then the compiled
kernels, with the same numbers and the new addresses. A run in which more happens than is known how to do
again stays an ordinary one; so does each that somebody watches, or for which Triton would compile anew.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import itemgetter, or_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from flashlin.compat import launch
from flashlin.compat.direct import TENSORS, Compiled, current, possible, triton_module, watched
from flashlin.guards.problem import Plan
from flashlin.ops._common import ahead
from flashlin.ops._common.ahead import MAKING
from flashlin.ops._common.seen import Seen

MOST = 4096  # runs that are kept, as many as plans
ALIGNED = 16  # bytes that every buffer begins at a multiple of, which kernels may have been compiled for
APART = 128  # bytes that scratch buffers begin at multiples of
LOOKED_AT = frozenset((*TENSORS, NoneType))
_address_of = torch.Tensor.data_ptr


class Place(int):
    """The number of a tensor: of the given ones, then the results."""


class Start(NamedTuple):
    """run: Triton's launcher of a compiled kernel. arguments: takes what it is called with out of all that
    the recipe's starts are called with."""
    run: Callable[..., None]
    arguments: Callable[[list[Any]], tuple[Any, ...]]


class Write(NamedTuple):
    """What torch writes to tensors that are there, which stand here as their places."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class Recipe(NamedTuple):
    """plan: which it is a run of, kept so that no other one gets its id. compiled: what it starts. made:
    tensors like the buffers to make, of one element each, since torch makes a tensor like another in half
    the time: those that torch is to see, and the last, if there is scratch, for all of that. inside: other
    addresses that kernels get (so many bytes from the beginning of which buffer). numbers: what they get
    beside addresses. returned: what is, with places for tensors."""
    plan: Plan
    compiled: tuple[Compiled, ...]
    made: tuple[Tensor, ...]
    inside: tuple[tuple[int, int], ...]
    numbers: tuple[Any, ...]
    steps: tuple[Start | Write, ...]
    returned: Any


# By the facts of a run; False where it has been made once, None where it has to be an ordinary one.
_recipes: dict[Any, Recipe | bool | None] = {}


def run(function: Callable[..., Any], plan: Plan, tensors: Sequence[Tensor | None], others: tuple[Any, ...],
        arguments: tuple[Any, ...], forward_of: Any = None, known: Seen | None = None) -> Any:
    """``function(plan, *arguments)``. tensors: all that are among the arguments. others: whatever else is
    there. forward_of: the Operator, if this is its forward. known: what these tensors are those of a call
    of."""
    if (found := _facts(function, plan, tensors, others, known)) is None:
        return function(plan, *arguments)
    facts, addresses, device = found
    recipe = _recipes.get(facts)
    if isinstance(recipe, Recipe):
        if current(recipe.compiled, device):
            made = _again(recipe, tensors, addresses, device)
            if made is not None:
                return made
        _recipes.pop(facts, None)
    elif recipe is False and not ahead.capturing():  # a recipe keeps memory
        made, _recipes[facts] = _watched(function, plan, tensors, addresses, arguments)
        return made
    elif facts not in _recipes and all(x is None or x.device.index in (None, device) for x in tensors):
        if len(_recipes) >= MOST:
            _recipes.clear()
        _recipes[facts] = False
        return ahead.run(function, plan, arguments, device, forward_of and (forward_of, tensors, *others))
    return function(plan, *arguments)


def _facts(function: Callable[..., Any], plan: Plan, tensors: Sequence[Tensor | None], others: tuple[Any, ...],
           known: Seen | None = None) -> tuple[Any, list[int], int] | None:
    """What decides what a run does, the tensors' addresses (0 for None), and the current device; None for a
    run that has to be an ordinary one."""
    if not possible() or watched() or launch.is_replaced() or torch._C._len_torch_dispatch_stack():
        return None
    device = triton_module().runtime.driver.active.get_current_device()
    types = [*map(type, tensors)]
    if not LOOKED_AT.issuperset(types):
        return None
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    begins = [address for address in addresses if address]
    if len(begins) < len(types) - types.count(NoneType):  # a tensor of nothing has no address
        return None
    looks: tuple[Any, ...] = (known,)
    same = None
    if (shared := len(set(begins)) < len(begins)) or known is None:
        looks = *[None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in tensors],
    if shared:
        same = tuple(map(addresses.index, addresses))
        if any(looks[at] != look for at, look in zip(same, looks, strict=True)):
            return None  # nobody could tell later which of the two was meant
    apart = reduce(or_, begins, 0) % ALIGNED  # 0 where all are aligned, as nearly always
    return ((function, id(plan), others, torch.get_float32_matmul_precision(), device, same,
             apart and tuple([address % ALIGNED for address in addresses]), *looks), addresses, device)


def _again(recipe: Recipe, tensors: Sequence[Tensor | None], addresses: list[int], device: int) -> Any:
    """What the run returns; None, and nothing done, where memory is not where kernels expect it."""
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in recipe.made]
    begins = [*map(_address_of, made)]
    if reduce(or_, begins, 0) % ALIGNED:
        return None
    every: list[Any] = addresses + begins
    every += [every[at] + beyond for at, beyond in recipe.inside]
    every.append(triton_module().runtime.driver.active.get_current_stream(device))
    every += recipe.numbers
    there = (*tensors, *made)
    for step in recipe.steps:
        if isinstance(step, Start):
            step.run(*step.arguments(every))
        else:
            step.function(*_put(there, step.arguments), **_put(there, step.keywords))
    return _put(there, recipe.returned)


def _put(there: Sequence[Tensor | None], places: Any) -> Any:
    """The tensors in their places of a tuple or a dict."""
    if type(places) is dict:
        return {name: there[x] if type(x) is Place else x for name, x in places.items()}
    return tuple([there[x] if type(x) is Place else x for x in places])


# --- watching ---

class _Watch(TorchDispatchMode):
    """What torch does meanwhile. buffers: those that were made, kept alive so that no two have an address.
    steps: what was written to, and kernels that were started. plain: nothing else was done."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []
        self.steps: list[Any] = []
        self.plain = True
        self.stored = {_storage_of(x) for x in tensors if x is not None}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler to do so, which takes a second or two."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in MAKING:
            self.buffers.append(made)
            self.stored.add(_storage_of(made))
            return made
        if not all(isinstance(x, Tensor) and _storage_of(x) in self.stored for x in tree_leaves(made)):
            self.plain = False
        elif function._schema.is_mutable:
            self.steps.append(Write(function, args, kwargs or {}))
        return made


def _storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _look(x: Tensor) -> Any:
    """What two objects for the same elements have in common; torch may hand out another one than it made."""
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _watched(function: Callable[..., Any], plan: Plan, tensors: Sequence[Tensor | None], addresses: list[int],
             arguments: tuple[Any, ...]) -> tuple[Any, Recipe | None]:
    """What the function returns, and how to make that again, None if that is not known."""
    watch = _Watch(tensors)
    with launch.noting(watch.steps), watch:
        made = function(plan, *arguments)
    try:
        return made, _recipe(plan, tensors, addresses, watch, made) if watch.plain else None
    except KeyError:  # a tensor of which nobody knows where it comes from
        return made, None


def _recipe(plan: Plan, tensors: Sequence[Tensor | None], addresses: list[int], watch: _Watch,
            made: Any) -> Recipe | None:
    """Raises KeyError for a tensor that is neither given nor was made."""
    returned = dict(made) if isinstance(made, Mapping) else tuple(made)
    seen = [returned, *[step[1:] for step in watch.steps if isinstance(step, Write)]]
    of_torch = {_look(x) for x in tree_leaves(seen) if isinstance(x, Tensor)}
    results = [x for x in watch.buffers if _look(x) in of_torch]
    scratch = [x for x in watch.buffers if _look(x) not in of_torch]
    every = [*tensors, *results, *scratch]
    number = {_look(x): Place(at) for at, x in enumerate((*tensors, *results)) if x is not None}
    begins = {address: Place(at) for at, address in enumerate(addresses) if address}
    stored: dict[int, list[int]] = {}
    for at, x in enumerate(every):
        if x is not None:
            stored.setdefault(_storage_of(x), []).append(at)

    def placed(x: Any) -> Any:
        return number[_look(x)] if isinstance(x, Tensor) else x

    def pointer(x: Tensor) -> tuple[int, int]:
        """Which buffer, of those that a run makes, and how many bytes from its beginning."""
        address, owners = x.data_ptr(), stored[_storage_of(x)]
        if address in begins:
            return begins[address], 0
        if len(owners) > 1:  # slices of a given tensor, each of which may lie elsewhere the next time
            raise KeyError(address)
        owner = every[owners[0]]
        assert owner is not None
        beyond = address - owner.data_ptr()
        return (owners[0], beyond) if owners[0] < room else (room, offsets[owners[0] - room] + beyond)

    if not all(x.is_contiguous() for x in results) or any(x.data_ptr() % ALIGNED for x in watch.buffers):
        return None
    room, offsets, size = len(tensors) + len(results), list[int](), 0
    for x in scratch:
        offsets.append(size)
        size += -(-x.untyped_storage().nbytes() // APART) * APART
    made_like = [(x.shape, x.dtype) for x in results] + ([(torch.Size([size]), torch.uint8)] if size else [])
    started = [step for step in watch.steps if not isinstance(step, Write)]
    if any(used is None for used, _, _ in started):
        return None
    buffers = [(at, 0) for at in range(len(tensors) + len(made_like))]
    pointers = [pointer(x) for *_, values in started for x in values if isinstance(x, Tensor) and x.data_ptr()]
    places = {place: at for at, place in enumerate(dict.fromkeys(buffers + pointers))}
    stream, numbers, steps = len(places), list[Any](), list[Start | Write]()

    def taken(x: Any) -> int:
        if isinstance(x, Tensor) and x.data_ptr():
            return places[pointer(x)]
        numbers.append(0 if isinstance(x, Tensor) else x)  # a tensor of nothing has no address
        return stream + len(numbers)

    for step in watch.steps:
        if isinstance(step, Write):
            steps.append(Write(step.function, tree_map(placed, step.arguments),
                               tree_map(placed, step.keywords)))
        else:
            used, programs, values = step
            found = *map(taken, (programs, 1, 1)), stream, *map(taken, (*used.known, *values))
            steps.append(Start(used.run, itemgetter(*found)))
    returning: Any = tuple(map(placed, returned.values() if isinstance(returned, dict) else returned))
    if isinstance(returned, dict):
        returning = dict(zip(returned, returning, strict=True))
    on = next(x for x in tensors if x is not None).device
    like = [torch.empty((), dtype=dtype, device=on).expand(shape) for shape, dtype in made_like]
    return Recipe(plan, tuple([used for used, _, _ in started]), tuple(like),
                  tuple(places)[len(buffers):], tuple(numbers), tuple(steps), returning)
