"""Replays launch the same kernels on the same data as ordinary runs, on a simulated GPU.

A simulated kernel writes no result. It leaves a name at each of its pointers that identifies its inputs.
"""
from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode

import flashlin
from benchmarks.host import ordinary
from benchmarks.pretended import Driver, Started, pretended
from flashlin.compat import launch
from flashlin.compat import target as machine
from flashlin.guards.plan_types import Launch
from flashlin.kernels import scans
from flashlin.ops._common import chunked, recipe, replay
from flashlin.ops._common.recipe import Recipe, Start
from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case
from matrix.workload import as_in_a_case
from tests import torch_states
from tests.direct import needs_direct_starts
from tests.share import share

pytestmark = needs_direct_starts

REPEATED = [case for case in CASES if case.op.startswith(("chunk_", "fused_recurrent_", "fused_chunk_"))
            and "conv" not in case.op]


class Memory(Driver):
    """A simulated GPU whose kernels write a name at each of their pointers.

    The name is a hash of the kernel, its grid, its numbers and the contents that it found at each pointer.

    read: the contents that the kernels found, in the order of their launches.
    new: by launch, the positions of arguments that pointed at new memory in the first run. The kernel cannot
    have read them, so their contents are ignored in later runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.new: list[set[int]] = []
        self.names: dict[int, int] = {}
        self.fresh: list[torch.Tensor] = []
        self.read: list[Any] = []

    def begin(self) -> None:
        """Forget the names that kernels of earlier calls wrote."""
        self.names.clear(), self.fresh.clear(), self.read.clear()

    def started_with(self, x: torch.Tensor) -> bool:
        """Return True if a kernel had a pointer to x."""
        return x.data_ptr() in self.names

    def made(self, x: torch.Tensor) -> torch.Tensor:
        """Record a new buffer, and forget the names at its addresses.

        Its memory may have belonged to a freed tensor that a kernel read.
        """
        if x.is_meta:  # it has no memory
            return x
        begin = x.untyped_storage().data_ptr()
        # Torch may add gradients that no kernel wrote, before another kernel reads the sums. ``zero_`` would be
        # part of the recorded run.
        ctypes.memset(begin, 0, x.untyped_storage().nbytes())
        for address in [one for one in self.names if begin <= one < begin + x.untyped_storage().nbytes()]:
            del self.names[address]
        self.fresh.append(x)
        return x

    def found(self, address: int, size: int = 8) -> Any:
        if address in self.names:
            return self.names[address]
        for x in self.fresh:
            begin = x.untyped_storage().data_ptr()
            if begin <= address < begin + x.untyped_storage().nbytes():
                return "nothing"
        return ctypes.string_at(address, size) if address else "no address"

    def launched(self, one: Started) -> None:
        described = {at: x for at, x in enumerate(one.arguments) if hasattr(x, "base")}  # TMA descriptors
        kinds = map(str, one.compiled.signature.values())
        given = enumerate(zip(kinds, one.arguments, strict=True))
        pointers = {at: x for at, (kind, x) in given if kind[0] == "*"} | {
            at: x.base for at, x in described.items()}
        places = {at: x if isinstance(x, int) else x.data_ptr() for at, x in pointers.items()}
        new = self.new[len(self.read)] if len(self.read) < len(self.new) else set()
        names = one.compiled.fn.arg_names  # A_log of one head has only 4 bytes
        seen = tuple("nothing" if at in new else repr(value) if at not in places else
                     self.found(places[at], 4 if names[at] == "A_log" else 8)
                     for at, value in enumerate(one.arguments))
        sizes = repr([(list(x.shape), list(x.strides)) for x in described.values()])
        self.read.append((one.compiled.fn.__name__, id(one.compiled), one.grid, one.stream, seen, sizes))
        for at, address in places.items():
            self.names[address] = hash((self.read[-1], at))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(replay, "_recipes", {})
    fake = Memory()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            return fake.made(function(*arguments, **options))
        return made
    for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(home, name, noting(getattr(home, name)))
    machine.pretend(machine.parse(f"triton={triton.__version__},sm=90"))
    with pretended(fake), flashlin.settings(canary="off"):
        yield fake


@pytest.mark.parametrize("case", share(REPEATED, 0, 12), ids=lambda case: f"{case.op} {case.id}")
def test_cases_read_the_same_each_time(case: Case, card: Memory, again: list[Any],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a case reads the same data, also in a replay that frees buffers between two stages.

    WORTH is the least number of bytes that a second stage must save. With the value 1, small calls also have
    two stages.
    """
    monkeypatch.setattr(recipe, "WORTH", 1)
    make_again = replay._replay

    def make(recipe: Recipe, tensors: Any, *others: Any) -> Any:
        assert not started_on_what_is_gone(recipe, len(tensors))
        return make_again(recipe, tensors, *others)
    monkeypatch.setattr(replay, "_replay", make)
    chance, elsewhere, before = random.Random(0), list[Any](), None
    for number in range(5):
        elsewhere.append([torch.zeros(chance.randrange(1, 9000)) for _ in range(20)])
        card.begin()
        again.clear()
        as_in_a_case(case, torch.bfloat16, gradients=True)
        assert before is None or card.read == before
        card.new = [{at for at, value in enumerate(one[4]) if value == "nothing"} for one in card.read]
        before = list(card.read)
        assert not again or number > 1
    # HGRN and ops that overwrite states are never replayed
    assert again or "hgrn" in case.op or case.id.startswith(("pool", "in-place"))


