"""A slice of the matrix small enough for every push: five releases from one end to the other, two generations of cards."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashlin
from flashlin.compat.target import parse
from flashlin.testing.compile import Job, Result
from flashlin.testing.record import Recorded, recording

RELEASES = ("3.0.0", "3.2.0", "3.3.1", "3.6.0", "3.9.0")
CARDS = (90, 80)


def norms() -> None:
    x, w = (torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((4, 64, 1024), (1024,)))
    flashlin.rms_norm(x, w, None).sum().backward()


def of_a_layer() -> None:
    """The gated norm of each head and the short convolution, as a Gated DeltaNet layer has them."""
    x, w = (torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((4, 64, 128), (128,)))
    y = flashlin.rms_norm_gated(x, x, w, None)
    assert isinstance(y, torch.Tensor)
    y.sum().backward()
    x, w = (torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((2, 64, 1024), (1024, 4)))
    flashlin.causal_conv1d(x, w, activation="silu")[0].sum().backward()
    with torch.no_grad():
        flashlin.causal_conv1d_update(x[:, 0], torch.zeros(2, 1024, 4, dtype=torch.bfloat16), None, w, activation="silu")


def gated_delta_net() -> None:
    q, k, v = (torch.zeros(1, 128, 2, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    g, beta = (torch.zeros(1, 128, 2, requires_grad=True) for _ in range(2))
    flashlin.chunk_gated_delta_rule(q, k, v, g, beta)[0].sum().backward()


@pytest.mark.parametrize("version", RELEASES)
def test_planned_launches_compile(version: str, compiled: Callable[[str, list[Job]], list[Result]], gated: Callable[..., None]) -> None:
    jobs = [Job(sm, launch) for sm in CARDS for launch in _launches(version, sm, gated)]
    results = compiled(version, jobs)
    failed = [f"sm_{job.sm} {job.launch}: {result}" for job, result in zip(jobs, results, strict=True) if not result.ok]
    assert not failed, "\n".join(failed)
    greedy = [f"sm_{job.sm} {job.launch}: {result.shared} bytes of shared memory, planned {job.launch.shared}"
              for job, result in zip(jobs, results, strict=True) if result.shared > job.launch.shared]
    assert not greedy, "\n".join(greedy)
    assert all(result.matrix for job, result in zip(jobs, results, strict=True) if "dot" in job.launch.traits), "a dot without tensor cores"


def _launches(version: str, sm: int, gated: Callable[..., None]) -> list[Recorded]:
    with recording(parse(f"triton={version},sm={sm}")) as found:
        gated("chunk_simple_gla", K=128, V=128)
        norms()
        if sm == 90:
            of_a_layer()
            gated_delta_net()
    assert {"simple_gla_scan", "simple_gla_dq", "simple_gla_dk", "simple_gla_dv"} <= {launch.kernel for launch in found}
    return found
