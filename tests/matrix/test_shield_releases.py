"""Two failures that users meet with their own kernels, under the releases that have them.

The raw kernels fail, and the kernels under shield do not.

1. The autotuner counts keys wrongly (Triton 3.0, 3.1) or refuses unknown keys (3.0, 3.1, 3.9). It is pure
Python, which a child of each release runs. 2. Eight and sixteen warps on Hopper (3.2, 3.3). The kernels are
compiled to machine code, without a GPU.
"""
from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashlin
from flashlin.compat.releases import supported
from flashlin.compat.target import parse, pretend
from flashlin.guards.plan_types import Launch
from flashlin.testing.compile import Job, Result
from flashlin.testing.environments import NotInstallable, triton_environment
from flashlin.testing.record import Recorded, recorded
from tests import foreign

Compile = Callable[[str, list[Job]], list[Result]]
ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
    import warnings
    import torch, triton
    import flashlin
    from tests import foreign

    class Driver:                                # as much of a driver as tuning asks for: there is no GPU here
        def get_benchmarker(self):
            return timer
    def timer(call, quantiles=None, **options):
        call()
        return [float(started[-1]["BK"])] * 3    # the smallest is the fastest
    started = []
    def note(*args, grid, warmup, **kwargs):
        started.append({**dict(zip(foreign.keyed.arg_names, args)), **kwargs})
    foreign.keyed.run = note
    configs = [triton.Config({"BK": size}) for size in (64, 32)]
    x = torch.zeros(64)
    def decorated(autotune, key):
        import triton.testing, triton.runtime.autotuner
        triton.testing.do_bench = triton.runtime.autotuner.do_bench = timer    # where 3.0 and 3.1 look
        if triton.__version__ < "3.2":
            return autotune(configs, key)(foreign.keyed)
        return autotune(configs, key, do_bench=timer)(foreign.keyed)
    def call(kernel, n, m):
        kernel[(1,)](x, n=n, o=x, m=m)
        return started[-1]["BK"]
    def tuned(kernel, *calls):
        \"\"\"How many configurations were timed for these calls, one after the other.\"\"\"
        counts = []
        for n, m in calls:
            before = len(started)
            call(kernel, n, m)
            counts.append(len(started) - before - 1)
        return counts
