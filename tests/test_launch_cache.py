"""Tests of direct starts: they must run the same compiled kernels with the same arguments as Triton's launch.

A simulated driver records the launches. tests/gpu/test_launch.py runs kernels on a real GPU.
"""
from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import flashlin
from benchmarks.pretended import Driver, Started, pretended
from flashlin.compat import launch, launch_cache, releases
from flashlin.compat import target as machine
from flashlin.compat.launch_cache import Kernel
from flashlin.compat.releases import nearest
from flashlin.compat.versions import release
from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case
from flashlin.testing.environments import NotInstallable, triton_environment
from matrix.workload import as_in_a_case
from tests.direct import needs_direct_starts
from tests.share import WHOLE, share

pytestmark = needs_direct_starts

LISTS = 200 if WHOLE else 60
OTHERS = [version for version in ("3.6.0",) if version != triton.__version__]
HERE = "TEST_DIRECT_UNDER"  # variable that is set in the child process with another Triton release
LIMIT = tl.constexpr(3)


@triton.jit(do_not_specialize=["T", "p"], do_not_specialize_on_alignment=["y"])
def example(x, y, p, n, m, T, r: tl.int64, f, K: tl.constexpr, FLAG: tl.constexpr):
    tl.store(x, 1)


@triton.jit
def with_a_global(x, n, K: tl.constexpr):
    tl.store(x, LIMIT)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    assert triton.__version__ == os.environ.get(HERE, triton.__version__)
    for kernel in (example, with_a_global):
        kernel.device_caches.clear()
    monkeypatch.setattr(launch, "_kernels", {})
    with pretended(Driver()) as fake:
        yield fake


BYTES = torch.zeros(4096, dtype=torch.uint8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn)
INTEGERS = (0, 1, -1, 2, 15, 16, 17, 48, -16, 2**31 - 1, 2**31, -2**31, -2**31 - 1, -2**31 - 16, 2**32, 2**40,
            2**40 + 1, 2**63 - 1, 2**63 - 16, 2**63, 2**64 - 16, -2**63)


def tensor(chance: random.Random) -> Any:
    """Return a random tensor, parameter or None.

    A tensor has a random dtype and starts at a random offset in memory that its dtype allows.
    """
    dtype = chance.choice(DTYPES)
    place = chance.choice((0, 0, 16, 8, 4, 32)) + (chance.choice((0, 1)) if dtype.itemsize == 1 else 0)
    x = BYTES[place:place + 64].view(dtype)
    kind = chance.choice(("tensor", "tensor", "tensor", "parameter", "none"))
    return {"none": None, "tensor": x, "parameter": torch.nn.Parameter(x, requires_grad=False)}[kind]


def integer(chance: random.Random) -> int:
    return chance.choice(INTEGERS)


def scalar(chance: random.Random) -> Any:
    return chance.choice((integer(chance), integer(chance), True, False, None, 0.5, 1.0))


def constant(chance: random.Random) -> Any:
    return chance.choice((16, 64, 1, True, 0.5, None, "tf32"))


# The random generator of each argument of ``example``, then of the numbers of warps and stages.
DRAWN: tuple[Callable[[random.Random], Any], ...] = (
    tensor, tensor, tensor, integer, scalar, integer, integer, scalar, constant,
    lambda chance: chance.choice((True, False)), lambda chance: chance.choice((2, 4)),
    lambda chance: chance.choice((1, 2)))


def neighbours(chance: random.Random) -> Iterator[list[Any]]:
    """Yield a random list of arguments, and then lists that differ from it in one argument only.

    A cache that ignores an argument would confuse two of these lists.
    """
    first = [draw(chance) for draw in DRAWN]
    yield first
    for at, draw in enumerate(DRAWN):
        for _ in range(4):
            yield [*first[:at], draw(chance), *first[at + 1:]]


def same(one: Started, other: Started) -> bool:
    return one[:-1] == other[:-1] and len(one.arguments) == len(other.arguments) and all(
        a is b for a, b in zip(one.arguments, other.arguments, strict=True))


