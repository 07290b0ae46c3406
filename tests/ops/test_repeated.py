"""Runs that are made again start the same kernels on the same data as ordinary ones: on a card that is not
there, where what a kernel would write is a name for what it read."""
from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton

import flashlin
from benchmarks.pretended import Driver, pretended
from flashlin.compat import launch
from flashlin.compat import target as machine
from flashlin.ops._common import repeated
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

    def found(self, address: int) -> Any:
        if address in self.names:
            return self.names[address]
        for x in self.fresh:
            begin = x.untyped_storage().data_ptr()
            if begin <= address < begin + x.untyped_storage().nbytes():
                return "nothing"
        return ctypes.string_at(address, 8) if address else "no address"

    def _launcher(self, src: Any, metadata: Any) -> Any:
        pointers = [str(kind).startswith("*") for kind in src.signature.values()]

        def start(x: int, y: int, z: int, stream: int, function: object, *rest: Any) -> None:
            arguments = rest[4:]
            places = {at: value if isinstance(value, int) else value.data_ptr()
                      for at, value in enumerate(arguments) if pointers[at]}
            seen = tuple(self.found(places[at]) if at in places else repr(value)
                         for at, value in enumerate(arguments))
            self.read.append((src.fn.__name__, id(src), (x, y, z), stream, seen))
            for at, address in places.items():
                self.names[address] = hash((self.read[-1], at))
        return start


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
    for call in range(5):
        elsewhere.append([torch.zeros(chance.randrange(1, 9000)) for _ in range(20)])
        card.begin()
        again.clear()
        as_in_a_case(case, torch.bfloat16, gradients=True)
        assert before is None or card.read == before
        before = list(card.read)
        assert not again or call > 1
    print(case.op, case.id, len(before), len(again), sum(len(recipe.steps) for recipe in again))
