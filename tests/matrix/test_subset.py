"""A part of the matrix that is small enough for every CI run.

It has five releases from the oldest to the newest, two generations of GPUs, and a fifth of the launches
under each release. A deliberately broken kernel must be found.
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashlin import policy
from flashlin.compat.releases import supported
from flashlin.compat.target import parse
from flashlin.kernels.simple_gla import recipe
from flashlin.testing.compile import Job, Result
from flashlin.testing.environments import NotInstallable
from flashlin.testing.record import Recorded
from matrix import run as matrix
from matrix import support, workload
from matrix.results import Card, Cell, Matrix
from tests.share import share

RELEASES = ("3.0.0", "3.2.0", "3.3.1", "3.6.0", supported()[-1])
CALLS = {80: ("chunk_simple_gla bfloat16 D=128", "rms_norm bfloat16 D=2048"),
         90: ("chunk_simple_gla bfloat16 D=128", "chunk_gated_delta_rule bfloat16 D=128",
              "fused_recurrent_gated_delta_rule bfloat16 D=128 decoding", "rms_norm bfloat16 D=2048",
              "rms_norm_gated bfloat16 D=128", "causal_conv1d bfloat16 W=4",
              "causal_conv1d_update bfloat16 W=4", "fused_gdn_gate bfloat16 H=32 K=64",
              "fused_kda_gate bfloat16 K=128, lower bound", "fused_addcmul_rwkv7 bfloat16 H=32 K=64",
              "fused_k_rwkv7 bfloat16 H=32 K=64", "gate_output_correction bfloat16 H=32 K=64",
              "chunk_gla bfloat16 D=128", "chunk_rwkv6 bfloat16 D=128",
              "rotary_embedding bfloat16 D=128 of 160, packed, interleaved",
              "cross_entropy_loss bfloat16 V=50257, all terms")}

BREAKS = "chunk_simple_gla bfloat16 D=64"


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.alternate
def test_planned_launches_compile(version: str, compiled: Callable[[str, list[Job]], list[Result]]) -> None:
    jobs = share([Job(sm, launch) for sm in CALLS for launch in _launches(version, sm)],
                 RELEASES.index(version), len(RELEASES))
    results = compiled(version, jobs)
    failed = [f"sm_{job.sm} {job.launch}: {result}"
              for job, result in zip(jobs, results, strict=True) if not result.ok]
    assert not failed, "\n".join(failed)
    greedy = [f"sm_{job.sm} {job.launch}: {result.shared} bytes of shared memory, planned {job.launch.shared}"
              for job, result in zip(jobs, results, strict=True) if result.shared > job.launch.shared]
    assert not greedy, "\n".join(greedy)
    assert all(result.matrix
               for job, result in zip(jobs, results, strict=True)
               if "dot" in job.launch.traits), "a dot without tensor cores"


def _launches(version: str, sm: int) -> list[Recorded]:
    by_name = {str(call): call for call in workload.calls()}
    found = [launch for name in CALLS[sm]
             for launch in workload.seen(by_name[name], parse(f"triton={version},sm={sm}")).launches]
    assert {"simple_gla_scan", "simple_gla_states", "simple_gla_dv", "simple_gla_grads",
            "norm_forward"} <= {launch.kernel for launch in found}
    return list(dict.fromkeys(found))


@pytest.mark.alternate
def test_a_kernel_broken_on_purpose_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel has eight warps on sm_90 under 3.2.0, and heads of 64.

    The check that prevents it is off.
    """
    for name in ("over_k", "over_v"):
        monkeypatch.setattr(recipe, name, lambda *args, chosen=getattr(recipe, name): (
            config._replace(num_warps=8) for config in chosen(*args)))
    monkeypatch.setattr(policy, "_current", policy.Policy(policy="off"))
    monkeypatch.setattr(workload, "calls",
                        lambda only=[call for call in workload.calls() if str(call) == BREAKS]: iter(only))
    cell, card = Cell(triton="3.2.0", kind="gate", layers=("compile",)), Card(name="sm90", example="H100",
                                                                              kind="gate")
    try:
        result = matrix.run(cell, (card,), tmp_path)
    except NotInstallable as error:
        pytest.skip(str(error))
    told = support.failures(Matrix(card=(card,), cell=(cell,)), result)
    assert told and all(line.startswith("chunk_simple_gla sm90 triton 3.2.0: bfloat16 D=64: simple_gla_")
                        for line in told)
    assert any("warps=8" in line and "reshapeOuts" in line for line in told), told
