"""Tests of autotune and patch with the installed Triton, without a GPU.

A fake kernel records its launches, and a fake timer gives the time of each configuration.
"""
from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

import flashlin
from flashlin.compat import subprocesses
from flashlin.compat.target import parse, pretend
from flashlin.integrations import patching
from flashlin.shielding import autotune as tuning
from flashlin.testing.compile import Driver
from tests import foreign

NAMES = ["x", "BK", "n", "o", "m"]


@pytest.fixture(autouse=True)
def everything_is_put_back() -> Iterator[None]:
    tuning.unhook("functions")  # a shielded function of another test has installed this hook permanently
    before = (triton.autotune, triton.runtime.autotune, Autotuner.run)
    yield
    flashlin.unpatch("triton")
    assert (triton.autotune, triton.runtime.autotune, Autotuner.run) == before


class Kernel:
    """A stub with only the attributes of a kernel that the autotuner uses; it records its launches.

    fails: errors to raise for configurations, by BK.
    """
    arg_names = NAMES

    def __init__(self, fails: dict[int, Exception] | None = None) -> None:
        self.started: list[dict[str, Any]] = []
        self.fails = fails or {}

    @staticmethod
    def fn(x, BK, n, o, m=0):  # type: ignore[no-untyped-def]
        """Stand in for the kernel's function, of which only the signature is used."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
        if given["BK"] in self.fails:
            raise self.fails[given["BK"]]
        self.started.append(given)


def configs(*sizes: int) -> list[Any]:
    return [triton.Config({"BK": size}) for size in sizes]


def timer(kernel: Kernel, asked: list[int] | None = None) -> Callable[..., list[float]]:
    """Return a fake do_bench for which the configuration with the smallest BK is the fastest.

    asked: receives the BK of each configuration that is timed.
    """
    def bench(call: Callable[[], None], quantiles: Any = None) -> list[float]:
        call()
        size = kernel.started[-1]["BK"]
        if asked is not None:
            asked.append(size)
        return [float(size)] * 3
    return bench


def tuned(kernel: Kernel, sizes: tuple[int, ...] = (64, 32), asked: list[int] | None = None,
          **options: Any) -> Any:
    return flashlin.autotune(configs(*sizes), options.pop("key", ["n"]), do_bench=timer(kernel, asked),
                             **options)(kernel)


def call(tuner: Any, n: int = 8, m: int = 0, dtype: torch.dtype = torch.float32) -> None:
    tuner.run(torch.zeros(8, dtype=dtype), n=n, o=torch.zeros(8), m=m, grid=(1,), warmup=False)


def test_the_fastest_is_kept_per_key_and_dtype() -> None:
    kernel, asked = Kernel(), list[int]()
    tuner = tuned(kernel, asked=asked)
    for n, dtype in ((8, torch.float32), (8, torch.float32), (9, torch.float32), (9, torch.float16)):
        call(tuner, n, dtype=dtype)
        assert kernel.started[-1]["BK"] == 32 == tuner.best_config.kwargs["BK"]
    assert asked == [64, 32] * 3 and isinstance(tuner, Autotuner)


def test_an_argument_that_is_left_out_is_not_taken_for_another() -> None:
    kernel, asked = Kernel(), list[int]()
    tuner = tuned(kernel, asked=asked, key=["n", "m"])
    tuner.run(torch.zeros(8), n=1, o=None, grid=(1,), warmup=False)
    tuner.run(torch.zeros(8), o=None, m=1, grid=(1,), warmup=False)
    assert len(asked) == 4
    tuner.run(torch.zeros(8), n=1, o=None, m=0, grid=(1,), warmup=False)  # 0 is the default of m
    assert len(asked) == 4


def test_unknown_names_are_dropped_with_a_warning() -> None:
    kernel = Kernel()
    with pytest.warns(UserWarning, match="autotune: key names STAGE, which are not arguments of fn"):
        tuner = tuned(kernel, key=["n", "STAGE"])
    call(tuner)
    assert kernel.started[-1]["BK"] == 32


@pytest.mark.parametrize("what", ["restore_value", "reset_to_zero"])
def test_unknown_names_of_tensors_are_an_error(what: str) -> None:
    # If the names were ignored, a kernel that adds to its output would give wrong results after tuning.
    with pytest.raises(ValueError, match=f"{what}: got 'y' as names of arguments of fn, "
                                         "need one of x, BK, n, o, m"):
        tuned(Kernel(), **{what: ["o", "y"]})


# --- the same configuration on all ranks ---

def test_first_measures_nothing_and_takes_the_first_that_works() -> None:
    kernel, asked = Kernel({64: RuntimeError("out of luck")}), list[int]()
    x, o = torch.ones(8), torch.ones(8)
    tuner = tuned(kernel, (64, 48, 32), asked, deterministic="first", reset_to_zero=["o"],
                  restore_value=["x"])
    with pytest.warns(UserWarning,
                      match="fn: configuration BK: 64.* fails .RuntimeError: out of luck.; it is left out"):
        tuner.run(x, n=1, o=o, grid=(1,), warmup=False)
    assert [start["BK"] for start in kernel.started] == [48, 48] and not asked and o.sum() == 0
    with flashlin.settings(autotune="first"):
        call(tuned(kernel, (128, 32), asked))
    assert kernel.started[-1]["BK"] == 128 and not asked
    with pytest.raises(RuntimeError, match="out of luck"), pytest.warns(UserWarning):
        call(tuned(kernel, (64, 64), deterministic="first"))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_first_compiles_one_configuration_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(parse("triton=3.6.0,sm=90"))
    tried: list[int] = []
    monkeypatch.setattr(tuning, "_compiled",
                        lambda call, configs, kept=tuning._compiled: tried.append(len(configs))
                        or kept(call, configs))
    call(tuned(Kernel(), (64, 32), deterministic="first"))
    assert tried == [1]


def test_an_unknown_way_is_an_error() -> None:
    with pytest.raises(ValueError, match="deterministic: got 'last', need None, 'first' or 'rank0'"):
        flashlin.autotune([], [], deterministic="last")


def rank(number: int, rendezvous: str, found: Any) -> None:
    """Run one of two ranks; on rank 0 the smallest configuration is the fastest, on rank 1 the largest."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number,
                                         world_size=2, timeout=timedelta(seconds=60))

    def bench(call: Callable[[], None], quantiles: Any = None) -> list[float]:
        call()
        size = kernel.started[-1]["BK"]
        return [float(-size if number else size)] * 3

    def tuned(**options: Any) -> Any:
        return flashlin.autotune(configs(64, 32, 128), ["n"], do_bench=bench, **options)(kernel)

    def outcome(tuner: Any, n: int = 8) -> object:
        try:
            call(tuner, n)
        except RuntimeError as error:
            return str(error)
        return tuner.best_config.kwargs["BK"]
    kernel = Kernel()
    both = tuned(deterministic="rank0")
    found.put((number, "timed", outcome(tuned())))
    found.put((number, "first", outcome(tuned(deterministic="first"))))
    found.put((number, "rank0", outcome(both)))
    found.put((number, "rank0 again", outcome(both)))
    with flashlin.settings(autotune="rank0"):
        found.put((number, "by setting", outcome(tuned())))
    found.put((number, "another call", outcome(both, 9 + number)))
    pruning = {"early_config_prune": lambda configs, given, **options: configs[:2 - number]}
    found.put((number, "other pruning", outcome(tuned(deterministic="rank0", prune_configs_by=pruning))))
    kernel.fails = dict.fromkeys((64, 32, 128), RuntimeError("out of luck"))
    found.put((number, "none", outcome(tuned(deterministic="rank0"))))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore")
