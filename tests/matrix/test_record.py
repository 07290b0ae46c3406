"""A recorded launch has exactly the facts that determine what Triton's JIT compiles."""
from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial

import pytest
import torch

import flashlin
from flashlin.compat import launch as door
from flashlin.compat import subprocesses
from flashlin.compat.target import parse, probe
from flashlin.testing import compile as compiler
from flashlin.testing.compile import NOT_TRIED, Job, argument, compile_launches
from flashlin.testing.record import Recorded, recording, specialised

Record = Callable[..., list[Recorded]]
HOPPER = parse("triton=3.9.0,sm=90")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def record(gated: Callable[..., None]) -> Record:
    def recorded(**facts: object) -> list[Recorded]:
        with recording(HOPPER) as launches:
            gated(**facts)
        return launches
    return recorded


def scan(launches: list[Recorded]) -> Recorded:
    return next(launch for launch in launches if launch.kernel == "simple_gla_scan")


def test_forward_and_backward_are_recorded_in_order(record: Record) -> None:
    kernels = [launch.kernel for launch in record() if "dot" in launch.traits]
    assert kernels == ["simple_gla_scan", "simple_gla_states", "simple_gla_dv", "simple_gla_grads"]


def test_a_launch_holds_what_the_jit_looks_at(record: Record) -> None:
    launch = scan(record())
    kinds, constants = dict(launch.arguments), dict(launch.constants)
    assert launch.module == "flashlin.kernels.simple_gla.forward"
    assert kinds["q"] == "*bf16:16" and kinds["h0"] == "*fp32:16"
    assert kinds["gamma"] is None and kinds["bounds"] is None
    assert kinds["T"] == "i32" and kinds["N"] == "i32" and kinds["scale"] == "fp32"  # do_not_specialize
    assert kinds["H"] == "i32"
    assert constants["K"] == constants["V"] == 64 and constants["VARLEN"] is False and {"BT", "BK",
                                                                                        "BV"} <= set(
                                                                                            constants)
    assert launch.num_warps in (1, 2, 4, 8) and launch.shared > 0 and {"dot", "bf16"} <= set(launch.traits)


@pytest.mark.parametrize(("heads", "kind"), [(1, "i32:1"), (16, "i32:16"), (3, "i32")])
def test_heads_are_specialised_like_any_integer(heads: int, kind: str, record: Record) -> None:
    assert {dict(launch.arguments)["H"] for launch in record(H=heads)} == {kind}


@pytest.mark.parametrize(("value", "kind", "left_alone"), [
    (None, None, None), (1, "i32:1", "i32"), (32, "i32:16", "i32"), (0, "i32:16", "i32"), (7, "i32", "i32"),
    (-3, "i32", "i32"), (2**31, "i64:16", "i64"), (2**31 + 1, "i64", "i64"), (2**63 + 1, "u64", "u64"),
    (1.0, "fp32", "fp32"), (True, "i1", "i1"), (torch.zeros(8, dtype=torch.float16), "*fp16:16", "*fp16"),
    (torch.zeros(8)[1:], "*fp32", "*fp32")])
def test_types_as_triton_names_them(value: object, kind: str | None, left_alone: str | None) -> None:
    assert specialised(value) == kind
    assert specialised(value, specialise=False) == left_alone


@pytest.mark.parametrize("value",
                         [None, 1, 32, 0, 7, -3, 2**31, 2**31 + 1, 1.0, torch.zeros(8, dtype=torch.bfloat16),
                          torch.zeros(8)[1:]])
@pytest.mark.parametrize("specialise", [True, False])
def test_the_installed_jit_sees_a_stand_in_as_it_sees_the_value(value: object, specialise: bool) -> None:
    """Kernels compile with a stand-in for each argument, so Triton must treat stand-ins as values."""
    jit = pytest.importorskip("triton.runtime.jit")
    if not hasattr(jit, "native_specialize_impl"):
        pytest.skip("this Triton specialises elsewhere")
    backends = pytest.importorskip("triton.backends")
    compiler = pytest.importorskip("triton.backends.compiler")
    backend = backends.backends["nvidia"].compiler(compiler.GPUTarget("cuda", 90, 32))

    def seen(x: object) -> object:
        return jit.native_specialize_impl(type(backend), x, False, specialise, True)
    assert seen(argument(specialised(value, specialise))) == seen(value)


