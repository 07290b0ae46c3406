"""Fixtures that several test files share. ``fresh``, ``interpreter`` and ``in_sh`` apply to every test."""
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
from flashlin.diagnostics import environment, typical_plans
from flashlin.guards import checks, launch_table, local_results
from flashlin.ops._common import compile_ahead, pipeline, replay
from flashlin.testing.compile import Compiler, Job, Result
from flashlin.testing.environments import NotInstallable, triton_environment
from flashlin.trial import canary
from tests.share import ALTERNATE, half, turn

torch.set_num_threads(1)  # test tensors are so small that more threads only add overhead
GARBAGE = (100_000, 50, 100)  # for gc.set_threshold: far above Python's defaults
Compile = Callable[[str, list[Job]], list[Result]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In make test, run half of the tests that are marked ``alternate``; the commit decides which half."""
    if ALTERNATE:
        marked = [item.nodeid for item in items if item.get_closest_marker("alternate")]
        left_out = {*marked} - {*half(marked, turn())}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_collection_finish() -> None:
    """Exclude everything that is already loaded from garbage collection, and collect less often.

    With Python's defaults, garbage collection takes a sixth of the time of the interpreter tests.
    """
    gc.freeze()
    gc.set_threshold(*GARBAGE)


@pytest.fixture(scope="session")
def modules_read() -> None:
    """Let Hypothesis scan the checkout for constants before a test draws its first example.

    Hypothesis scans once, at an early draw, and takes two seconds. Its health check would otherwise report
    these seconds as slow input generation in a test.
    """
    @settings(max_examples=5, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers())
    def draw(_: int) -> None:
        pass
    draw()


def forget() -> None:
    """Reset flashlin to the state of a process that has just started.

    This clears probed and simulated machines, plans, reported warnings, trials and compiled kernels. It also
    removes a replaced launch function, and the policy is read from the environment again.
    """
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
    if "torch._dynamo" in sys.modules:  # otherwise nothing needs a reset, and the import takes seconds
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[Callable[[], None]]:
    """Reset flashlin before and after every test, and provide the function that resets it in between."""
    forget()
    policy.current()
    yield forget
    forget()


@pytest.fixture(scope="module", autouse=True)
def interpreter(request: pytest.FixtureRequest) -> None:
    """Fail the tests in tests/interpret unless TRITON_INTERPRET=1 was set when Triton was imported."""
    if request.path.parent.name == "interpret" and not interpreting():
        pytest.fail("TRITON_INTERPRET=1 is not set: run TRITON_INTERPRET=1 pytest tests/interpret")


# --- settings ---

@pytest.fixture
def default_settings(monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> None:
    """Unset all environment variables of flashlin and Triton, and reset flashlin."""
    for name in list(os.environ):
        if name.startswith(("FLASHLIN_", "TRITON_")):
            monkeypatch.delenv(name)
    fresh()


@pytest.fixture(autouse=True)
def in_sh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make advice use the syntax of sh, regardless of the shell that started the tests."""
    monkeypatch.setattr(environment, "shell", lambda: "sh")


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let doctor take every kernel as proven on every GPU, so that the verdict depends on other facts alone."""
    monkeypatch.setattr(typical_plans, "doubted", lambda plan: typical_plans.PROVEN)


@pytest.fixture
def gpu_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Provide a fake libcuda and ldconfig, for tests that simulate the rest of a GPU machine."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "libcuda.so.1").touch()
    (folder / "ldconfig").write_text(f"#!/bin/sh\necho 'libcuda.so.1 (libc6) => {folder}/libcuda.so.1'\n")
    (folder / "ldconfig").chmod(0o755)
    monkeypatch.setattr(environment, "LDCONFIG", str(folder / "ldconfig"))


@pytest.fixture
def torch_path() -> Iterator[None]:
    """Run a test on the torch path. Kernels are tested in the interpreter and by the GPU records instead."""
    with flashlin.settings(path="torch"):
        yield


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh: Callable[[], None]) -> Path:
    """Set FLASHLIN_HOME to a folder of this test that does not exist yet, and return its path."""
    monkeypatch.setenv("FLASHLIN_HOME", str(tmp_path / "home"))
    fresh()
    return tmp_path / "home"


# --- launches ---

@pytest.fixture
def starts() -> list[str]:
    """Return a list that receives the name of every kernel that is started from now on."""
    seen: list[str] = []

    def noting(launch: door.Launch, *rest: Any) -> None:
        seen.append(launch.kernel)
        door._start(launch, *rest)
    door.replace_starter(noting)
    return seen


@pytest.fixture
def axis_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lowers the limits of a grid's axes to (x, y, z) programs.

    Small calls then exceed a limit and run in several launches.
    """
    def limited(*programs: int) -> None:
        monkeypatch.setattr(checks, "AXIS_LIMITS", programs)
        dispatch.plan.cache_clear()
    return limited


@pytest.fixture
def no_host_sync() -> Iterator[Callable[[], None]]:
    """Return a function; once it is called, every host synchronization raises until the end of the test."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


# --- every Triton release, without a GPU: launches are recorded here and compiled in child processes ---

@pytest.fixture(scope="session")
def compiled() -> Iterator[Compile]:
    """Return a function of (version, jobs) that compiles jobs under a Triton release and returns the results.

    One child process serves each release. If the release cannot be installed, the test is skipped; in CI it
    fails, because skips go unnoticed there.
    """
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
    """Call an op of the simple GLA family forward and backward with gate, initial state and final state.

    dtype: dtype of q, k and v.
    others: dtype of gate and state.
    edges: boundaries of packed sequences; None for a dense batch.
    """
    def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)
    N = B if edges is None else len(edges) - 1
    cu_seqlens = None if edges is None else torch.tensor(edges, dtype=torch.int32)
    o, ht = getattr(flashlin, op)(leaf(B, T, H, K), leaf(B, T, H, K), leaf(B, T, H, V),
                                  g=leaf(B, T, H, dtype=others), initial_state=leaf(N, H, K, V, dtype=others),
                                  output_final_state=True, cu_seqlens=cu_seqlens)
    torch.autograd.backward([o, ht], [torch.zeros_like(o), torch.zeros_like(ht)])


def noted(monkeypatch: pytest.MonkeyPatch, home: Any, name: str) -> list[Any]:
    """Wrap the function ``home.name`` and return a list that receives the first argument of every call."""
    seen, function = list[Any](), getattr(home, name)

    def noting(first: Any, *rest: Any, **options: Any) -> Any:
        seen.append(first)
        return function(first, *rest, **options)
    monkeypatch.setattr(home, name, noting)
    return seen


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that receives every kernel that starts through Triton's JITFunction.run."""
    return noted(monkeypatch, triton.JITFunction, "run")


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that receives the recipe of every replay."""
    return noted(monkeypatch, replay, "_replay")
