"""Fixtures that more than one file of tests needs; ``fresh`` and ``interpreter`` hold for every test."""
from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashlin
from flashlin import dispatch, policy
from flashlin.compat import launch as door
from flashlin.compat import target as machine
from flashlin.compat.installed_triton import interpreting
from flashlin.diagnostics import environment
from flashlin.guards import checks, launch_table, local_results
from flashlin.ops._common import compile_ahead, pipeline, replay
from flashlin.testing.compile import Compiler, Job, Result
from flashlin.testing.environments import NotInstallable, triton_environment
from flashlin.trial import canary

torch.set_num_threads(1)  # the tensors are small
GARBAGE = (100_000, 50, 100)  # allocations, and collections of younger objects, from one collection to the next
Compile = Callable[[str, list[Job]], list[Result]]


def pytest_collection_finish() -> None:
    """What the modules have loaded stays: looking for garbage in it, as often as Python does, takes a sixth of
    the time of the interpreter's tests."""
    gc.freeze()
    gc.set_threshold(*GARBAGE)


@pytest.fixture(scope="session")
def modules_read() -> None:
    """Hypothesis looks through every module of the checkout for constants, once, at an early draw: two
    seconds, which its own health check would count as inputs that are slow to make."""
    @settings(max_examples=5, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers())
    def draw(_: int) -> None:
        pass
    draw()


def forget() -> None:
    """Make this process one that has just begun: no machine is probed or pretended, nothing planned, told,
    tried or compiled, kernels are really started, and the policy is that of the environment."""
    machine.pretend(None)
    door.replace_starter(None)
    policy._current = None
    for cached in (dispatch.plan, launch_table._shipped, launch_table.slow_on, local_results.local,
                   local_results._tell):
        cached.cache_clear()
    for kept in (machine._probed, pipeline._told, local_results._unwritten, canary._done, canary.settled,
                 replay.calls, replay._recipes, door._kernels, compile_ahead._compiling,
                 compile_ahead._foreseen):
        kept.clear()
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[Callable[[], None]]:
    """Before and after every test all is forgotten; what this gives forgets it in between."""
    forget()
    policy.current()
    yield forget
    forget()


@pytest.fixture(scope="module", autouse=True)
def interpreter(request: pytest.FixtureRequest) -> None:
    """Triton decides when it is imported, so without the variable everything in tests/interpret fails."""
    if request.path.parent.name == "interpret" and not interpreting():
        pytest.fail("TRITON_INTERPRET=1 is not set: run TRITON_INTERPRET=1 pytest tests/interpret")


# --- settings ---

@pytest.fixture
def default_settings(monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> None:
    """No variable of flashlin's or Triton's is set."""
    for name in list(os.environ):
        if name.startswith(("FLASHLIN_", "TRITON_")):
            monkeypatch.delenv(name)
    fresh()


@pytest.fixture(autouse=True)
def in_sh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are those of sh, whatever shell the tests are started from."""
    monkeypatch.setattr(environment, "shell", lambda: "sh")


@pytest.fixture
def gpu_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a machine with a GPU has around Triton, for tests that simulate the rest of it."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "libcuda.so.1").touch()
    (folder / "ldconfig").write_text(f"#!/bin/sh\necho 'libcuda.so.1 (libc6) => {folder}/libcuda.so.1'\n")
    (folder / "ldconfig").chmod(0o755)
    monkeypatch.setattr(environment, "LDCONFIG", str(folder / "ldconfig"))


@pytest.fixture
def torch_path() -> Iterator[None]:
    """For tests of the torch path and what is around it; kernels have the interpreter and the GPU records."""
    with flashlin.settings(path="torch"):
        yield


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh: Callable[[], None]) -> Path:
    """A home of the test's own, in which nothing is kept yet."""
    monkeypatch.setenv("FLASHLIN_HOME", str(tmp_path / "home"))
    fresh()
    return tmp_path / "home"


# --- launches ---

@pytest.fixture
def starts() -> list[str]:
    """Names of the kernels that were started."""
    seen: list[str] = []

    def noting(launch: door.Launch, *rest: Any) -> None:
        seen.append(launch.kernel)
        door._start(launch, *rest)
    door.replace_starter(noting)
    return seen


@pytest.fixture
def axis_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """axis_limits(x, y, z): from now on a grid's axes hold so many programs, so that batches go in parts."""
    def limited(*programs: int) -> None:
        monkeypatch.setattr(checks, "AXIS_LIMITS", programs)
        dispatch.plan.cache_clear()
    return limited


@pytest.fixture
def no_host_sync() -> Iterator[Callable[[], None]]:
    """A host sync is an error from the call of what this gives to the end of the test."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


# --- every Triton release, without a GPU: launches recorded here, compiled in children that import it ---

@pytest.fixture(scope="session")
def compiled() -> Iterator[Compile]:
    """compiled(version, jobs) -> results. A release is started once. One that cannot be installed skips the
    test; in CI it fails: nobody looks at skips there."""
    compilers: dict[str, Compiler] = {}

    def run(version: str, jobs: list[Job]) -> list[Result]:
        try:
            environment = triton_environment(version)
        except NotInstallable as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        if version not in compilers:
            compilers[version] = Compiler(environment)
        results = [result for _, result in sorted(compilers[version].compiling(jobs))]
        assert {result.triton for result in results} <= {version}
        return results
    yield run
    for compiler in compilers.values():
        compiler.close()


@pytest.fixture(scope="session")
def gated() -> Callable[..., None]:
    return call_gated


def call_gated(
    op: str = "chunk_simple_gla",
    dtype: torch.dtype = torch.bfloat16,
    *,
    B: int = 2,
    T: int = 128,
    H: int = 4,
    K: int = 64,
    V: int = 64,
    others: torch.dtype = torch.float32,
    edges: list[int] | None = None,
) -> None:
    """An op of the scalar-decay family with all there is, forward and backward: gate, states in and out.
    others: dtype of gate and state."""
    def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)
    N = B if edges is None else len(edges) - 1
    cu_seqlens = None if edges is None else torch.tensor(edges, dtype=torch.int32)
    o, ht = getattr(flashlin, op)(leaf(B, T, H, K), leaf(B, T, H, K), leaf(B, T, H, V),
                                  g=leaf(B, T, H, dtype=others), initial_state=leaf(N, H, K, V, dtype=others),
                                  output_final_state=True, cu_seqlens=cu_seqlens)
    torch.autograd.backward([o, ht], [torch.zeros_like(o), torch.zeros_like(ht)])


def noted(monkeypatch: pytest.MonkeyPatch, home: Any, name: str) -> list[Any]:
    """The first arguments of every call of home.name from now on."""
    seen, function = list[Any](), getattr(home, name)

    def noting(first: Any, *rest: Any, **options: Any) -> Any:
        seen.append(first)
        return function(first, *rest, **options)
    monkeypatch.setattr(home, name, noting)
    return seen


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that Triton's own launch has started."""
    return noted(monkeypatch, triton.JITFunction, "run")


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recipes of runs that were made again."""
    return noted(monkeypatch, replay, "_replay")