def started_on_what_is_gone(recipe: Recipe, given: int) -> set[int]:
    """Return the places of tensors that a stage has freed although a later kernel gets their address."""
    owners = [-1] * (1 + len(recipe.numbers)) + [*range(given)]
    there, gone, found = given, set[int](), set[int]()
    for stage in recipe.stages:
        gone |= set(stage.gone)
        owners += range(there, there + len(stage.made))
        there += len(stage.made)
        owners += [owners[at] for at, _ in stage.inside]
        for step in stage.steps:
            if isinstance(step, Start):
                taken: Any = step.arguments.__reduce__()
                found |= {owners[at] for at in taken[1]} & gone
    return found | {place for place in recipe.returned if place in gone}


# --- reasons for an ordinary run instead of a replay ---

OP = "chunk_gated_delta_rule"


def leaves(dtype: torch.dtype = torch.bfloat16, T: int = 40) -> dict[str, torch.Tensor]:
    x = {name: torch.randn(2, T, 2, 16).to(dtype) for name in ("q", "k", "v")}
    return {**x, "g": -torch.rand(2, T, 2), "beta": torch.rand(2, T, 2).to(dtype)}


def runs(again: list[Any], times: int = 4, **change: Any) -> int:
    """Call the op forward ``times`` times, and return how many of the calls were replays."""
    again.clear()
    for _ in range(times):
        getattr(flashlin, OP)(**{**leaves(), **change})
    return len(again)


def test_the_third_run_is_the_first_that_is_made_again(card: Memory, again: list[Any]) -> None:
    assert [runs(again, 1) for _ in range(4)] == [0, 0, 1, 1]


def test_calls_without_it_in_between_change_nothing(card: Memory, again: list[Any]) -> None:
    for _ in range(4):
        getattr(flashlin, OP)(**leaves())
        with ordinary():
            getattr(flashlin, OP)(**leaves())
    assert len(again) == 2