def test_a_kernel_started_twice_is_recorded_once(gated: Callable[..., None]) -> None:
    with recording(HOPPER) as launches:
        gated()
        once = len(launches)
        gated()
    assert len(launches) == len(set(launches)) == once


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", ["chunk_simple_gla", "fused_recurrent_simple_gla"])
def test_no_batch_and_no_length_compiles_anything_anew(op: str, packed: bool,
                                                       gated: Callable[..., None]) -> None:
    """Split sequences have kernels of their own, which other lengths and batches then share."""
    for lengths, sizes in (((64, 1, 16, 100, 700), (2, 1, 16, 33)), ((2000, 1600, 4096), (2, 1, 3))):
        counts = []
        with recording(HOPPER) as launches:
            for T in lengths:
                for size in sizes:  # size of the batch, or number of sequences
                    if packed:
                        gated(op, B=1, T=T, edges=[0] * size + [T])
                    else:
                        gated(op, B=size, T=T)
                    counts.append(len(launches))
        assert counts[0] > 0 and set(counts) == {counts[0]}, lengths
        split = any(launch.kernel == "simple_gla_alone" for launch in launches)
        assert split == (max(lengths) > 700)



def test_json_brings_back_the_same_launch(record: Record) -> None:
    for launch in record(edges=[0, 5, 128], B=1):
        assert Recorded.from_fields(json.loads(json.dumps(launch.fields()))) == launch


def test_nothing_stays_pretended_after_an_error() -> None:
    started = door._starter
    with pytest.raises(ZeroDivisionError), recording(HOPPER):
        assert probe(CPU) == HOPPER
        raise ZeroDivisionError
    assert probe(CPU).backend in ("cpu", "interpreter")
    assert door._starter is started


def test_the_torch_path_starts_nothing(record: Record) -> None:
    with flashlin.settings(path="torch"):
        assert record() == []


def test_a_stand_in_driver_is_enough_to_compile(record: Record) -> None:
    """With the installed Triton: record, compile for Hopper, and read the facts of the machine code."""
    pytest.importorskip("triton")
    launch = scan(record(K=16, V=16))
    result = compile_launches([Job(90, launch)])[0]
    assert result.ok, result
    assert 0 < result.shared <= launch.shared and result.registers > 0 and result.seconds > 0 and result.matrix


def test_it_compiles_for_amd_too(gated: Callable[..., None]) -> None:
    pytest.importorskip("triton")
    jobs = []
    for arch in ("gfx942", "gfx1100"):  # waves have 64 or 32 lanes
        with flashlin.settings(canary="trial"), recording(parse(f"{arch},triton=3.6.0")) as found:
            gated(K=16, V=16)
        jobs.append(Job(arch, scan(found)))
    for job, result in zip(jobs, compile_launches(jobs), strict=True):
        assert result.ok and 0 < result.shared <= job.launch.shared <= 65536, (job, result)
        assert result.registers > 0 and not result.matrix, result


def test_a_kernel_that_does_not_compile_says_why(record: Record) -> None:
    pytest.importorskip("triton")
    launch = scan(record(K=16, V=16))
    broken = launch._replace(constants=tuple((name, 24 if name == "BT" else value)
                                             for name, value in launch.constants))
    results = compile_launches([Job(90, broken), Job(90, launch)], timeout=600)
    assert results[0].status == "exception" and "power of 2" in results[0].message
    assert results[1].ok, "one failure leaves the others alone"


def test_code_that_the_parent_compiled_is_not_used(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent may have compiled for its own GPU, or for a simulated GPU, whose kernels contain no code."""
    pytest.importorskip("triton")
    job = Job(90, scan(record()))
    kernel = getattr(importlib.import_module(job.launch.module), job.launch.kernel)
    caches = kernel.device_caches if hasattr(kernel, "device_caches") else kernel.cache  # up to Triton 3.2
    monkeypatch.setitem(caches, 0, "code of another device")
    [(_, result)] = compiler.compiled_in_forks([partial(compiler._compile, job)], 1, 120)
    assert result.ok, result


def test_a_child_that_takes_too_long_is_ended(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that exceeds its time limit is ended and reported as a timeout.

    On a busy machine, a child may get too little CPU time and be reported as not tried. The second run
    therefore waits longer, until the child has used its CPU time.
    """
    pytest.importorskip("triton")
    job = Job(90, scan(record()))
    assert compile_launches([job], timeout=0.2)[0].status in ("timeout", NOT_TRIED)
    monkeypatch.setattr(subprocesses, "PATIENCE", 1000)
    [(_, result)] = compiler.compiled_in_forks([partial(compiler._compile, job)], 1, 0.2)
    assert result.status == "timeout", result
