"""Recipes for replays of a run of kernels (replay.py), derived from one watched run.

A watched run shows which kernel is the first and the last to use each buffer. A recipe has two stages if two
stages need less memory. After the first stage, the replay frees the buffers that no later kernel uses:
scratch, and tensors that forward kept for this run alone. Then it makes the buffers of the second stage.
Within a stage, scratch buffers that are never needed at the same time share memory. The kernels of one stream
run in order, so memory can be reused at once.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flashlin.compat import launch
from flashlin.compat.launch_cache import Compiled
from flashlin.guards.plan_types import Plan
from flashlin.ops._common.casting import ALIGNED
from flashlin.ops._common.compile_ahead import MAKING, Mode

APART = 128  # alignment of scratch buffers in bytes
WORTH = 2**20  # the least number of bytes that two stages must save
NEVER = 2**31  # the number of a step that no run reaches
Made = tuple[torch.Size, torch.dtype]


class Place(int):
    """The number of a tensor within a replay recipe: the given tensors come first, then the made ones."""


class Start(NamedTuple):
    """One kernel launch of a replay recipe.

    run: Triton's launcher of the compiled kernel.
    arguments: picks the launcher's arguments from the list of all arguments of the run.
    """
    run: Callable[..., None]
    arguments: Callable[[list[Any]], tuple[Any, ...]]


class Write(NamedTuple):
    """An in-place torch operation to replay, or ``launch.enter``; tensor arguments are given as places."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class Stage(NamedTuple):
    """The buffers and steps of one stage of a replay recipe.

    gone: places of tensors to free before this stage.
    made: templates for ``torch.empty_like``, one for each buffer to make; this takes half the time of
        ``torch.empty``. A template itself has one element of memory. First come the tensors that the run
        returns or that torch operations use. Then come the scratch buffers: one that stays until the end of
        the run, and one that is freed before the second stage.
    inside: the addresses inside buffers, other than their starts, that kernels get as arguments. Each is
        (index of the argument with the start of the buffer, offset in bytes).
    steps: the launches and torch operations of the stage, in order.
    """
    gone: tuple[int, ...]
    made: tuple[Tensor, ...]
    inside: tuple[tuple[int, int], ...]
    steps: tuple[Start | Write, ...]


class Recipe(NamedTuple):
    """The data with which a run of kernels is replayed on other tensors.

    plan: the plan of the run, kept alive so that no other plan gets its id.
    compiled: the compiled kernels that the run launches.
    numbers: kernel arguments other than addresses.
    stages: the stages, one or two.
    returned: the returned structure, with places for tensors.
    nothing: a tensor without elements.
    """
    plan: Plan
    compiled: tuple[Compiled, ...]
    numbers: tuple[Any, ...]
    stages: tuple[Stage, ...]
    returned: Any
    nothing: Tensor


class _Watch(Mode):
    """Dispatch mode that records the operations of a run.

    buffers: the buffers that the run made, kept alive so that no two have the same address.
    steps: in-place torch operations and kernel launches, in order.
    plain: True if the run did nothing but make buffers and views, write in place and launch kernels.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []
        self.steps: list[Any] = []
        self.plain = True
        self.stored = {_storage_of(x) for x in tensors if x is not None}

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


def _contains(x: Tensor, address: int) -> bool:
    """Return True if the address is between the first and the last element of x."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return 0 <= address - x.data_ptr() <= last * x.element_size()


def _look(x: Tensor) -> Any:
    """Return a key that is equal for two tensor objects that view the same memory in the same layout.

    Identity of the objects is not enough, because torch may wrap a tensor in another object between two uses.
    """
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def watched_run(function: Callable[..., Any], plan: Plan, tensors: Sequence[Tensor | None],
                addresses: list[int], arguments: tuple[Any, ...], own: int) -> tuple[Any, Recipe | None]:
    """Return the function's result, and the recipe of its run or None if the run cannot be replayed.

    own: the last ``own`` tensors belong to this run alone and may be freed.
    """
    watch = _Watch(tensors)
    with launch.noting(starts=watch.steps), watch:
        made = function(plan, *arguments)
    watch.steps = [Write(step, (), {}) if step is launch.enter else step for step in watch.steps]
    try:
        return made, _recipe(plan, tensors, addresses, own, watch, made) if watch.plain else None
    except KeyError:  # a tensor of unknown origin
        return made, None


class Life(NamedTuple):
    """The lifetime of a buffer.

    size: bytes.
    first, last: the first and the last step that need the buffer.
    """
    size: int
    first: int
    last: int