def test_rank_0_chooses_for_all_ranks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    ranks = [context.Process(target=rank, args=(number, str(tmp_path / "rendezvous"), found), daemon=True)
             for number in range(2)]
    for process in ranks:
        process.start()
    said = {(number, what): outcome for number, what, outcome in (found.get(timeout=60) for _ in range(16))}
    for process in ranks:
        process.join(60)
    assert (said[0, "timed"], said[1, "timed"]) == (32, 128)
    for what, size in (("first", 64), ("rank0", 32), ("rank0 again", 32), ("by setting", 32)):
        assert said[0, what] == said[1, what] == size
    assert said[0, "another call"] == 32
    assert "rank 0 tunes fn for (9, " in said[1, "another call"] and "rank 1 tunes fn for (10, " in said[1,
                                                                                                         "another call"]
    assert said[0, "other pruning"] == 32 and "which prune_configs_by leaves out on rank 1" in said[1,
                                                                                                    "other pruning"]
    assert said[0, "none"] == "out of luck" and "rank 0 finds no configuration of fn for (8, " in said[1,
                                                                                                       "none"]


def test_a_configuration_that_fails_is_left_out_with_a_warning() -> None:
    kernel = Kernel({32: RuntimeError("out of luck")})
    tuner = tuned(kernel)
    with pytest.warns(UserWarning,
                      match="fn: configuration BK: 32.* fails .RuntimeError: out of luck.; it is left out"):
        call(tuner)
    assert kernel.started[-1]["BK"] == 64


