"""Runs that are made again start the same kernels on the same data as ordinary ones: on a card that is not
there, where what a kernel would write is a name for what it read."""
from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from torch.utils.flop_counter import FlopCounterMode

import flashlin
from benchmarks.pretended import Driver, Started, pretended
from flashlin.compat import launch
from flashlin.compat import target as machine
from flashlin.ops._common import chunked, repeated
from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case
from matrix.workload import as_in_a_case
from tests.share import share

REPEATED = [case for case in CASES if case.op.startswith(("chunk_", "fused_recurrent_", "fused_chunk_"))
            and "conv" not in case.op]


class Memory(Driver):
    """A card whose kernels leave behind, wherever one of their pointers points, a name made of the kernel,
    its grid, its numbers and what was to be found at each pointer. read: what kernels found, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, int] = {}
        self.fresh: list[torch.Tensor] = []
        self.read: list[Any] = []

    def begin(self) -> None:
        """Another call: what kernels have written is forgotten."""
        self.names.clear(), self.fresh.clear(), self.read.clear()

    def started_with(self, x: torch.Tensor) -> bool:
        """Whether some kernel had a pointer to x."""
        return x.data_ptr() in self.names

    def found(self, address: int) -> Any:
        if address in self.names:
            return self.names[address]
        for x in self.fresh:
            begin = x.untyped_storage().data_ptr()
            if begin <= address < begin + x.untyped_storage().nbytes():
                return "nothing"
        return ctypes.string_at(address, 8) if address else "no address"

    def launched(self, one: Started) -> None:
        kinds = map(str, one.compiled.signature.values())
        given = enumerate(zip(kinds, one.arguments, strict=True))
        places = {at: value if isinstance(value, int) else value.data_ptr()
                  for at, (kind, value) in given if kind[0] == "*"}
        seen = tuple(self.found(places[at]) if at in places else repr(value)
                     for at, value in enumerate(one.arguments))
        self.read.append((one.compiled.fn.__name__, id(one.compiled), one.grid, one.stream, seen))
        for at, address in places.items():
            self.names[address] = hash((self.read[-1], at))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(repeated, "_recipes", {})
    fake = Memory()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            fake.fresh.append(function(*arguments, **options))
            return fake.fresh[-1]
        return made
    for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(home, name, noting(getattr(home, name)))
    machine.pretend(machine.parse(f"triton={triton.__version__},sm=90"))
    with pretended(fake), flashlin.settings(canary="off"):
        yield fake


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recipes of runs that were made again."""
    seen, function = list[Any](), repeated._again

    def noting(recipe: Any, *rest: Any) -> Any:
        seen.append(recipe)
        return function(recipe, *rest)
    monkeypatch.setattr(repeated, "_again", noting)
    return seen


@pytest.mark.parametrize("case", share(REPEATED, 0, 12), ids=lambda case: f"{case.op} {case.id}")
def test_cases_read_the_same_each_time(case: Case, card: Memory, again: list[Any]) -> None:
    chance, elsewhere, before = random.Random(0), list[Any](), None
    for number in range(5):
        elsewhere.append([torch.zeros(chance.randrange(1, 9000)) for _ in range(20)])
        card.begin()
        again.clear()
        as_in_a_case(case, torch.bfloat16, gradients=True)
        assert before is None or card.read == before
        before = list(card.read)
        assert not again or number > 1
    assert again or "hgrn" in case.op


# --- what makes a run an ordinary one ---

OP = "chunk_gated_delta_rule"


def leaves(dtype: torch.dtype = torch.bfloat16, T: int = 40) -> dict[str, torch.Tensor]:
    x = {name: torch.randn(2, T, 2, 16).to(dtype) for name in ("q", "k", "v")}
    return {**x, "g": -torch.rand(2, T, 2), "beta": torch.rand(2, T, 2).to(dtype)}


def runs(again: list[Any], times: int = 4, **change: Any) -> int:
    """How many of so many calls, forward alone, are made again."""
    again.clear()
    for _ in range(times):
        getattr(flashlin, OP)(**{**leaves(), **change})
    return len(again)


def test_the_third_run_is_the_first_that_is_made_again(card: Memory, again: list[Any]) -> None:
    assert [runs(again, 1) for _ in range(4)] == [0, 0, 1, 1]


def beside(x: torch.Tensor) -> torch.Tensor:
    """The same at an address that is no multiple of 16."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return moved.copy_(x)


def test_other_facts_are_another_run(card: Memory, again: list[Any]) -> None:
    assert runs(again) == 2
    for change in (leaves(T=41), leaves(torch.float16), {"v": beside(leaves()["v"])}, {"scale": 0.5},
                   {"output_final_state": True}, {"initial_state": torch.zeros(2, 2, 16, 16)}):
        assert [runs(again, 1, **change) for _ in range(3)] == [0, 0, 1], change.keys()
    assert runs(again) == 4


def test_tensors_at_one_address_are_told_apart_by_nobody(card: Memory, again: list[Any]) -> None:
    x = leaves()
    assert runs(again, q=x["q"], k=x["q"]) == 0
    assert runs(again) == 2 and runs(again, q=x["q"], k=x["q"]) == 0


def test_slices_of_one_tensor_are_told_apart(card: Memory, again: list[Any]) -> None:
    """Kernels get copies of the first kind; the second they read where they lie."""
    q, k, v = torch.randn(2, 40, 2, 48).bfloat16().split(16, -1)
    assert runs(again, q=q, k=k, v=v) == 2
    q, k, v = torch.randn(3, 2, 40, 2, 16).bfloat16()
    other = torch.randn(2, 40, 2, 16).bfloat16()
    assert runs(again, q=q, k=k, v=v) == 4  # the same facts as the leaves', which were seen when copied
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


def test_settings_are_obeyed(card: Memory, again: list[Any]) -> None:
    assert runs(again) == 2
    with flashlin.settings(path="torch"):
        assert runs(again) == 0
    with flashlin.settings(invariant=True):  # another plan, if of the same kernels
        assert [runs(again, 1) for _ in range(3)] == [0, 0, 1]
    torch.set_float32_matmul_precision("high")
    try:
        assert [runs(again, 1) for _ in range(3)] == [0, 0, 1]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert runs(again) == 4


def test_a_changed_source_is_compiled_again(card: Memory, again: list[Any]) -> None:
    assert runs(again) == 2
    [recipe, _] = again
    recipe.compiled[0].of.device_caches.clear()
    assert [runs(again, 1) for _ in range(3)] == [0, 0, 0]
    assert runs(again) == 4 and again[0].compiled != recipe.compiled


def test_a_run_in_which_torch_computes_stays_ordinary(card: Memory, again: list[Any]) -> None:
    """Two value heads to each of q's: their gradients are added up."""
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


# --- calls like an earlier one ---

def test_a_wrong_argument_is_still_an_error_after_a_right_one(card: Memory) -> None:
    for _ in range(3):
        getattr(flashlin, OP)(**leaves())
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
