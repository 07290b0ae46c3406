"""A user's kernels through shield on a real GPU.

Launches that fail without shield give right results with shield. Autotuning skips configurations that fail.
"""
from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import flashlin
from flashlin.shielding import launcher as shielding
from tests import foreign

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


def grid(meta: dict[str, Any]) -> tuple[int, int]:
    return triton.cdiv(meta["T"], meta["BT"]), meta["B"] * meta["H"]


def twice(x: torch.Tensor, kernel: Any, **options: Any) -> torch.Tensor:
    o = torch.full_like(x, float("nan"))
    kernel[grid](x, o, x.shape[2], x.shape[0], H=x.shape[1], BT=16, **options)
    return o


def seen_by(shielded: Any) -> list[dict[str, Any]]:
    """Return the launches that the shielded kernel makes."""
    seen: list[dict[str, Any]] = []
    start = shielded._start

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return start(*args, **kwargs)
    shielded._start = noting
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_65538_programs_on_axis_1_fail_raw_and_are_right_in_parts(dtype: torch.dtype) -> None:
    x = torch.randn(10923, 6, 20, device="cuda", dtype=dtype)
    with pytest.raises(Exception, match="invalid argument"):
        twice(x, foreign.scaled)
    shielded = flashlin.shield(foreign.scaled, batch={"x": 0, "o": 0}, batch_axis=1, batch_size="B")
    started = seen_by(shielded)
    assert torch.equal(twice(x, shielded), 2 * x + 1)
    assert [start["grid"] for start in started] == [(2, 32772), (2, 32766)]
    with pytest.raises(flashlin.UnsupportedError, match="65538 programs on grid axis 1, need at most 65535"):
        twice(x, flashlin.shield(foreign.scaled))


def test_a_function_in_parts_and_its_gradient() -> None:
    x = torch.randn(10923, 6, 20, device="cuda", requires_grad=True)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return twice(x, foreign.scaled)

        @staticmethod
        def backward(context: Any, do: torch.Tensor) -> torch.Tensor:
            return twice(do.contiguous(), foreign.scaled) - 1
    o = flashlin.shield(lambda x: Twice.apply(x), batch={"x": 0})(x)
    torch.testing.assert_close(o, 2 * x + 1)
    o.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))


def test_eight_warps_are_planned_as_the_release_allows_and_run() -> None:
    torch.manual_seed(0)
    T, K = 256, 64
    k, v, w = (torch.randn(4, T, K, device="cuda", dtype=torch.bfloat16) * 0.1 for _ in range(3))
    g, h = -torch.rand(4, T // 64, device="cuda").repeat_interleave(64, 1), torch.zeros(4, T // 64, K, K,
                                                                                        device="cuda")
    shielded = flashlin.shield(foreign.states)
    started = seen_by(shielded)
    shielded[(4,)](k, v, w, h, g, T, K=K, V=K, BT=64, num_warps=8, num_stages=2)
    release, capability = triton.__version__.split(".")[:2], torch.cuda.get_device_capability()
    limited = capability == (9, 0) and release in (["3", "0"], ["3", "1"], ["3", "2"], ["3", "3"])
    assert started[0]["num_warps"] == (4 if limited else 2 if capability[0] in (10, 11) else 8)
    wanted = torch.zeros_like(h)
    state = torch.zeros(4, K, K, device="cuda")
    for n in range(T // 64):
        rows = slice(64 * n, 64 * n + 64)
        wanted[:, n] = state
        new = v[:, rows] - (w[:, rows].float() @ state.bfloat16().float()).bfloat16()
        state = state * g[:, n].exp()[:, None, None] + k[:, rows].float().transpose(1, 2) @ new.float()
    torch.testing.assert_close(h, wanted, rtol=2e-2, atol=2e-2)


RAW = """
import torch
from tests import foreign
k, v, w = (torch.randn(4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
h, g = torch.zeros(4, 4, 64, 64, device="cuda"), torch.zeros(4, 256, device="cuda")
foreign.states[(4,)](k, v, w, h, g, 256, K=64, V=64, BT=64, num_warps=8, num_stages=2)
torch.cuda.synchronize()
"""


def test_eight_warps_raw_end_the_process_where_the_plan_says_so() -> None:
    ran = subprocess.run([sys.executable, "-c", RAW], capture_output=True, text=True, check=False,
                         cwd=Path(__file__).parents[2])
    release, hopper = triton.__version__.split(".")[:2], torch.cuda.get_device_capability() == (9, 0)
    if hopper and release == ["3", "2"]:
        assert ran.returncode == -signal.SIGABRT and "reshapeOuts" in ran.stderr, (ran.returncode,
                                                                                   ran.stderr[-500:])
    elif hopper and release == ["3", "3"]:
        assert ran.returncode == 1 and "chooseStMatrixLayoutLeadingOffset" in ran.stderr, (ran.returncode,
                                                                                           ran.stderr[-500:])
    elif hopper and release >= ["3", "4"]:
        assert ran.returncode == 0, ran.stderr[-500:]


def test_a_configuration_that_does_not_compile_is_left_out_and_the_children_fill_the_cache() -> None:
    tuned = flashlin.autotune([triton.Config({"BT": 24}), triton.Config({"BT": 16}),
                               triton.Config({"BT": 32})], ["T"])(foreign.scaled)
    x = torch.randn(8, 6, 100, device="cuda")
    o = torch.zeros_like(x)
    with pytest.warns(UserWarning, match="configuration BT: 24.* fails"):  # tl.arange requires a power of two
        tuned[grid](x, o, 100, 8, H=6)
    torch.testing.assert_close(o, 2 * x + 1)
    assert tuned.best_config.kwargs["BT"] in (16, 32)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_are_launched_there() -> None:
    x = torch.randn(3, 2, 20, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(twice(x, flashlin.shield(foreign.scaled)), 2 * x + 1)
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="need all tensors on one device"):
        flashlin.shield(foreign.scaled)[(2, 6)](x, x.to("cuda:0"), 20, 3, H=2, BT=16)


def test_a_decision_is_for_the_device_of_the_tensors() -> None:
    shielded = flashlin.shield(foreign.scaled)
    twice(torch.zeros(1, 1, 16, device="cuda"), shielded)
    with pytest.raises(flashlin.UnsupportedError, match="tensors on the CPU"):
        twice(torch.zeros(1, 1, 16), shielded)
    assert isinstance(shielded, shielding.Launcher)
