"""Tests that flashlin's exceptions keep their content when they are copied or sent to another process."""
from __future__ import annotations

import copy
import multiprocessing
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import flashlin
from flashlin import dispatch
from flashlin.__main__ import Unloadable
from flashlin.compat.target import parse
from flashlin.guards.plan_types import Problem, UnsupportedError
from flashlin.integrations.on_a_cpu import NoCpuVersion
from flashlin.ops._common.numerics import NumericsWarning
from flashlin.policy import Policy
from flashlin.testing.environments import NotInstallable

FOLDER = Path(flashlin.__file__).parent


def refusal(op: str = "chunk_simple_gla") -> UnsupportedError:
    asked = Problem(op, "simple_gla", "chunk", 2, 256, 8, 64, 64, 2, "bfloat16")
    return UnsupportedError(dispatch.plan(asked, parse("triton=3.2.0,sm=75,torch=2.6.0"), Policy("strict")))


EXAMPLES: dict[str, Exception] = {"UnsupportedError": refusal(),
                                  "NotInstallable": NotInstallable("pip: no wheel"),
                                  "NoCpuVersion": NoCpuVersion("Attention cannot run this call on a CPU"),
                                  "NumericsWarning": NumericsWarning("chunk_gla: got g of 0.5"),
                                  "Unloadable": Unloadable("flashlin cannot be loaded")}


def refuse(op: str) -> None:
    raise refusal(op)


def test_every_public_exception_of_ours_has_an_example_here() -> None:
    exceptions = {name for path in FOLDER.rglob("*.py")
                  for name in re.findall(r"^class ([A-Z]\w*)\(.*(?:Error|Exception|Warning)\):",
                                         path.read_text(), re.MULTILINE)}
    assert exceptions == set(EXAMPLES)


@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
                         ids=["pickle", "copy", "deepcopy"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_exception_can_be_copied(name: str, again: Callable[[Exception], Exception]) -> None:
    error = again(EXAMPLES[name])
    assert type(error) is type(EXAMPLES[name]) and str(error) == str(EXAMPLES[name]) and vars(error) == vars(
        EXAMPLES[name])


def test_what_was_added_to_an_exception_goes_with_it() -> None:
    error = refusal()
    error.rank = 3  # type: ignore[attr-defined]
    assert copy.copy(error).rank == 3 and pickle.loads(pickle.dumps(error)).plan == error.plan  # type: ignore[attr-defined]


def test_a_worker_of_a_pool_hands_its_refusal_back() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply_async(refuse, ("chunk_retention",))
        with pytest.raises(UnsupportedError, match="chunk_retention cannot run here"):
            found.get(timeout=30)