@pytest.mark.filterwarnings("ignore")
def test_the_first_error_is_raised_where_none_works() -> None:
    with pytest.raises(RuntimeError, match="first"):
        call(tuned(Kernel({64: RuntimeError("first"), 32: RuntimeError("second")})))


def test_what_the_call_and_a_configuration_both_give_is_an_error() -> None:
    with pytest.raises(ValueError, match="BK: given in the call to fn and by a configuration"):
        tuned(Kernel()).run(torch.zeros(8), BK=16, n=1, o=None, grid=(1,), warmup=False)


def test_tensors_are_reset_and_restored() -> None:
    kernel = Kernel()
    tuner = tuned(kernel, reset_to_zero=["o"], restore_value=["x", "m"])
    x, o = torch.ones(8), torch.ones(8)
    seen = []

    def write(*args: Any, **given: Any) -> None:
        Kernel.run(kernel, *args, **given)
        seen.append((x[0].item(), o[0].item()))
        x.add_(1), o.add_(1)
    kernel.run = write  # type: ignore[method-assign]
    tuner.run(x, n=1, o=o, m=None, grid=(1,), warmup=False)
    assert seen == [(1, 0), (1, 0), (1, 0)]


def test_hooks_of_the_user_are_called() -> None:
    kernel, said = Kernel(), list[str]()
    tuner = tuned(kernel,
                  pre_hook=lambda given, reset_only=False: said.append(f"before {reset_only} {given['n']}"),
                  post_hook=lambda given, exception: said.append("after"))
    call(tuner, 3)
    assert said == ["before False 3", "after"] * 2 + ["before True 3"]


def test_results_are_kept_on_disk_where_the_tuner_is_told_to(tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(90), raising=False)
    x, asked = torch.zeros(64), list[int]()

    def bench(call: Callable[[], None], quantiles: Any) -> list[float]:
        call()
        asked.append(1)
        return [float(len(asked))]
    for _ in range(2):  # two tuners, as in two processes
        tuner = triton.autotune([triton.Config({"BK": 16}), triton.Config({"BK": 32})], ["n"], do_bench=bench,
                                cache_results=True)(foreign.keyed)
        kernel = flashlin.shield(tuner)
        kernel.fn._start = lambda *args, **kwargs: None
        pretend(parse("triton=3.6.0,sm=90"))
        with flashlin.settings(policy="off"):
            kernel[(1,)](x, n=64, o=x, m=0)
        assert kernel.best_config.kwargs["BK"] == 16 and len(asked) == 2