"""


def child(version: str, script: str, before: str = BEGIN, interpret: bool = False) -> str:
    """Return the output of a script under that release, or in its interpreter.

    Raises AssertionError with the traceback of the script if it fails.
    """
    try:
        environment = triton_environment(version, interpreter=interpret)
    except NotInstallable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    text = textwrap.dedent(before) + f"\nassert triton.__version__ == {version!r}\n" + textwrap.dedent(script)
    paths = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300,
                          check=False, cwd=ROOT,
                          env={**os.environ, **environment, "PYTHONPATH": paths,
                               "TRITON_INTERPRET": str(int(interpret))})
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- 1. the autotuner ---

@pytest.mark.parametrize("version", ["3.0.0", "3.1.0"])
def test_keys_after_a_tuned_argument_are_counted_wrongly_before_32_and_rightly_here(version: str) -> None:
    """The kernel is keyed(x, BK, n, o, m).

    A call does not pass BK, so position 2 is o and position 4 does not exist.
    """
    child(version, """
        try:
            call(decorated(triton.autotune, ["m"]), 8, 0)
        except IndexError as error:
            assert "list index out of range" in str(error)
        else:
            raise AssertionError("no IndexError: the failure is gone")
        silent = decorated(triton.autotune, ["BK"])              # position 1 of what is given: n
        assert tuned(silent, (8, 0), (9, 0), (9, 1)) == [2, 2, 0], "keyed by n, although n is not in the key"

        assert tuned(decorated(flashlin.autotune, ["m"]), (8, 0), (8, 0), (8, 1), (9, 1)) == [2, 0, 2, 0]
        assert tuned(decorated(flashlin.autotune, ["n"]), (8, 0), (9, 0), (9, 1)) == [2, 2, 0]
        before = decorated(triton.autotune, ["m"])
        with flashlin.patched("triton"):                          # decorated before, and decorated now
            assert tuned(before, (8, 0), (8, 1), (9, 1)) == [2, 2, 0]
            assert tuned(decorated(triton.autotune, ["m"]), (8, 0), (8, 1), (9, 1)) == [2, 2, 0]
        try:
            call(decorated(triton.autotune, ["m"]), 8, 0)
        except IndexError:
            pass
        else:
            raise AssertionError("unpatched, and still repaired")
        """)


@pytest.mark.parametrize(("version", "says"),
                         [("3.0.0", "'STAGE' is not in list"), ("3.1.0", "'STAGE' is not in list"),
                          ("3.9.0", "key contains names that are not kernel arguments: STAGE")])
@pytest.mark.alternate
def test_unknown_keys_are_refused_raw_and_dropped_here(version: str, says: str) -> None:
    child(version, f"""
        try:
            decorated(triton.autotune, ["n", "STAGE"])
        except ValueError as error:
            assert {says!r} in str(error), error
        else:
            raise AssertionError("no ValueError: the failure is gone")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            kernel = decorated(flashlin.autotune, ["n", "STAGE"])
        assert [str(one.message) for one in told] == ["autotune: key names STAGE, which are not arguments of keyed; they are left out"], told
        assert tuned(kernel, (8, 0), (9, 0), (9, 1)) == [2, 2, 0]
        with flashlin.patched("triton"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert tuned(decorated(triton.autotune, ["n", "STAGE"]), (8, 0), (9, 0)) == [2, 2]
        """)


@pytest.mark.parametrize("version", ["3.0.0", "3.2.0", "3.3.1", supported()[-1]])
@pytest.mark.alternate
def test_decorating_needs_no_driver(version: str) -> None:
    """Triton 3.2 and 3.3 get the benchmark function from the driver when they decorate.

    Without a driver, the import of a module with such a kernel therefore fails.
    """
    child(version, f"""
        try:
            triton.autotune(configs, ["n"])(foreign.keyed)
        except RuntimeError as error:
            assert {version!r} in ("3.2.0", "3.3.1") and "0 active drivers" in str(error), error
        else:
            assert {version!r} not in ("3.2.0", "3.3.1"), "the failure is gone"
        flashlin.autotune(configs, ["n"])(foreign.keyed)
        """)


def test_a_configuration_that_aborts_the_compiler_is_left_out_under_32() -> None:
    """The real compiler runs in real child processes: eight warps abort on Hopper, four do not.

    Planning for warps is off, so that the abort occurs.
    """
    child("3.2.0", """
        from flashlin.compat.target import parse, pretend
        compile_as_it_is = foreign.states.run
        def run(*args, warmup, **kwargs):
            if warmup:
                return compile_as_it_is(*args, warmup=True, **kwargs)
            started.append({"BK": kwargs["num_warps"], **kwargs})
        foreign.states.run = run
        pretend(parse("triton=3.2.0,sm=90"))
        both = [triton.Config({}, num_warps=warps) for warps in (8, 4, 2)]
        kernel = flashlin.autotune(both, ["T"], do_bench=lambda call, quantiles: (call(), [1 / started[-1]["num_warps"]])[1])(foreign.states)
        k = torch.zeros(1, 64, 64, dtype=torch.bfloat16)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            kernel[(1,)](k, k, k, k, torch.zeros(1, 1), 64, K=64, V=64, BT=64)
        assert len(told) == 1 and "num_warps: 8" in str(told[0].message) and "reshapeOuts" in str(told[0].message), told
        assert [start["num_warps"] for start in started] == [4, 2, 4]
        """)


# --- 2. eight and sixteen warps on Hopper ---

def launched(target: str, warps: int, shielded: bool) -> Recorded:
    """Return the result of a user's launch, raw or through shield, specialised as the JIT does."""
    found: list[Recorded] = []

    def keep(*args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = {**dict(zip(foreign.states.arg_names, args, strict=False)), **options}
        launch = Launch("states", grid, named.pop("num_warps"), named.pop("num_stages"), (), 0, 0,
                        frozenset())
        found.append(recorded(launch, foreign.states, named))
    kernel = flashlin.shield(foreign.states)
    kernel._start = keep
    pretend(parse(target))
    k, g = torch.zeros(2, 128, 64, dtype=torch.bfloat16), torch.zeros(2, 2)
    with flashlin.settings(policy="auto" if shielded else "off"):
        kernel[(2,)](k, k, k, k, g, 128, K=64, V=64, BT=64, num_warps=warps, num_stages=2)
    return found[0]


@pytest.mark.parametrize(("version", "status", "says"), [
    ("3.2.0", "abort", "reshapeOuts"), ("3.3.1", "exception", "chooseStMatrixLayoutLeadingOffset"),
    ("3.4.0", "ok", "")])
def test_a_users_kernel_with_8_and_16_warps_fails_on_hopper_and_is_planned_with_4(version: str, status: str,
                                                                                  says: str,
                                                                                 compiled: Compile) -> None:
    hopper = f"triton={version},sm=90"
    raw = [launched(hopper, warps, False) for warps in (8, 16)]
    planned = [launched(hopper, warps, True) for warps in (8, 16)]
    assert [launch.num_warps for launch in raw] == [8, 16]
    assert [launch.num_warps for launch in planned] == ([4, 4] if says else [8, 16])
    eight, sixteen, as_planned, on_ampere = compiled(version,
                                                     [Job(90, raw[0]), Job(90, raw[1]), Job(90, planned[0]),
                                                      Job(80, raw[0])])
    assert (eight.status, sixteen.status, as_planned.status, on_ampere.status) == (status, status, "ok",
                                                                                   "ok"), (eight, sixteen,
                                                                                           as_planned)
    assert says in eight.cause and says in sixteen.cause
