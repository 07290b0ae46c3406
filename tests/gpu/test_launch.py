"""Direct starts and replays on a GPU give the same bits as Triton's own launch and ordinary runs.

This must hold for any address of the tensors, and for any change between two calls.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import flashlin
from benchmarks.host import ordinary
from flashlin.compat.launch_cache import Kernel
from flashlin.ops._common import recipe
from flashlin.testing.cases import CASES
from flashlin.testing.compare import Case
from tests.share import share

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = (torch.float32, torch.bfloat16, torch.int32)
INTEGERS = (0, 1, 16, 17, 2**31 - 1, 2**31, 2**40)


@triton.jit(do_not_specialize=["T"])
def scaled(x, o, n, m, T, f, N: tl.constexpr):
    """Compute o = x f + n + m + T. The integers may have 64 bits."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    y = tl.load(x + at).to(tl.float32) * f + (n % 7) + (m % 5) + (T % 3)
    tl.store(o + at, y.to(o.dtype.element_ty))


# --- compiled kernels ---

def started(kernel: Kernel, x: torch.Tensor, n: int, m: int, T: int, f: float) -> None:
    """Compare a direct start with a start by Triton, twice."""
    for _ in range(2):
        own, expected = (torch.full((64,), -1, dtype=x.dtype, device=x.device) for _ in range(2))
        kernel.start(2, (x, own, n, m, T, f, 32), 4, 2)
        scaled[(2,)](x, expected, n, m, T, f, 32, num_warps=4, num_stages=2)
        assert torch.equal(own, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_at_any_distance_and_integers_of_any_size(dtype: torch.dtype, theirs: list[Any]) -> None:
    kernel, memory = Kernel(scaled), torch.arange(256, device="cuda").to(dtype)
    for offset in (0, 1, 4, 16, 3):
        for n in INTEGERS:
            started(kernel, memory[offset:offset + 64], n, INTEGERS[-1 - INTEGERS.index(n)], n, 0.5)
    theirs.clear()
    kernel.start(2, (memory[:64], memory[64:128], 0, 2**40, 0, 0.5, 32), 4, 2)
    assert bool(theirs) != flashlin_is_direct()


def flashlin_is_direct() -> bool:
    """Return True if flashlin starts kernels directly on this Triton release."""
    return Kernel(scaled).plain


def test_each_device_has_its_own(theirs: list[Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernel = Kernel(scaled)
    for device in (0, 1, 0, 1):
        with torch.cuda.device(device):
            started(kernel, torch.arange(64.0, device=f"cuda:{device}"), 3, 4, 5, 2.0)


def test_the_current_stream_is_used() -> None:
    kernel, x, o = Kernel(scaled), torch.zeros(64, device="cuda"), torch.empty(64, device="cuda")
    values = (x, o, 0, 0, 0, 1.0, 32)
    for _ in range(2):
        kernel.start(2, values, 4, 2)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3)
        kernel.start(2, values, 4, 2)  # after the fill, on the same stream
    torch.cuda.synchronize()
    assert bool((o == 3).all())


def test_hooks_see_every_start(theirs: list[Any]) -> None:
    if not hasattr(triton, "knobs"):
        pytest.skip("hooks are elsewhere before Triton 3.4")
    kernel, x, seen = Kernel(scaled), torch.zeros(64, device="cuda"), list[Any]()
    values = (x, torch.empty_like(x), 0, 0, 0, 1.0, 32)
    for _ in range(2):
        kernel.start(2, values, 4, 2)
    hook = seen.append
    chain = triton.knobs.runtime.launch_enter_hook
    if chain is None or not hasattr(chain, "add"):
        pytest.skip("no chain of hooks")
    chain.add(hook)
    try:
        for _ in range(2):
            kernel.start(2, values, 4, 2)
    finally:
        chain.remove(hook)
    assert len(seen) == 2


def test_debug_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    if not flashlin_is_direct():
        pytest.skip("kernels are not started directly here")
    kernel, x = Kernel(scaled), torch.arange(64.0, device="cuda")
    started(kernel, x, 3, 4, 5, 2.0)
    [before] = next(iter(kernel.kinds.values())).compiled.values()  # type: ignore[union-attr]
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    started(kernel, x, 3, 4, 5, 2.0)
    [after] = next(iter(kernel.kinds.values())).compiled.values()  # type: ignore[union-attr]
    assert after.known[0] != before.known[0]


# --- ops ---

def results(case: Case, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return outputs and gradients of a case whose inputs are drawn with this seed."""
    made = case.make(dtype, torch.Generator().manual_seed(seed))
    x = {name: t.cuda().requires_grad_(t.is_floating_point() and name not in case.constant)
         for name, t in made.items()}
    outputs = list(case.call(**x).values())
    out, leaves = [t for t in outputs if t.requires_grad], [t for t in x.values() if t.requires_grad]
    generator = torch.Generator("cuda").manual_seed(seed)
    pulls = [torch.randn(t.shape, device="cuda", generator=generator).to(t.dtype) for t in out]
    gradients = torch.autograd.grad(out, leaves, pulls, allow_unused=True) if out else ()
    return [t.detach() for t in (*outputs, *gradients) if t is not None]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(one, other, strict=True))


CHOSEN = share([case for case in CASES if case.op.startswith(("chunk_", "fused_recurrent_"))], 0, 6)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: f"{case.op} {case.id}")
def test_cases_to_the_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of each case give the same bits as ordinary runs, also when they are replayed in two stages.

    Two stages of a replay share memory if that saves at least ``recipe.WORTH`` bytes, here one byte.
    """
    monkeypatch.setattr(recipe, "WORTH", 1)
    for seed in range(5):
        got = results(case, torch.bfloat16, seed)
        with ordinary():
            wanted = results(case, torch.bfloat16, seed)
        assert same(got, wanted), seed


def inputs(op: str, grad: bool = True, T: int = 200) -> dict[str, Any]:
    q, k, v = (torch.randn(2, T, 4, 64, device="cuda").bfloat16() for _ in "qkv")
    x = {"q": q, "k": F.normalize(k, dim=-1), "v": v, "g": -torch.rand(*q.shape[:3], device="cuda")}
    if "kda" in op:
        x["g"] = -torch.rand_like(q, dtype=torch.float32)
    if "simple" not in op:
        x["beta"] = torch.rand(*q.shape[:3], device="cuda").bfloat16()
    return {name: t.requires_grad_(grad) for name, t in x.items()}


OPS = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_kda")


def called(op: str, x: dict[str, Any]) -> list[torch.Tensor]:
    o, _ = getattr(flashlin, op)(**x)
    leaves = [t for t in x.values() if t.requires_grad]
    return [o, *torch.autograd.grad(o, leaves, torch.ones_like(o))]


@pytest.mark.parametrize("op", OPS)
def test_runs_are_made_again_and_whatever_changes_is_noticed(op: str, again: list[Any]) -> None:
    def check(x: dict[str, Any]) -> None:
        got = called(op, x)
        with ordinary():
            assert same(got, called(op, x))
    if not flashlin_is_direct():
        pytest.skip("kernels are not started directly here")
    for _ in range(4):
        check(inputs(op))
    assert len(again) == 4  # the third and the fourth call were replayed, forward and backward
    x = inputs(op)
    fused = torch.cat([x[name].detach() for name in ("q", "k", "v")], -1)  # its views are not contiguous
    views = dict(zip(("q", "k", "v"), fused.split(64, -1), strict=True))
    shifted = torch.empty(x["v"].numel() + 1, device="cuda", dtype=torch.bfloat16)[1:].view(x["v"].shape)
    shifted.copy_(x["v"].detach())  # 2 bytes after a multiple of 16
    for change in (views, {"v": shifted}, {"k": x["q"]}, inputs(op, T=64), {"q": x["q"].float()}):
        for _ in range(4):
            check({name: t.detach().requires_grad_() for name, t in {**x, **change}.items()})


@pytest.mark.parametrize("op", OPS)
def test_a_graph_of_a_run_made_again(op: str, again: list[Any]) -> None:
    x, side = inputs(op, grad=False), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(4):
            getattr(flashlin, op)(**x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=side):
        o, _ = getattr(flashlin, op)(**x)
    for seed in range(3):
        torch.manual_seed(seed)
        for name, t in inputs(op, grad=False).items():
            x[name].copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        with torch.no_grad(), ordinary():
            assert torch.equal(o, getattr(flashlin, op)(**x)[0])
    assert not flashlin_is_direct() or again


@pytest.fixture
def threads() -> Iterator[Callable[..., Any]]:
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(4) as pool:
        yield pool.map


@pytest.mark.parametrize("op", OPS)
def test_threads_and_streams_of_their_own(op: str, threads: Callable[..., Any]) -> None:
    given = [inputs(op, grad=False) for _ in range(16)]

    def call(x: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                o, _ = getattr(flashlin, op)(**x)
            torch.cuda.current_stream().synchronize()
        return o
    torch.cuda.synchronize()
    got = list(threads(call, given))
    with torch.no_grad(), ordinary():
        assert all(torch.equal(o, getattr(flashlin, op)(**x)[0]) for o, x in zip(got, given, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_no_more_memory(op: str) -> None:
    x = inputs(op, T=2048)

    def peak() -> int:
        for _ in range(4):
            called(op, x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        called(op, x)
        return torch.cuda.max_memory_allocated() - before
    with ordinary():
        usual = peak()
    assert peak() <= 1.05 * usual
