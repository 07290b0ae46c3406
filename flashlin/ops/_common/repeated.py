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
from operator import or_
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

MOST = 4096  # runs that are kept, as many as plans
ALIGNED = 16  # bytes that every buffer begins at a multiple of, which kernels may have been compiled for
APART = 128  # bytes that scratch buffers begin at multiples of
_address_of = torch.Tensor.data_ptr


class Place(int):
    """The number of a tensor: of the given ones, then the results, then scratch buffers."""


class Start(NamedTuple):
    """compiled, on so many programs. values: its arguments, without the tensors. pointers: of each tensor
    (which argument, which tensor, how many bytes from its beginning)."""
    compiled: Compiled
    programs: int
    values: tuple[Any, ...]
    pointers: tuple[tuple[int, Place, int], ...]


class Write(NamedTuple):
    """What torch writes to tensors that are there, which stand here as their places."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class Recipe(NamedTuple):
    """plan: which it is a run of, kept so that no other one gets its id. compiled: what it starts. results:
    sizes and dtypes of the buffers that torch is to see. scratch: where the others are in one of ``size``
    bytes. returned: what is, with places for tensors."""
    plan: Plan
    compiled: tuple[Compiled, ...]
    results: tuple[tuple[torch.Size, torch.dtype], ...]
    scratch: tuple[int, ...]
    size: int
    steps: tuple[Start | Write, ...]
    returned: Any


# By the facts of a run; False where it has been made once, None where it has to be an ordinary one.
_recipes: dict[Any, Recipe | bool | None] = {}


def run(function: Callable[..., Any], plan: Plan, tensors: Sequence[Tensor | None], others: tuple[Any, ...],
        arguments: tuple[Any, ...], forward_of: Any = None) -> Any:
    """``function(plan, *arguments)``. tensors: all that are among the arguments. others: whatever else is
    there. forward_of: the Operator, if this is its forward."""
    if (found := _facts(function, plan, tensors, others)) is None:
        return function(plan, *arguments)
    facts, addresses, device = found
    recipe = _recipes.get(facts)
    if isinstance(recipe, Recipe):
        if current(recipe.compiled, device):
            made = _again(recipe, tensors, addresses, device)
            if made is not None:
                return made
        _recipes.pop(facts, None)
    elif recipe is False:
        made, _recipes[facts] = _watched(function, plan, tensors, addresses, arguments)
        return made
    elif facts not in _recipes:
        if len(_recipes) >= MOST:
            _recipes.clear()
        _recipes[facts] = False
        return ahead.run(function, plan, arguments, device, forward_of and (forward_of, tensors, *others))
    return function(plan, *arguments)


def _facts(function: Callable[..., Any], plan: Plan, tensors: Sequence[Tensor | None],
           others: tuple[Any, ...]) -> tuple[Any, list[int], int] | None:
    """What decides what a run does, the tensors' addresses (0 for None), and the current device; None for a
    run that has to be an ordinary one."""
    if not possible() or watched() or launch.is_replaced() or torch._C._len_torch_dispatch_stack():
        return None
    device = triton_module().runtime.driver.active.get_current_device()
    facts, addresses = list[Any](), list[int]()
    for x in tensors:
        if x is None:
            facts.append(None)
            addresses.append(0)
            continue
        address, on = x.data_ptr(), x.device
        if not address or type(x) not in TENSORS or on.index not in (None, device):  # one of nothing has none
            return None
        look = x.dtype, x.shape, x.stride(), on, address % ALIGNED
        same = addresses.index(address) if address in addresses else None
        if same is not None and facts[same][0] != look:  # nobody could tell later which of the two was meant
            return None
        facts.append((look, same))
        addresses.append(address)
    return (function, id(plan), others, torch.get_float32_matmul_precision(), *facts), addresses, device


def _again(recipe: Recipe, tensors: Sequence[Tensor | None], addresses: list[int], device: int) -> Any:
    """What the run returns; None, and nothing done, where memory is not where kernels expect it."""
    on = next(x for x in tensors if x is not None).device
    results = [torch.empty(size, dtype=dtype, device=on) for size, dtype in recipe.results]
    addresses += map(_address_of, results)
    if recipe.size:
        room = torch.empty(recipe.size, dtype=torch.uint8, device=on)
        begin = room.data_ptr()
        addresses += [begin + offset for offset in recipe.scratch]
    if reduce(or_, addresses[len(tensors):], 0) % ALIGNED:
        return None
    there = (*tensors, *results)
    stream = triton_module().runtime.driver.active.get_current_stream(device)
    for step in recipe.steps:
        if isinstance(step, Start):
            compiled, values = step.compiled, list(step.values)
            for at, place, beyond in step.pointers:
                values[at] = addresses[place] + beyond
            compiled.run(step.programs, 1, 1, stream, *compiled.known, *values)
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

    def pointer(x: Tensor) -> tuple[Place, int]:
        address, owners = x.data_ptr(), stored[_storage_of(x)]
        if address in begins:
            return begins[address], 0
        if len(owners) > 1:  # slices of a given tensor, each of which may lie elsewhere the next time
            raise KeyError(address)
        owner = every[owners[0]]
        assert owner is not None
        return Place(owners[0]), address - owner.data_ptr()

    steps = list[Start | Write]()
    for step in watch.steps:
        if isinstance(step, Write):
            steps.append(Write(step.function, tree_map(placed, step.arguments),
                               tree_map(placed, step.keywords)))
            continue
        used, programs, values = step
        if used is None:
            return None
        # a tensor of nothing has no address, and stays a 0
        pointers = [(at, *pointer(x)) for at, x in enumerate(values)
                    if isinstance(x, Tensor) and x.data_ptr()]
        steps.append(Start(used, programs, tuple([0 if isinstance(x, Tensor) else x for x in values]),
                           tuple(pointers)))
    if not all(x.is_contiguous() for x in results) or any(x.data_ptr() % ALIGNED for x in watch.buffers):
        return None
    offsets, size = [], 0
    for x in scratch:
        offsets.append(size)
        size += -(-x.untyped_storage().nbytes() // APART) * APART
    compiled = tuple([step.compiled for step in steps if isinstance(step, Start)])
    places: Any = tuple(map(placed, returned.values() if isinstance(returned, dict) else returned))
    if isinstance(returned, dict):
        places = dict(zip(returned, places, strict=True))
    return Recipe(plan, compiled, tuple([(x.shape, x.dtype) for x in results]), tuple(offsets), size,
                  tuple(steps), places)