def test_random_arguments_start_what_tritons_launch_starts(card: Driver, theirs: list[Any]) -> None:
    chance, kernel = random.Random(0), Kernel(example)
    lists = [one for _ in range(LISTS) for one in neighbours(chance)]
    for *values, warps, stages in lists:
        grid, card.device = chance.randrange(1, 9), chance.choice((0, 1))
        kernel.start(grid, tuple(values), warps, stages)
        example[(grid,)](*values, num_warps=warps, num_stages=stages)
        own, expected = card.started[-2:]
        assert same(own, expected), (values, warps, stages)
        assert own.grid == (grid, 1, 1) and own.stream == card.streams[card.device]
    assert len({id(one.compiled) for one in card.started}) > len(lists) / 4  # many different kernels
    assert len(theirs) < 1.9 * len(lists)  # some launches were started directly
    started = len(theirs)
    for *values, warps, stages in lists:
        kernel.start(1, tuple(values), warps, stages)
        kernel.start(1, tuple(values), warps, stages)
    # Half of the lists are new on this device; for them, only the first start goes through Triton's launch.
    assert len(theirs) - started < len(lists)


X = BYTES[:64].view(torch.float32)
VALUES = (X, X, X, 8, 8, 8, 8, 0.5, 16, True)


def repeated(card: Driver, theirs: list[Any], kernel: Kernel, values: tuple[Any, ...] = VALUES) -> int:
    """Start a kernel twice with equal arguments and return how often Triton's own launch ran."""
    theirs.clear()
    for _ in range(2):
        kernel.start(3, values, 4, 2)
    return len(theirs)


def test_only_the_first_start_goes_tritons_way(card: Driver, theirs: list[Any]) -> None:
    kernel = Kernel(example)
    assert repeated(card, theirs, kernel) == 1
    assert repeated(card, theirs, kernel) == 0
    card.streams[0] = 99  # a direct start must use the current stream
    kernel.start(3, VALUES, 4, 2)
    assert card.started[-1].stream == 99 and same(*[one._replace(stream=0) for one in card.started[-2:]])


def test_whoever_watches_sees_every_start(card: Driver, theirs: list[Any],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, seen, runtime = Kernel(example), list[Any](), triton.knobs.runtime
    repeated(card, theirs, kernel)
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        chain.add(seen.append)
        assert repeated(card, theirs, kernel) == 2 == len(seen)
        chain.remove(seen.append)
        seen.clear()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, seen.append)
            assert repeated(card, theirs, kernel) == 2 == len(seen)
            patch.setattr(runtime, name, None)
            assert repeated(card, theirs, kernel) == 0
        seen.clear()
    example.add_pre_run_hook(lambda *values, **options: seen.append(values))
    assert repeated(card, theirs, kernel) == 2 == len(seen)
    example.pre_run_hooks.clear()
    monkeypatch.setattr(runtime, "add_stages_inspection_hook", lambda: ("key", "hash"))
    assert repeated(card, theirs, kernel) == 2
    monkeypatch.undo()
    assert repeated(card, theirs, kernel, VALUES) == 0


@pytest.mark.parametrize(("where", "name", "value"), [
    (lambda: triton.knobs.runtime, "debug", True),
    (lambda: triton.knobs.compilation, "instrumentation_mode", "fpsan"),
    (lambda: example, "debug", True)])
