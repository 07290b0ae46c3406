"""Tests of several processes that fill Triton's cache together.

Each kernel is compiled by exactly one of the processes. No kernel is launched or timed, and no autotuning
result is stored. The compiler and the GPU are fakes.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from flashlin.compat.subprocesses import Ended
from flashlin.testing.compile import Driver
from matrix import record, warming

knobs = pytest.importorskip("triton.knobs")
Compiled = list[dict[str, Any]]


def launched(*arguments: Any) -> None:
    raise AssertionError("launched")


class Card(Driver):
    def get_benchmarker(self) -> Callable[..., Any]:
        raise AssertionError("timed")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Replace Triton's compiler, and yield a list that receives the constants of each kernel it compiles."""
    made: Compiled = []

    def compile(src: Any, target: Any, options: Any) -> Any:
        made.append({src.fn.arg_names[at[0]]: value for at, value in src.constants.items()})
        return SimpleNamespace(run=launched)
    monkeypatch.setattr("triton.compiler.compile", compile)
    monkeypatch.setattr(triton.runtime.driver, "_active", Card(90), raising=False)
    yield made


def tuned() -> tuple[Any, Any]:
    """Return (autotuner, its kernel); both are new, as they would be in another process.

    The autotuner stores its results on disk.
    """
    @triton.jit
    def copied(x, o, BK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(o + tl.arange(0, BK), tl.load(x + tl.arange(0, BK)))
    configs = [triton.Config({"BK": size}) for size in (16, 32, 64)]
    return triton.autotune(configs, key=["BK"], cache_results=True)(copied), copied


def share(folder: Path, number: int = 0, of: int = 2) -> warming.Share:
    return warming.Share(str(folder), number, of)


def test_each_kernel_is_compiled_once_and_none_is_launched(tmp_path: Path, compiled: Compiled,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    (tmp_path / "claims").mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        tuner, kernel = tuned()
        with warming.claiming(share(tmp_path / "claims")):
            for _ in range(2):
                tuner[(1,)](x, x)
                kernel[(1,)](x, x, BK=128)
    assert [one["BK"] for one in compiled] == [16, 32, 64, 128]
    assert not list(tmp_path.glob("cache/*/*.json"))  # no winner is stored without timing
    with pytest.raises(AssertionError, match="timed"):  # outside the block, tuning times again
        tuned()[0][(1,)](x, x)


def test_a_configuration_that_fails_is_passed_by(tmp_path: Path, compiled: Compiled,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    stub = triton.compiler.compile

    def compile(src: Any, target: Any, options: Any) -> Any:
        made = stub(src, target=target, options=options)
        if compiled[-1]["BK"] == 16:
            raise RuntimeError("ptxas")
        return made
    monkeypatch.setattr("triton.compiler.compile", compile)
    with warming.claiming(share(tmp_path)):
        tuned()[0][(1,)](torch.zeros(64), torch.zeros(64))
    assert [one["BK"] for one in compiled] == [16, 32, 64]


def test_only_a_tuner_without_a_timer_is_given_a_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[dict[str, float]]()
    monkeypatch.setattr("triton.testing.do_bench", lambda call, quantiles, **time: asked.append(time))
    monkeypatch.setattr(Autotuner, "__init__", Autotuner.__init__)  # restores it after the test
    warming.hurry()
    tuned()[0].do_bench(None, quantiles=(0.5,))
    assert asked == [{"warmup": 5, "rep": 25}]
    kernel = tuned()[1]
    assert triton.autotune([], key=[], do_bench=launched)(kernel).do_bench is launched


def test_what_is_put_in_is_taken_out(tmp_path: Path) -> None:
    def state() -> list[Any]:
        return [JITFunction.run, Autotuner.__dict__["do_bench"], Autotuner.check_disk_cache,
                knobs.runtime.jit_cache_hook]
    before = state()
    with pytest.raises(ZeroDivisionError), warming.claiming(share(tmp_path)):
        assert not any(one is other for one, other in zip(state(), before, strict=True))
        _ = 1 / 0
    assert state() == before


def test_who_has_finished_helps_with_what_nobody_has(tmp_path: Path) -> None:
    items = ["a", "b", "c", "d"]
    first, second = (warming.unfinished(items, share(tmp_path, number)) for number in range(2))
    assert [next(first), next(second)] == ["a", "c"]
    assert [next(second), next(second)] == ["d", "a"]  # "c" and "d" are finished, but "a" is not
    assert next(first) == "b"
    assert list(second) == ["b"]
    assert not list(first)


def test_what_lacks_memory_is_tried_again_and_what_fails_is_not(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    slept, tried = list[float](), list[str]()
    monkeypatch.setattr(warming.time, "sleep", slept.append)

    def go(item: str) -> str:
        tried.append(item)
        if item == "wrong":
            raise ValueError("not to be seen here")
        if tried.count(item) == 1:  # the first try of "raises" raises; that of "tells" returns the error
            error = torch.cuda.OutOfMemoryError("full")
            if item == "raises":
                raise error
            return record.raised(error)
        return "done"
    warming.walk(["wrong", "raises", "tells"], share(tmp_path, 0, 1), go)
    assert tried == ["wrong", "raises", "raises", "tells", "tells"]
    assert len(slept) == 2


def test_the_processes_are_told_their_shares_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(module: str, *arguments: str, **options: Any) -> Ended:
        one = warming.Share.parse(arguments[-1])
        Path(one.folder, f"{one.number}.kernel").touch()
        assert (module, arguments[:-1], one.of) == ("some.module", ("--op", "x", "--fill"), 3)
        assert options == {"seconds": 5.0, "OMP_NUM_THREADS": "1", "HERE": "1"}
        return Ended(None, why="no answer in 5 s", timed_out=True) if one.number else Ended(0)
    monkeypatch.setattr(record, "child", child)
    said = warming.fill("some.module", "--op", "x", processes=3, seconds=5.0, HERE="1")
    assert said == "3 processes compiled 3 kernels in 0 s; gave no answer in 5 s and was ended"
