"""The programs whose failures led to flashlin, on the real fla under its patch.

Here they are small and run on a CPU. On a GPU, where this file also runs, they have their real sizes.
``python -m matrix.stacks.seeds`` also runs them raw, each in a process of its own.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import flashlin
from flashlin.compat.target import parse
from flashlin.testing.compile import Job, Result
from flashlin.testing.plugin import TritonMatrix
from flashlin.testing.record import recording
from matrix.stacks import seeds
from tests.integrations import raw_retention
from tests.share import WHOLE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the missing GPU
    import fla.layers

GPU = torch.cuda.is_available()
WHERE = seeds.Where(torch.device("cuda" if GPU else "cpu"), torch.bfloat16 if GPU else torch.float32,
                    small=not GPU)
# On a CPU the parts named BOTH_WAYS are left out, because they compare plain torch with itself there. The one
# with many rows stays.
PARTS = [(program, part) for program, parts in seeds.PROGRAMS.items() for part in parts
         if GPU or "B = 10923" in part or not part.endswith(seeds.BOTH_WAYS)]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Disable trials in child processes, because they would compile every kernel a second time."""
    with seeds.quick(), flashlin.settings(canary="off"):
        yield


@pytest.mark.parametrize("program, part", PARTS)
@pytest.mark.alternate
def test_patched_programs_are_right(program: str, part: str) -> None:
    assert seeds.PROGRAMS[program][part](WHERE, "patched").startswith("right")


@pytest.mark.skipif(GPU, reason="raw layers run on a GPU")
@pytest.mark.parametrize("name", seeds.LAYERS)
def test_raw_layers_raise_without_a_gpu(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"^0 active drivers"):
        seeds.training(name, WHERE, "raw")


@pytest.mark.skipif(GPU, reason="the context would die with it")
def test_a_raw_token_out_of_range_is_an_error_without_a_place() -> None:
    with pytest.raises(IndexError, match=r"^index out of range in self$"):
        seeds.token_out_of_range(WHERE, "raw")


@pytest.mark.skipif(GPU and not WHOLE, reason="as on a CPU: there all gradients are compared")
@pytest.mark.parametrize("name", seeds.LAYERS)
def test_every_weight_of_a_patched_layer_has_a_gradient(name: str) -> None:
    made, x = seeds.layer(name, WHERE), WHERE.drawn(*WHERE.rows)
    with flashlin.patched("fla"):
        grads = seeds.trained(made, x, torch.randn_like(x))
    assert {f"d{weight}" for weight, _ in made.named_parameters()} <= set(grads)
    assert [one for one, grad in grads.items() if not (grad.isfinite().all() and grad.any())] == []


def test_what_is_off_or_missing_is_told() -> None:
    right = {"o": torch.randn(4, 8), "dx": torch.randn(4, 8)}
    assert seeds.compared(right, right, torch.float32) == "right"
    assert seeds.compared({**right, "dx": 1.01 * right["dx"]}, right, torch.float32) == "wrong: dx off by 0.01"
    assert seeds.compared({"o": right["o"]}, right, torch.bfloat16) == "wrong: dx off by inf"
    rounded = {name: x.bfloat16() for name, x in right.items()}
    assert seeds.compared(rounded, right, torch.float32) != "right"
    assert seeds.compared({"o": rounded["o"], "dx": 1.01 * right["dx"]}, right, torch.bfloat16) == "right"


def test_the_long_row_is_planned_for_the_cards_of_the_field() -> None:
    problem = flashlin.Problem("chunk_simple_gla", "simple_gla", "chunk", B=1, T=8192, H=36, K=256, V=256,
                               N=1, dtype="bfloat16", varlen=False, needs_grad=True)
    for machine in ("triton=3.2.0,sm=80", "triton=3.6.0,sm=90", "triton=3.7.1,sm=100"):
        assert flashlin.plan(problem, parse(machine)).path == "triton", machine


@pytest.mark.skipif(GPU, reason="compiled under another Triton, which needs no GPU")
@pytest.mark.alternate
def test_raw_bf16_retention_does_not_compile_on_a_t4(triton_matrix: TritonMatrix) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        triton_matrix(raw_retention.on_a_t4, triton=["3.2.0"], sm=[75], layers=["compile"])
    head, *kernels = str(failed.value).split("\n  3.2.0 ")
    assert head.endswith(f": 0 passed, {len(kernels)} failed, 0 skipped")
    assert {name for name in ("chunk_fwd_kernel_h", "chunk_fwd_kernel_o") if name in str(kernels)} == {
        "chunk_fwd_kernel_h", "chunk_fwd_kernel_o"}
    assert all("map::at" in one or "requires .target sm_80" in one for one in kernels), kernels


@pytest.mark.skipif(GPU, reason="compiled under another Triton, which needs no GPU")
@pytest.mark.alternate
def test_bf16_retention_on_a_t4(compiled: Callable[[str, list[Job]], list[Result]]) -> None:
    """The layer of fla in bf16 is started as on a T4 under Triton 3.2.

    No dot gets bf16, and each kernel of the scan compiles for sm75.
    """
    layer = fla.layers.MultiScaleRetention(hidden_size=128, num_heads=2, layer_idx=0).bfloat16()
    x = torch.randn(1, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings(), flashlin.patched("fla"), recording(parse("triton=3.2.0,sm=75")) as started:
        warnings.simplefilter("ignore")  # about fp32 copies
        layer(x)[0].sum().backward()
    scans = [launch for launch in started if launch.kernel.startswith("simple_gla")]
    assert scans
    assert not [launch for launch in started if "bf16" in str(launch.arguments)
                and "dot" in launch.traits]
    results = compiled("3.2.0", [Job(75, launch) for launch in scans])
    assert [result for result in results if result.status != "ok"] == []