def test_a_switch_makes_another_kernel(where: Callable[[], Any], name: str, value: Any, card: Driver,
                                       theirs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(example)
    assert repeated(card, theirs, kernel) == 1
    with monkeypatch.context() as patch:
        patch.setattr(where(), name, value)
        assert repeated(card, theirs, kernel) == 1
        other = card.started[-1].compiled
    kernel.start(3, VALUES, 4, 2)
    assert card.started[-1].compiled is not other and card.started[-1].compiled is card.started[0].compiled


def test_a_changed_source_is_compiled_again(card: Driver, theirs: list[Any]) -> None:
    kernel = Kernel(example)
    repeated(card, theirs, kernel)
    example.device_caches.clear()  # users clear the caches after a change of the source
    assert repeated(card, theirs, kernel) == 1
    assert card.started[-1].compiled is not card.started[0].compiled


class Loading:
    """A stub of a kernel and of its compiled form, which counts launcher loads that overlap in time."""

    def __init__(self) -> None:
        self.inside, self.loads, self.overlaps = 0, 0, 0

    @property
    def run(self) -> None:
        self.inside, self.loads = self.inside + 1, self.loads + 1
        self.overlaps += self.inside > 1
        time.sleep(0.002)
        self.inside -= 1

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *values, **options: self.run

    def warmup(self, *values: Any, **options: Any) -> Loading:
        return self


def test_launchers_are_loaded_one_at_a_time() -> None:
    """Two threads never load a launcher at the same time.

    All launchers of Triton have the same module name, and Python reloads an extension module into the last
    object of that name. With two loads at once, one thread could get the launcher of the other.
    """
    kernel, loading = Kernel(example), Loading()
    kernel.kernel, kernel.plain = loading, False
    calls = [lambda: kernel.compile((X,), 4, 2, load=True), lambda: kernel.start(1, (X,), 4, 2)] * 8
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loading.loads == 16 and loading.overlaps == 0
    kernel.compile((X,), 4, 2, load=False)
    assert loading.loads == 16, "load=False must load no launcher"


class Building:
    """A stub of a compiled kernel whose launcher is built by a C compiler first, as in Triton up to 3.7."""

    def __init__(self, home: Any) -> None:
        self.home, self.together = home, threading.Barrier(4, timeout=5)
        self.loading, self.overlaps = 0, 0

    def warmup(self, *values: Any, **options: Any) -> Building:
        return self

    @property
    def run(self) -> None:
        assert self.home._build("name", at="path") == "name path"
        self.loading += 1
        self.overlaps += self.loading > 1
        time.sleep(0.002)
        self.loading -= 1

    def build(self, name: str, at: str) -> str:
        self.together.wait()  # raises BrokenBarrierError if a thread builds alone
        return f"{name} {at}"


def test_launchers_are_built_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    home = sys.modules["triton.runtime.build"]
    kernel, building = Kernel(example), Building(home)
    monkeypatch.setattr(home, "_build", building.build)
    launch_cache._build_without_lock.cache_clear()
    kernel.kernel, kernel.plain, failures = building, False, list[BaseException]()

    def work() -> None:
        try:
            kernel.compile((X,), 4, 2, load=True)
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and building.overlaps == 0
    assert not launch_cache.LOADING.free(), "a thread has left the lock in a wrong state"
    launch_cache._build_without_lock.cache_clear()


def test_constants_of_our_kernels_never_change(card: Driver, theirs: list[Any],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(with_a_global.fn.__globals__, "__name__", "flashlin.kernels.selective.forward")
    assert repeated(card, theirs, Kernel(with_a_global), (X, 3, 16)) == 1


def test_a_changed_global_is_tritons_error(card: Driver, theirs: list[Any],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, values = Kernel(with_a_global), (X, 3, 16)
    assert repeated(card, theirs, kernel, values) == 2
    monkeypatch.setitem(with_a_global.fn.__globals__, "LIMIT", tl.constexpr(4))
    with pytest.raises(RuntimeError, match="LIMIT has changed"):
        kernel.start(3, values, 4, 2)


class Own(torch.Tensor):
    pass


class Number(int):
    pass


@pytest.mark.parametrize("odd", [X.as_subclass(Own), Number(8)], ids=["tensor", "int"])
def test_other_types_go_tritons_way(odd: Any, card: Driver, theirs: list[Any]) -> None:
    values = (odd, *VALUES[1:]) if isinstance(odd, torch.Tensor) else (*VALUES[:3], odd, *VALUES[4:])
    assert repeated(card, theirs, Kernel(example), values) == 2


def test_a_constexpr_of_another_type_goes_tritons_way(card: Driver, theirs: list[Any]) -> None:
    assert repeated(card, theirs, Kernel(example), (*VALUES[:8], tl.constexpr(16), True)) == 2


@pytest.mark.parametrize("version", ["3.5.1", "3.7.9.dev1", "3.8.0"])
def test_releases_that_nobody_has_compared_go_tritons_way(version: str, card: Driver, theirs: list[Any],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(releases, "RELEASES",
                        [one for one in releases.RELEASES if release(one.version) < (3, 8)])
    assert repeated(card, theirs, Kernel(example)) == 2


def test_other_cards_go_tritons_way(card: Driver, theirs: list[Any]) -> None:
    made = Kernel(example)
    card.target = triton.backends.compiler.GPUTarget("hip", "gfx942", 64)
    assert repeated(card, theirs, made) == 2


def test_integers_may_run_over_while_assertions_are_checked(card: Driver,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct starts turn off the overflow check that Triton adds when assertions are enabled."""
    asked, compiled = list[tuple[bool, bool]](), triton.compiler.compile

    def noted(src: Any, target: Any, options: dict[str, Any]) -> Any:
        asked.append((options["debug"], options["sanitize_overflow"]))
        return compiled(src, target, options)
    monkeypatch.setattr(triton.compiler, "compile", noted)
    for debug in (False, True):
        monkeypatch.setattr(triton.knobs.runtime, "debug", debug)
        Kernel(example).start(1, VALUES, 4, 2)
        example.device_caches.clear()
    Kernel(example).compile(VALUES, 4, 2, load=False)
    example.device_caches.clear()
    example[(1,)](*VALUES, num_warps=4, num_stages=2)
    assert asked == [(False, True), (True, False), (True, False), (True, True)]


def test_what_a_hook_declines_to_compile_is_not_kept(card: Driver, theirs: list[Any],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(example)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **facts: True)
        assert repeated(card, theirs, kernel) == 2 and not card.started
    assert repeated(card, theirs, kernel) == 1


def test_an_error_leaves_nothing_behind(card: Driver, theirs: list[Any]) -> None:
    kernel = Kernel(example)
    for _ in range(2):
        with pytest.raises(OverflowError):
            kernel.start(3, (*VALUES[:3], 2**64, *VALUES[4:]), 4, 2)
    assert not card.started


@pytest.mark.parametrize("case", share([case for case in CASES if case.quick], 0, 12),
                         ids=lambda case: f"{case.op} {case.id}")
def test_ops_start_what_tritons_launch_would(case: Case, card: Driver, theirs: list[Any]) -> None:
    def both(planned: launch.Launch, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        launch._start(planned, kernel, programs, arguments)
        directly.append(not theirs)
        kernel[(programs,)](*launch.in_order(planned, kernel, arguments), num_warps=planned.num_warps,
                            num_stages=planned.num_stages)
        theirs.clear()
        assert same(*card.started[-2:]), kernel
    directly = list[bool]()
    launch.replace_starter(both)
    machine.pretend(machine.parse(f"triton={triton.__version__},sm=90"))
    with flashlin.settings(canary="off"):
        as_in_a_case(case, torch.bfloat16, gradients=True)
        once = len(directly)
        as_in_a_case(case, torch.bfloat16, gradients=True)
    assert once and len(directly) == 2 * once and all(directly[once:])


@pytest.mark.parametrize("version", OTHERS)
def test_the_same_under_another_release(version: str) -> None:
    """All other tests of this file pass in a process that imports another Triton release."""
    assert nearest(version).direct
    try:
        environment = triton_environment(version)
    except NotInstallable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join([environment["PYTHONPATH"], root])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", __file__,
         "-k", "not another_release"], cwd=root, env={**os.environ, "PYTHONPATH": paths, HERE: version},
        text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