def packed(lives: Mapping[int, Life]) -> tuple[dict[int, int], int]:
    """Return the offset of each buffer in one shared buffer, and the size of the shared buffer in bytes.

    Buffers that are needed at the same step do not overlap. The largest buffer is placed first.
    """
    begins = dict[int, int]()
    for at, one in sorted(lives.items(), key=lambda item: -item[1].size):
        place = 0
        for begin, end in sorted((begins[other], begins[other] + two.size) for other, two in lives.items()
                                 if other in begins and two.first <= one.last and one.first <= two.last):
            if begin - place >= one.size:
                break
            place = max(place, end)
        begins[at] = place
    return begins, max((begins[at] + one.size for at, one in lives.items()), default=0)


def second_stage(kept: Mapping[int, Life], scratch: Mapping[int, Life], steps: int) -> int:
    """Return the step at which a second stage should begin; NEVER if it would save less than WORTH bytes.

    kept: lifetimes of the given and the returned tensors. scratch: lifetimes of scratch buffers.
    """
    def taken(needed: Callable[[Life], bool]) -> int:
        return (sum(one.size for one in kept.values() if needed(one))
                + packed({at: one for at, one in scratch.items() if needed(one)})[1])

    def peak(begin: int) -> int:
        return max(taken(lambda one: one.first < begin), taken(lambda one: one.last >= begin))
    best = min(range(1, steps), key=peak, default=NEVER)
    return best if taken(lambda one: True) - peak(best) >= WORTH else NEVER