def test_nothing_is_kept_of_the_memory_of_a_graph(card: Memory, again: list[Any],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs(again, 1) == 0
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert runs(again, 2) == 0
    assert [runs(again, 1) for _ in range(2)] == [0, 1]


def beside(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x at an address that is no multiple of 16."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return moved.copy_(x)


def test_other_facts_are_another_run(card: Memory, again: list[Any]) -> None:
    assert runs(again) == 2
    for change in (leaves(T=41), leaves(torch.float16), {"scale": 0.5},
                   {"output_final_state": True}, {"initial_state": torch.zeros(2, 2, 16, 16)}):
        assert [runs(again, 1, **change) for _ in range(3)] == [0, 0, 1], change.keys()
    assert runs(again) == 4
    assert runs(again, v=beside(leaves()["v"])) == 4, "what is not aligned is copied"


def test_token_by_token_tensors_that_are_not_aligned_are_another_run(card: Memory, again: list[Any]) -> None:
    """Aligned and unaligned tensors have separate replays.

    The token-by-token kernels read such tensors without a copy.
    """
    def made_again(v: torch.Tensor) -> int:
        again.clear()
        flashlin.fused_recurrent_gated_delta_rule(**{**leaves(), "v": v})
        return len(again)
    v = leaves()["v"].detach()
    assert [made_again(v) for _ in range(3)] == [0, 0, 1]
    assert [made_again(beside(v)) for _ in range(3)] == [0, 0, 1]


def test_a_tensor_given_twice_is_another_call(card: Memory, again: list[Any]) -> None:
    x = leaves()
    assert runs(again, q=x["q"], k=x["q"]) == 2
    assert runs(again) == 2 and runs(again, q=x["q"], k=x["q"]) == 4


def test_other_tensors_at_one_address_are_told_apart_by_nobody(card: Memory, again: list[Any]) -> None:
    q = torch.randn(2, 40, 2, 16).bfloat16()
    assert runs(again, q=q, v=q.flatten()[:1280].view(2, 40, 2, 8)) == 0


def test_slices_of_one_tensor_are_told_apart(card: Memory, again: list[Any]) -> None:
    """Slices along the last dimension and along the first dimension have separate replays.

    Kernels get copies of the first kind. They read the second kind without a copy.
    """
    q, k, v = torch.randn(2, 40, 2, 48).bfloat16().split(16, -1)
    assert runs(again, q=q, k=k, v=v) == 2
    q, k, v = torch.randn(3, 2, 40, 2, 16).bfloat16()
    other = torch.randn(2, 40, 2, 16).bfloat16()
    assert runs(again, q=q, k=k, v=v) == 2  # a new recipe, although the layout equals that of the copies
    card.begin()
    getattr(flashlin, OP)(**{**leaves(), "q": q, "k": other, "v": v})
    assert card.started_with(other) and not card.started_with(k)


def test_who_watches_sees_ordinary_runs(card: Memory, again: list[Any],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs(again) == 2
    seen: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [seen.append])
        assert runs(again) == 0 and len(seen) == 12
    assert runs(again) == 4
    launch.replace_starter(lambda *start: seen.append(start))
    assert runs(again) == 0
    launch.replace_starter(None)
    with FlopCounterMode(display=False):
        assert runs(again) == 0
    assert runs(again) == 4


def test_a_remedy_is_gone_with_its_plan(card: Memory, again: list[Any]) -> None:
    """A replay for another GPU does not use the remedies of a T4.

    A T4 computes bfloat16 inputs in float32.
    """
    machine.pretend(machine.parse(f"triton={triton.__version__},sm=75"))
    x = leaves()
    for _ in range(3):
        assert getattr(flashlin, OP)(**x)[0].dtype == torch.bfloat16 and not card.started_with(x["v"])
    machine.pretend(machine.parse(f"triton={triton.__version__},sm=90"))
    assert getattr(flashlin, OP)(**x)[0].dtype == torch.bfloat16 and card.started_with(x["v"])


def test_settings_are_obeyed(card: Memory, again: list[Any]) -> None:
    assert runs(again) == 2
    with flashlin.settings(path="torch"):
        assert runs(again) == 0
    with flashlin.settings(invariant=True):  # a different plan with the same kernels
        assert [runs(again, 1) for _ in range(3)] == [0, 0, 1]
    for tf32 in torch_states.TF32.values():
        again.clear()
        replay._recipes.clear()
        assert runs(again) == 2
        with tf32():
            assert [runs(again, 1) for _ in range(3)] == [0, 0, 1]
        assert runs(again) == 4


def test_a_changed_source_is_compiled_again(card: Memory, again: list[Any]) -> None:
    assert runs(again) == 2
    [recipe, _] = again
    recipe.compiled[0].of.device_caches.clear()
    assert [runs(again, 1) for _ in range(3)] == [0, 0, 0]
    assert runs(again) == 4 and again[0].compiled != recipe.compiled


def test_a_run_in_which_torch_computes_stays_ordinary(card: Memory, again: list[Any]) -> None:
    """Backward with two value heads for each head of q is not replayed.

    torch adds up the gradients of the heads.
    """
    for _ in range(4):
        x = {**leaves(), "v": torch.randn(2, 40, 4, 16).bfloat16(), "g": -torch.rand(2, 40, 4),
             "beta": torch.rand(2, 40, 4)}
        x = {name: t.requires_grad_() for name, t in x.items()}
        again.clear()
        getattr(flashlin, OP)(**x)[0].sum().backward()
    assert len(again) == 1


def test_nothing_given_is_kept_alive(card: Memory, again: list[Any]) -> None:
    x = leaves()
    kept = [weakref.ref(t) for t in x.values()]
    for _ in range(4):
        o = getattr(flashlin, OP)(**x)[0]
    kept.append(weakref.ref(o))
    del x, o
    card.begin()
    again.clear()
    gc.collect()
    assert not [one for one in kept if one() is not None]


def test_results_are_new_each_time(card: Memory, again: list[Any]) -> None:
    x = leaves()
    outputs = [getattr(flashlin, OP)(**x)[0] for _ in range(6)]
    assert len(again) == 4 and len({o.data_ptr() for o in outputs}) == 6


# --- runs of small kernels and functions that this file defines ---

class Own(torch.Tensor):
    pass


@triton.jit
def toy(x, o, n, BT: tl.constexpr):
    tl.store(o, tl.load(x))


@triton.jit
def toy_with_a_global(x, o, n, BT: tl.constexpr):
    tl.store(o, tl.load(x) + LIMIT)


LIMIT = tl.constexpr(3)
PLAN: Any = SimpleNamespace()
LAUNCH = Launch("toy", (1,), 1, 1, (("BT", 16),), 0, 0, frozenset())
X = torch.arange(16.0)


def moved(x: torch.Tensor, o: torch.Tensor, n: int = 1, kernel: Any = toy) -> None:
    launch.start(LAUNCH, kernel, 1, dict(x=x, o=o, n=n))


def one_result(plan: Any, x: torch.Tensor, n: int = 1) -> tuple[torch.Tensor]:
    """Copy x through two scratch buffers, which must not share memory, to the result."""
    first, second, o = torch.empty(100), torch.empty(7, dtype=torch.float64), torch.empty_like(x)
    for a, b in ((x, first), (first[3:], second), (second, o)):
        moved(a, b, n)
    return (o,)


def another_result(plan: Any, x: torch.Tensor, n: int = 1) -> tuple[torch.Tensor]:
    moved(x, o := torch.empty(3))
    return (o,)


def computed(plan: Any, x: torch.Tensor) -> tuple[torch.Tensor]:
    moved(doubled := 2 * x, o := torch.empty_like(x))
    return (o + doubled.sum(),)


def written(plan: Any, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    moved(x, o := torch.empty_like(x))
    o.fill_(5)
    return {"o": o, "none": None}


def sliced(plan: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    moved(x[4:], o := torch.empty(3))
    return (o,)


def with_a_global(plan: Any, x: torch.Tensor) -> tuple[torch.Tensor]:
    moved(x, o := torch.empty_like(x), kernel=toy_with_a_global)
    return (o,)


def run(function: Any, *tensors: Any, n: tuple[int, ...] = (), own: int = 0) -> Any:
    return replay.run_replayed(function, PLAN, tensors, n, lambda given: (*given, *n), own=own)


def made_again(again: list[Any], function: Any, *arguments: Any, times: int = 3) -> int:
    """Run the function ``times`` times, and return how many of the runs were replays.

    Each run must return the same types, shapes and dtypes as an ordinary run.
    """
    again.clear()
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    for _ in range(times):
        got = replay.run_replayed(function, PLAN, tensors, tuple(set(arguments) - set(tensors)),
                                  lambda _: arguments)
        expected = function(PLAN, *arguments)
        values = [made.values() if isinstance(made, dict) else made for made in (got, expected)]
        pairs = zip(*values, strict=True)
        assert type(got) is type(expected)
        assert all(a is b is None or (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
    return len(again)


def test_scratch_has_room_for_all(card: Memory, again: list[Any]) -> None:
    assert made_again(again, one_result, X, 7) == 1
    [stage] = again[0].stages
    o, room = stage.made
    assert (o.shape, room.shape, room.dtype) == (X.shape, (640,), torch.uint8)
    assert all(like.untyped_storage().nbytes() <= 8 for like in stage.made)  # at most one element of storage
    at = stage.inside[0][0]
    assert stage.inside == ((at, 12), (at, 512))  # the byte offsets of first[3:] and second
    assert reads(card, one_result) == reads(card, one_result, again=True) and len(again) == 2


def entered(plan: Any, x: torch.Tensor) -> tuple[torch.Tensor]:
    moved(x, scratch := torch.empty_like(x))
    launch.enter()
    moved(scratch, o := torch.empty_like(x))
    return (o,)


@pytest.mark.parametrize("watched", [False, True])
def test_states_are_waited_for_in_their_place(watched: bool, card: Memory, again: list[Any]) -> None:
    """A replay waits for states at the same launch as an ordinary run.

    The recorded run may have waited or not. A replay waits only if its own states have not arrived yet.
    """
    def waits(coming: bool) -> list[int]:
        card.begin()
        at: list[int] = []

        def wait() -> None:
            at.append(len(card.read))
            torch.ones(3).sum()  # torch calls inside wait() are not part of the run
        with launch.entering(wait) if coming else nullcontext():
            run(entered, X)
        return at
    assert waits(False) == [] and waits(watched) == [1] * watched
    assert waits(True) == [1] and waits(False) == [] and len(again) == 2


def test_a_run_that_fails_leaves_no_wait_to_the_next() -> None:
    with pytest.raises(MemoryError), launch.entering(pytest.fail):
        raise MemoryError
    launch.enter()


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("case", ["chunk_simple_gla", "chunk_gated_delta_rule", "chunk_gla", "chunk_kda"])
def test_only_what_reads_states_waits_for_them(case: str, parts: int, card: Memory, again: list[Any],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Only kernels that read initial states wait for them, except in the first run.

    These are the scan and, for split sequences, the kernel that passes states between segments. In the first
    run launches are deferred, so all kernels that must compile wait.
    """
    monkeypatch.setattr(scans, "forced_parts", parts)
    x = leaves(T=600)
    gate = x["g"] if case in ("chunk_simple_gla", "chunk_gated_delta_rule") else -torch.rand(2, 600, 2, 16)
    if case in ("chunk_simple_gla", "chunk_gla"):
        del x["beta"]
    for number in range(4):
        card.begin()
        at: list[int] = []

        def wait(at: list[int] = at) -> None:
            at.append(len(card.read))
        with launch.entering(wait):
            getattr(flashlin, case)(**{**x, "g": gate}, initial_state=torch.zeros(2, 2, 16, 16))
        [first] = at
        late = [name for name, *_ in card.read[first:]]
        assert number == 0 or first > 0
        assert number == 0 or (len(late) == 1 + bool(parts) and late[0].startswith("carry") == bool(parts))
    assert len(again) == 2


def reads(card: Memory, function: Any, again: bool = False) -> list[Any]:
    """Return the data that the kernels read in a run with X; ``again`` makes it a replay if possible."""
    card.begin()
    if again:
        run(function, X, n=(7,))
    else:
        function(PLAN, X, 7)
    return list(card.read)


def test_scratch_that_nobody_reads_any_more_is_gone_before_the_last_results(
        card: Memory, again: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "WORTH", 1)
    assert made_again(again, one_result, X, 7) == 1
    early, late = again[0].stages
    assert [(like.shape, like.dtype) for like in early.made] == [((128,), torch.uint8), ((512,), torch.uint8)]
    assert [like.shape for like in late.made] == [X.shape] and (early.gone, late.gone) == ((), (2,))
    assert [len(stage.steps) for stage in again[0].stages] == [2, 1]
    assert reads(card, one_result) == reads(card, one_result, again=True) and len(again) == 2


def test_scratch_needed_at_the_same_step_lies_apart_and_other_scratch_together() -> None:
    draw = random.Random(0)
    for _ in range(200):
        steps = [sorted((draw.randrange(6), draw.randrange(6))) for _ in range(draw.randrange(9))]
        lives = {at: recipe.Life(128 * draw.randint(1, 8), *of) for at, of in enumerate(steps)}
        begins, size = recipe.packed(lives)
        bytes_at = [[begin for at, begin in begins.items() if lives[at].first <= step <= lives[at].last
                     for begin in range(begin, begin + lives[at].size, 128)] for step in range(6)]
        assert all(len(set(held)) == len(held) for held in bytes_at), (lives, begins)
        assert size == 128 + max((begin for held in bytes_at for begin in held), default=-128)
    together = {1: recipe.Life(256, 0, 1), 2: recipe.Life(128, 2, 3), 3: recipe.Life(128, 2, 2)}
    assert recipe.packed(together) == ({1: 0, 2: 0, 3: 128}, 256)


def with_kept(plan: Any, x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor]:
    moved(kept, scratch := torch.empty_like(x))
    moved(scratch, o := torch.empty_like(x))
    return (o,)


@pytest.mark.parametrize("own", [0, 1])
def test_what_backward_alone_has_goes_when_it_is_read(own: int, card: Memory,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of backward frees the memory of a tensor that only backward has.

    Other tensors that share its memory keep their values.
    """
    monkeypatch.setattr(recipe, "WORTH", 1)
    kept = torch.arange(16.0)
    for _ in range(4):
        one = kept.data
        run(with_kept, X, one, own=own)
    assert one.numel() == 16 * (1 - own) and kept.tolist() == [*range(16)]


def test_what_is_there_twice_stays(card: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "WORTH", 1)
    for _ in range(4):
        one = X.data
        run(with_kept, X, one, own=1)
    assert one.numel() == 16


def test_a_graph_that_is_kept_is_gone_through_again(card: Memory, again: list[Any],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "WORTH", 1)
    for _ in range(4):
        x = {name: t.requires_grad_() for name, t in leaves().items()}
        o = getattr(flashlin, OP)(**x)[0]
        card.read.clear()
        torch.autograd.grad(o, list(x.values()), torch.ones_like(o), retain_graph=True)
        first = list(card.read)
        card.read.clear()
        torch.autograd.grad(o, list(x.values()), torch.ones_like(o))
        assert [one[0] for one in card.read] == [one[0] for one in first] and len(first) == 3
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(o, list(x.values()), torch.ones_like(o))
    assert [len(recipe.stages) for recipe in again if "dict" in str(type(recipe.returned))] == [2] * 6


def test_a_run_is_told_by_all_that_decides_it(card: Memory, again: list[Any]) -> None:
    for arguments in ((X, 7), (X, 8), (X[:8], 7), (X[:8].double(), 7), (X.view(4, 4), 7), (X[::2], 7)):
        assert [made_again(again, one_result, *arguments, times=1) for _ in range(3)] == [0, 0, 1]
    assert [made_again(again, another_result, X, 7, times=1) for _ in range(3)] == [0, 0, 1]


def test_tensors_of_nothing_and_of_other_classes_make_ordinary_runs(card: Memory, again: list[Any]) -> None:
    assert made_again(again, one_result, X[:0], 7, times=5) == 0
    assert made_again(again, one_result, X.as_subclass(Own), 7, times=5) == 0


def test_what_torch_computes_is_not_made_again(card: Memory, again: list[Any]) -> None:
    assert made_again(again, computed, X, times=5) == 0


def test_what_torch_writes_is(card: Memory, again: list[Any]) -> None:
    assert made_again(again, written, X, times=5) == 3
    assert bool((run(written, X)["o"] == 5).all())


def test_a_slice_is_found_again_if_there_is_one_tensor_that_it_is_of(card: Memory, again: list[Any]) -> None:
    assert made_again(again, sliced, X, torch.zeros(3)) == 1
    assert made_again(again, sliced, X[:8], X[8:]) == 1
    for there in (2, 4):  # the slice x[4:] is also part of the other tensor, or begins where it does
        assert made_again(again, sliced, X[:8], X[there:]) == 0


def test_kernels_that_go_tritons_way_are_not_started_again(card: Memory, again: list[Any]) -> None:
    assert made_again(again, with_a_global, X, times=5) == 0


def test_memory_that_lies_elsewhere_is_moved(card: Memory, again: list[Any],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    assert made_again(again, one_result, X, 7) == 1
    monkeypatch.setattr(torch, "empty_like",
                        lambda x, **_: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape))
    o, = run(one_result, X, n=(7,))
    assert len(again) == 2 and o.data_ptr() % replay.ALIGNED == 0
    assert (o.shape, o.dtype) == (X.shape, X.dtype)


def test_releases_that_nobody_has_compared_are_not_even_asked(card: Memory, again: list[Any],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    with monkeypatch.context() as patch:
        patch.delattr(triton, "knobs")  # Triton 3.2 has no knobs
        assert made_again(again, one_result, X, 7, times=5) == 0


def test_another_device_than_the_current_one_makes_ordinary_runs(card: Memory) -> None:
    class There:
        device, shape, dtype = torch.device("cuda", 1), torch.Size([1]), torch.float32
        data_ptr = stride = lambda self: 16

    def function(plan: Any, x: Any) -> tuple[()]:
        return ()
    there: Any = There()
    with mock.patch.object(replay, "LOOKED_AT", frozenset({There})):
        for device, known in ((0, 0), (1, 1)):
            card.device = device
            run(function, there)
            assert len(replay._recipes) == known


# --- calls with the shapes of an earlier call ---

def test_a_wrong_argument_is_still_an_error_after_a_right_one(card: Memory) -> None:
    for _ in range(3):
        getattr(flashlin, OP)(**leaves(), scale=1.0)
    wrong = leaves()
    for change, says in ((dict(v=wrong["v"][:, 1:]), "v: got shape"), (dict(g=wrong["g"].long()), "g: got"),
                         (dict(beta=None), "beta: got"), (dict(scale="1"), "scale: got"),
                         (dict(scale=True), "scale: got"),
                         (dict(output_final_state=[]), "output_final_state"),
                         (dict(q=wrong["q"].to_sparse()), "q: got"),
                         (dict(initial_state=torch.zeros(1, 2, 16, 16)), "initial_state: got"),
                         (dict(k=wrong["k"].to("meta")), "k: got device")):
        with pytest.raises((TypeError, ValueError), match=says):
            getattr(flashlin, OP)(**{**leaves(), **change})


def test_checks_are_not_repeated_for_the_same_facts(card: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(chunked, "check_qkv", lambda *tensors: checked.append(tensors))
    for _ in range(3):
        getattr(flashlin, OP)(**leaves())
    assert len(checked) == 1
    getattr(flashlin, OP)(**leaves(T=41))
    with torch.no_grad():
        getattr(flashlin, OP)(**leaves())
    getattr(flashlin, OP)(**{name: x.requires_grad_() for name, x in leaves().items()})
    assert len(checked) == 4


def test_a_subclass_is_checked_each_time(card: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(chunked, "check_qkv", lambda *tensors: checked.append(tensors))
    for _ in range(3):
        getattr(flashlin, OP)(**{**leaves(), "k": leaves()["k"].as_subclass(Own)})
    assert len(checked) == 3


def test_a_tensor_without_strides_is_no_view_of_one_element(card: Memory) -> None:
    one = torch.zeros((), dtype=torch.bfloat16).expand(2, 40, 2, 16)
    for _ in range(2):
        getattr(flashlin, OP)(**{**leaves(), "q": one})
    with pytest.raises(TypeError, match="q: got a sparse"):
        getattr(flashlin, OP)(**{**leaves(), "q": one.contiguous().to_sparse()})
    with pytest.raises(TypeError, match="q: got a nested"):
        getattr(flashlin, OP)(**{**leaves(), "q": torch.nested.nested_tensor([one[0], one[1]])})


MORE_THAN_CASTS: dict[str, tuple[str, dict[str, Any]]] = {
    "reverse": ("fused_recurrent_simple_gla", {"reverse": True}),
    "negative scale": ("chunk_simple_gla", {"scale": -0.5}),
    "odd": ("chunk_simple_gla", {"v": torch.randn(2, 40, 2, 13).bfloat16()}),
    "a constant": ("chunk_simple_gla", {"g": None, "g_gamma": -torch.rand(2)})}


@pytest.mark.parametrize("name", MORE_THAN_CASTS)
def test_kernels_get_the_same_where_they_get_more_than_casts(name: str, card: Memory) -> None:
    op, change = MORE_THAN_CASTS[name]
    x = {**{key: value for key, value in leaves().items() if key != "beta"}, **change}
    x = {key: t.requires_grad_() if isinstance(t, torch.Tensor) else t for key, t in x.items()}
    read = []
    for _ in range(4):
        card.begin()
        o, _ = getattr(flashlin, op)(**x)
        gradients = torch.autograd.grad(o, [x["q"], x["k"], x["v"]], torch.ones_like(o), allow_unused=True)
        read.append((list(card.read), [gradient is None for gradient in gradients], o.shape, o.dtype))
        if name == "a constant":
            o, _ = getattr(flashlin, op)(**x)
            assert torch.autograd.grad(o.sum(), x["g_gamma"], allow_unused=True) == (None,)
    assert read[0][0] and all(one == read[0] for one in read)


def test_edges_are_looked_at_each_time(card: Memory) -> None:
    x = {name: t.flatten(0, 1)[None] for name, t in leaves().items()}
    for edges in ([0, 30, 80], [0, 30, 80], [0, 30, 80]):
        getattr(flashlin, OP)(**x, cu_seqlens=torch.tensor(edges))
    with pytest.raises(ValueError, match="cu_seqlens: got 30 after 40"):
        getattr(flashlin, OP)(**x, cu_seqlens=torch.tensor([0, 40, 30, 80]))
    with pytest.raises(ValueError, match="cu_seqlens: got a last value of 79"):
        getattr(flashlin, OP)(**x, cu_seqlens=torch.tensor([0, 30, 79]))


SLOW_TO_IMPORT = """
import sys
import torch, triton, flashlin
from benchmarks.host import Idle
from benchmarks.pretended import pretended
from flashlin.compat import target
from flashlin.ops._common import replay
target.pretend(target.parse(f"triton={triton.__version__},sm=90"))
x = [torch.randn(1, 64, 1, 16).bfloat16() for _ in "qkv"]
with pretended(Idle()), flashlin.settings(canary="off"):
    for _ in range(4):
        flashlin.chunk_retention(*x)
assert any(isinstance(one, replay.Recipe) for one in replay._recipes.values())
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_watching_a_run_imports_no_compiler() -> None:
    """Recording a run does not import the compiler of torch.

    Such an import would make the second call take seconds.
    """
    done = subprocess.run([sys.executable, "-c", SLOW_TO_IMPORT], capture_output=True, text=True, timeout=100,
                          check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr[-2000:]