def test_two_threads_tune_once() -> None:
    kernel, asked = Kernel(), list[int]()
    tuner = tuned(kernel, asked=asked)
    bench = tuner.do_bench
    tuner._do_bench = tuner.do_bench = lambda *args, **kwargs: (time.sleep(0.05), bench(*args, **kwargs))[1]
    threads = [threading.Thread(target=call, args=(tuner,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(asked) == [32, 64] and [start["BK"] for start in kernel.started[-4:]] == [32] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_configuration_that_ends_the_compiler_ends_a_child_only() -> None:
    import os

    class Deadly(Kernel):
        def run(self, *args: Any, **kwargs: Any) -> None:
            if kwargs["warmup"] and kwargs["BK"] == 32:
                os.abort()
            if kwargs["BK"] == 32:
                raise AssertionError("was run all the same")
            super().run(*args, **kwargs)
    pretend(parse("triton=3.6.0,sm=90"))
    kernel = Deadly()
    with pytest.warns(UserWarning, match="configuration BK: 32.* ends the compiler .abort: SIGABRT"):
        call(tuned(kernel, (64, 32, 128)))
    assert kernel.started[-1]["BK"] == 64
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="ends the compiler"):
        call(tuned(kernel, (32, 32)))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("works, says", [
    (True, "ends the compiler .timeout"),
    (False, "could not be compiled ahead .not tried: this machine gave it 0 s of CPU time")])
@pytest.mark.alternate
def test_children_that_hang_leave_a_configuration_out_unless_all_of_them_do(
        monkeypatch: pytest.MonkeyPatch, works: bool, says: str) -> None:
    class Hanging(Kernel):
        hangs: tuple[int, ...] = (32,)

        def run(self, *args: Any, **kwargs: Any) -> None:
            if kwargs["warmup"] and kwargs["BK"] in self.hangs:
                while works:
                    pass
                time.sleep(60)
            super().run(*args, **kwargs)
    monkeypatch.setattr(tuning, "CHILD_SECONDS", 1)
    if works:  # wait until the child has used its CPU time, even on a busy machine
        monkeypatch.setattr(subprocesses, "PATIENCE", 1000)
    pretend(parse("triton=3.6.0,sm=90"))
    kernel = Hanging()
    with pytest.warns(UserWarning, match=f"configuration BK: 32.* {says}"):
        call(tuned(kernel))
    assert kernel.started[-1]["BK"] == 64
    kernel.hangs = (32, 64)
    call(tuned(kernel))
    assert kernel.started[-1]["BK"] == 32


def test_patching_is_reversible_and_twice_is_once() -> None:
    original, kernel, asked = triton.autotune, Kernel({32: RuntimeError("not mine")}), list[int]()
    before = original(configs(64, 32), ["n"], do_bench=timer(kernel, asked))(kernel)
    with pytest.raises(RuntimeError, match="not mine"):  # unpatched, one failure ends the call
        call(before)
    flashlin.patch("triton")
    with flashlin.patched("triton"):
        flashlin.patch("triton")
        assert triton.autotune is tuning.autotune is flashlin.autotune
    assert triton.autotune is tuning.autotune
    with pytest.warns(UserWarning, match="not mine"):
        call(before)  # decorated before the patch, but repaired by it
    flashlin.unpatch("triton")
    flashlin.unpatch("triton")
    assert triton.autotune is original
    with flashlin.patched("triton"):
        assert triton.autotune is not original
    assert triton.autotune is original


def test_the_last_block_out_puts_things_back_in_whatever_order_they_end() -> None:
    original, run = triton.autotune, Autotuner.run
    first, second = ExitStack(), ExitStack()
    first.enter_context(flashlin.patched("triton"))
    second.enter_context(flashlin.patched("triton"))
    first.close()
    assert triton.autotune is flashlin.autotune
    flashlin.unpatch("triton")  # no effect: only the with blocks have patched
    assert triton.autotune is flashlin.autotune and Autotuner.run is not run
    second.close()
    assert triton.autotune is original and Autotuner.run is run
    with flashlin.patched("triton"):
        flashlin.patch("triton")
    assert triton.autotune is flashlin.autotune


def test_blocks_of_many_threads_are_counted() -> None:
    original, wrong = triton.autotune, []

    def many() -> None:
        for _ in range(100):
            with flashlin.patched("triton"):
                time.sleep(0)
                if triton.autotune is not flashlin.autotune:
                    wrong.append(triton.autotune)
    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and triton.autotune is original


def test_what_another_package_has_patched_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original, runs = triton.autotune, Autotuner.run
    flashlin.patch("triton")
    ours, kernel = Autotuner.run, Kernel({32: RuntimeError("not mine")})

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return flashlin.autotune(*args, **kwargs)
    with monkeypatch.context() as later:
        later.setattr(triton, "autotune", theirs)
        later.setattr(Autotuner, "run", lambda *args, **kwargs: ours(*args, **kwargs))
        flashlin.unpatch("triton")
        assert triton.autotune is theirs and triton.runtime.autotune is original and Autotuner.run is not runs
        # The other package's wrapper now calls Triton's own run, where a failing configuration ends the call.
        with pytest.raises(RuntimeError, match="not mine"):
            call(original(configs(64, 32), ["n"], do_bench=timer(kernel))(kernel))
        with flashlin.patched("triton"), pytest.warns(UserWarning, match="not mine"):
            call(original(configs(64, 32), ["n"], do_bench=timer(kernel))(kernel))
        assert triton.autotune is theirs
    triton.autotune, Autotuner.run = original, runs  # leaving the block has restored our functions


def test_an_unknown_package_is_an_error() -> None:
    def patched(package: str) -> None:
        with flashlin.patched(package):
            pass
    for change in (patching.patch, patching.unpatch, patched):
        with pytest.raises(ValueError, match="package: got 'numpy', need one of triton"):
            change("numpy")


def test_shield_keeps_a_tuner_and_tunes_what_is_planned() -> None:
    shielded = flashlin.shield(triton.autotune([triton.Config({"BK": 16}, num_warps=1),
                                                triton.Config({"BK": 32}, num_warps=2)], ["n"],
                                               do_bench=lambda call, quantiles: (call(),
                                                                                 [1.0])[1])(foreign.keyed))
    starts = []
    shielded.fn._start = lambda *args, **kwargs: starts.append(kwargs["BK"])
    pretend(parse("triton=3.6.0,sm=90"))
    x = torch.zeros(64)
    with flashlin.settings(policy="off"):  # no trials in child processes
        shielded[lambda meta: (meta["BK"] // 16,)](x, n=64, o=x, m=0)
    assert starts == [16, 32, 16]