class _Memory:
    """The tensors of the run that a recipe records, by number: the given ones, the results and scratch.

    A result is a tensor that the run allocates and returns, or that a torch operation in it uses.
    """

    def __init__(self, tensors: Sequence[Tensor | None], addresses: list[int], watch: _Watch,
                 returned: Any) -> None:
        seen = [returned, *[step[1:] for step in watch.steps if isinstance(step, Write)]]
        of_torch = {_look(x) for x in tree_leaves(seen) if isinstance(x, Tensor)}
        results = [x for x in watch.buffers if _look(x) in of_torch]
        scratch = [x for x in watch.buffers if _look(x) not in of_torch]
        self.every: list[Any] = [*tensors, *results, *scratch]  # each a tensor or None
        self.addresses = addresses
        self.results = range(len(tensors), len(tensors) + len(results))
        self.scratch = range(self.results.stop, len(self.every))
        self.number = {_look(x): at for at, x in enumerate(self.every[:self.results.stop]) if x is not None}
        self.begins = {address: at for at, address in enumerate(addresses) if address}
        self.stored: dict[int, list[int]] = {}
        for at, x in enumerate(self.every):
            if x is not None:
                self.stored.setdefault(_storage_of(x), []).append(at)

    def pointer(self, x: Tensor) -> tuple[int, int]:
        """Return (number of the tensor that contains x, offset of x in bytes).

        Raises KeyError if the tensor cannot be determined.
        """
        address = x.data_ptr()
        owners = [at for at in self.stored[_storage_of(x)] if _contains(self.every[at], address)]
        at = self.begins.get(address)
        if at is not None and (len(owners) == 1 or x.numel() == self.every[at].numel()):
            return at, 0
        if len(owners) != 1:  # several given tensors share this memory and may be apart in the next run
            raise KeyError(address)
        return owners[0], address - self.every[owners[0]].data_ptr()

    def lives(self, steps: Sequence[Any], returned: Any, own: int) -> dict[int, Life]:
        """Return the lifetime of each made tensor and of the last ``own`` given tensors.

        A returned tensor lives until the end of the run.
        """
        needed: dict[int, list[int]] = {}
        for now, step in enumerate(steps):
            for x in tree_leaves(step[1:]):
                if isinstance(x, Tensor) and x.data_ptr():
                    needed.setdefault(self.pointer(x)[0], []).append(now)
        for x in tree_leaves(returned):
            if isinstance(x, Tensor):
                needed.setdefault(self.number[_look(x)], []).append(len(steps))
        given = [at for at in range(self.results.start - own, self.results.start)
                 if at in needed and self.addresses.count(self.addresses[at]) == 1]
        lives = {at: Life(self.size(at), 0, needed[at][-1]) for at in given}
        lives |= {at: Life(self.size(at), needed[at][0], len(steps)) for at in self.results}
        return lives | {at: Life(self.size(at), needed[at][0], needed[at][-1])
                        for at in self.scratch if at in needed}

    def is_plain(self) -> bool:
        """Return True if a replay can make all made tensors: results are contiguous, and all are aligned."""
        made = self.every[self.results.start:]
        return (all(x.is_contiguous() for x in made[:len(self.results)])
                and not any(x.data_ptr() % ALIGNED for x in made))

    def size(self, at: int) -> int:
        """Return the bytes of a tensor's storage, rounded up to a multiple of APART."""
        size: int = self.every[at].untyped_storage().nbytes()
        return -(-size // APART) * APART


def _layout(memory: _Memory, lives: dict[int, Life], begin: int) -> tuple[
        dict[int, tuple[int, int]], tuple[list[Made], list[Made]], tuple[int, ...]]:
    """Return the memory layout of a replay with a second stage that begins at step ``begin``.

    The result is (location of each tensor as (tensor of the replay, offset in bytes), tensors to make in each
    of the two stages, tensors to free between the stages).
    """
    given = memory.results.start
    home, makes, there = {at: (at, 0) for at in range(given)}, (list[Made](), list[Made]()), given
    gone = [at for at, life in lives.items() if at < given and life.last < begin]
    for late, made in enumerate(makes):
        mine = [at for at, life in lives.items() if at >= given and (life.first >= begin) == late]
        for at in mine:
            if at in memory.results:
                home[at] = there + len(made), 0
                made.append((memory.every[at].shape, memory.every[at].dtype))
        for brief in (False, True):
            begins, size = packed({at: lives[at] for at in mine
                                   if at in memory.scratch and (lives[at].last < begin) == brief})
            home |= {at: (there + len(made), place) for at, place in begins.items()}
            if size:
                gone += [there + len(made)] if brief else []
                made.append((torch.Size([size]), torch.uint8))
        there += len(made)
    return home, makes, tuple(gone)


def _recipe(plan: Plan, tensors: Sequence[Tensor | None], addresses: list[int], own: int, watch: _Watch,
            made: Any) -> Recipe | None:
    """Return the recipe of a watched run, or None if it cannot be replayed.

    Raises KeyError for a tensor that was neither given nor made in the run.
    """
    returned = dict(made) if isinstance(made, Mapping) else tuple(made)
    compiled = [step[0] for step in watch.steps if not isinstance(step, Write)]
    memory = _Memory(tensors, addresses, watch, returned)
    if None in compiled or not memory.is_plain():
        return None
    lives = memory.lives(watch.steps, returned, own)
    scratch = {at: life for at, life in lives.items() if at in memory.scratch}
    kept = {at: life for at, life in lives.items() if at not in scratch}
    begin = second_stage(kept, scratch, len(watch.steps))
    home, makes, gone = _layout(memory, lives, begin)
    numbers = list[Any]()

    def taken(x: Any) -> tuple[int, int] | int:
        """Return a tensor's location as (tensor of the replay, offset), or an index for another argument.

        The index counts through the arguments of all launches; index 0 is the stream.
        """
        if isinstance(x, Tensor) and x.data_ptr():
            at, beyond = memory.pointer(x)
            return home[at][0], home[at][1] + beyond
        numbers.append(0 if isinstance(x, Tensor) else x)  # an empty tensor has no address
        return len(numbers)

    def placed(x: Any) -> Any:
        """Return the place of a tensor, or the value itself if it is no tensor."""
        return Place(home[memory.number[_look(x)]][0]) if isinstance(x, Tensor) else x

    steps = list[Any]()
    for step in watch.steps:
        if isinstance(step, Write):
            steps.append(Write(step.function, tree_map(placed, step.arguments),
                               tree_map(placed, step.keywords)))
        else:
            used, programs, values = step
            steps.append((used.run, [*map(taken, (programs, 1, 1)), 0, *map(taken, (*used.known, *values))]))
    # Number the addresses: first the given tensors, then for each stage its new tensors and offsets in them.
    on, first = next(x for x in tensors if x is not None).device, 1 + len(numbers)
    places, stages, there = {(at, 0): first + at for at in range(len(tensors))}, list[Stage](), len(tensors)
    for like, of_stage in zip(makes, (steps[:begin], steps[begin:]), strict=True):
        places |= {(there + at, 0): first + len(places) + at for at in range(len(like))}
        there += len(like)
        pointers = [x for step in of_stage if type(step) is tuple for x in step[1] if type(x) is tuple]
        inside = [x for x in dict.fromkeys(pointers) if x not in places]
        places |= {x: first + len(places) + at for at, x in enumerate(inside)}
        stages.append(Stage(
            gone if stages else (),
            tuple([torch.empty((), dtype=dtype, device=on).expand(shape) for shape, dtype in like]),
            tuple([(places[at, 0], beyond) for at, beyond in inside]),
            tuple([Start(step[0], itemgetter(*[places[x] if type(x) is tuple else x for x in step[1]]))
                   if type(step) is tuple else step for step in of_stage])))
    return Recipe(plan, tuple(compiled), tuple(numbers), tuple(stages[:1 if begin == NEVER else 2]),
                  tree_map(placed, returned), torch.empty(0, device=on))
